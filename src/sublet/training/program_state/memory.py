"""Blocks of memory, and the arrays and tensors that are views of them.

Rules of this file:
- A block is saved once, whoever views it: two arrays of one memory are two arrays of one memory afterwards,
  NumPy's and torch's alike.
- A block that was there when the loop began is filled where it is. It is named after the first array that
  held it then.
- A large block that still is what it was when the loop began need not be saved, where the script makes the
  same one at each start: its digest is saved, and compared.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from sublet.core.errors import BadInput

#: A block of at least this size is compared with what it was when the loop began.
LARGE_BYTES = 1 << 20
#: The references to a viewed array that are ours: of its record, of its block (two), of the call that counts.
_OURS = 4


def numpy_here() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy if hasattr(numpy, "ndarray") else None


def torch_here() -> Any:
    """The imported torch; None while there is none, or while it is still being imported."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "UntypedStorage") and hasattr(torch, "nn") else None


def digest_of(memory: memoryview) -> str:
    found = import_module("blake3").blake3(memory, max_threads=2 if memory.nbytes > 1 << 24 else 1)
    return str(found.hexdigest()[:32])


def with_bytes(state: Any) -> Any:
    """A generator's state with its arrays as bytes: they are no arrays of the program."""
    if isinstance(state, dict):
        return {name: with_bytes(value) for name, value in state.items()}
    return (str(state.dtype), state.tobytes()) if hasattr(state, "tobytes") else state


def with_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: with_arrays(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return import_module("numpy").frombuffer(state[1], dtype=state[0]).copy()
    return state


class Overlap(Exception):
    """A block lies inside one that was found later: the taking begins again, with the larger one known."""


@dataclass(slots=True)
class MemoryBlock:
    name: str
    address: int
    size: int
    holder: Any  # its bytes, as an array of NumPy, or as a tensor where it lies on a device
    keeps: Any  # whose memory it is


@dataclass(slots=True)
class ViewedArray:
    """An array that owns its memory, and what its views show of it."""

    root: Any
    shown: dict[int, tuple[int, int, bool]] = field(default_factory=dict)  # by id of the view

    @property
    def holders(self) -> int:
        return sum(holds for _, _, holds in self.shown.values())


@dataclass(slots=True)
class Blocks:
    """The blocks that one taking finds. Their names last from one taking to the next."""

    names: dict[tuple[int, int], str] = field(default_factory=dict)  # address and size
    larger: dict[int, tuple[int, Any]] = field(default_factory=dict)  # address: size and owner of a whole one
    found: dict[str, MemoryBlock] = field(default_factory=dict)
    _addresses: list[int] = field(default_factory=list)
    _by_address: dict[int, MemoryBlock] = field(default_factory=dict)
    count: int = 0
    _viewed: dict[int, ViewedArray] = field(default_factory=dict)
    _shown: dict[str, set[tuple[int, int]]] = field(default_factory=dict)  # of blocks that tensors show

    def begin(self) -> None:
        self._viewed, self._shown = {}, {}
        self.found, self._addresses, self._by_address = {}, [], {}

    def named(self, address: int, size: int, name: str) -> None:
        """What was there when the loop began. The first name counts."""
        self.names.setdefault((address, size), name)

    def place(self, address: int, size: int, owner: Any) -> tuple[str, int]:
        """The block that has this memory, and where in it the memory begins."""
        if not size:
            return "", 0
        known = self._around(address, size)
        if known is not None:
            return known.name, address - known.address
        for start, (length, whole) in self.larger.items():
            if start <= address and address + size <= start + length:
                return self._add(start, length, whole).name, address - start
        return self._add(address, size, owner).name, 0

    def viewed(self, root: Any, view: Any, low: int, high: int) -> None:
        known = self._viewed.setdefault(id(root), ViewedArray(root))
        known.shown[id(view)] = (low, high, view.base is root)

    def shows(self, name: str, low: int, high: int) -> None:
        """Of a block, by a tensor. A block that is named here by all who have it is not seen as a whole."""
        if high > low:
            self._shown.setdefault(name, set()).add((low, high))

    def shown(self, held_by_us: Callable[[Any], bool]) -> dict[str, list[list[int]]]:
        """What the program sees of blocks that it does not see as a whole: begin and end of each part. What
        lies beside it may be memory that nobody ever wrote, and is not compared."""
        found = {name: _merged(parts) for name, parts in self._shown.items()}
        for one in self._viewed.values():
            block = self._by_address.get(one.root.__array_interface__["data"][0])
            if block is None or block.keeps is not one.root or block.size != one.root.nbytes:
                continue
            if sys.getrefcount(one.root) == one.holders + held_by_us(one.root) + _OURS:
                parts = {(low - block.address, high - block.address) for low, high, _ in one.shown.values()}
                found[block.name] = _merged(parts)
        return {name: parts for name, parts in found.items() if parts != [[0, self.found[name].size]]}

    def _around(self, address: int, size: int) -> MemoryBlock | None:
        at = bisect.bisect_right(self._addresses, address)
        before = self._by_address[self._addresses[at - 1]] if at else None
        if before is not None and address < before.address + before.size:
            if address + size <= before.address + before.size:
                return before
            raise self._overlap(before.address, address + size - before.address)
        if at < len(self._addresses) and self._addresses[at] < address + size:
            raise self._overlap(address, size)
        return None

    def _overlap(self, address: int, size: int) -> Overlap:
        self.larger[address] = (size, None)
        return Overlap()

    def _add(self, address: int, size: int, owner: Any) -> MemoryBlock:
        name = self.names.get((address, size))
        if name is None or name in self.found:
            self.count += 1
            name = self.names[address, size] = f"m{self.count}"
        block = MemoryBlock(name, address, size, bytes_at(address, size, owner), owner)
        self.found[name] = block
        bisect.insort(self._addresses, address)
        self._by_address[address] = block
        return block


#: Begin and end of each part; None: the whole.
ShownParts = list[list[int]] | None


def in_both(one: ShownParts, other: ShownParts) -> ShownParts:
    if one is None or other is None:
        return one if other is None else other
    overlaps = ([max(a, c), min(b, d)] for a, b in one for c, d in other)
    return [[low, high] for low, high in overlaps if low < high]


def _merged(parts: set[tuple[int, int]]) -> list[list[int]]:
    found: list[list[int]] = []
    for low, high in sorted(parts):
        if found and low <= found[-1][1]:
            found[-1][1] = max(high, found[-1][1])
        else:
            found.append([low, high])
    return found


def bytes_at(address: int, size: int, owner: Any) -> Any:
    torch = torch_here()
    if torch is not None and isinstance(owner, torch.UntypedStorage) and owner.device.type != "cpu":
        return torch.empty(0, dtype=torch.uint8, device=owner.device).set_(owner)
    numpy = import_module("numpy")
    there: Any = (ctypes.c_ubyte * size).from_address(address)
    there.owner = owner  # a tensor may be made on this memory, and outlive what it was found by
    return numpy.frombuffer(there, dtype=numpy.uint8)


def on_host(holder: Any) -> Any:
    """The bytes of a block where this process can read them: themselves, or a copy from a device."""
    return holder.cpu().numpy() if hasattr(holder, "untyped_storage") else holder


def digest_of_holder(holder: Any, shown: ShownParts = None) -> str:
    """`shown`: only these parts of it count."""
    memory = memoryview(on_host(holder))
    if shown is None:
        return digest_of(memory)
    return " ".join(digest_of(memory[low:high]) for low, high in shown)


class LargeBlocks:
    """The large blocks that were there when the loop began, and which of them still are what they were."""

    def __init__(self) -> None:
        self.began: dict[str, str] = {}
        self._unchanged: set[str] = set()
        #: Those that the script's beginning makes alike each time, so that they need not be saved.
        self.made_alike: set[str] = set()

    def begin(self, blocks: Mapping[str, Any]) -> None:
        large = {n: b for n, b in blocks.items() if n.startswith("a") and b.nbytes >= LARGE_BYTES}
        self.began = {name: digest_of_holder(block) for name, block in large.items()}
        self._unchanged = set(self.began)
        if sum(block.nbytes for block in large.values()) > _too_much_to_keep():
            self.made_alike = set(self.began)  # seen to be so before a resume relies on it

    def compare_with(self, earlier: Mapping[str, str]) -> None:
        """`earlier`: the digests in another process whose script began the same way."""
        self.made_alike = {name for name, digest in self.began.items() if earlier.get(name) == digest}

    def still_the_same(self, blocks: Mapping[str, Any]) -> dict[str, str]:
        """Digests of those that need not be saved."""
        found = {}
        for name in sorted(self._unchanged & self.made_alike & blocks.keys()):
            if digest_of_holder(blocks[name]) == self.began[name]:
                found[name] = self.began[name]
            else:
                self._unchanged.discard(name)
        return found


def _too_much_to_keep() -> int:
    """A state is kept twice in memory while it is saved."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024 // 8
    return 1 << 30


# --- putting back -------------------------------------------------------------------------------------------


class Refilling:
    """The blocks of one restore: those of the new process, and new ones for what it does not have."""

    def __init__(self, saved: dict[str, Any], sizes: dict[str, int], there: Callable[[str], Any]) -> None:
        self._saved, self._sizes = saved, sizes
        self._there = there  # the bytes of a block that the new process has, by name; None if it has none
        self._made: dict[str, Any] = {}

    def bytes(self, name: str) -> Any:
        """The memory of a block: an array or tensor of bytes, already filled."""
        if name not in self._made:
            there = self._there(name)
            if there is None or there.nbytes != self._sizes[name]:
                there = import_module("numpy").empty(self._sizes[name], dtype="uint8")
            self.use(name, there)
        return self._made[name]

    def is_made(self, name: str) -> bool:
        return name in self._made

    def use(self, name: str, holder: Any) -> None:
        """This memory becomes the block."""
        self._made[name] = holder
        if name in self._saved:
            fill_bytes(holder, self._saved[name])

    def rest(self) -> None:
        """Blocks of the new process that nothing asked for."""
        for name in self._sizes:
            self.bytes(name)


def fill_bytes(holder: Any, saved: Any) -> None:
    """Without telling autograd, which would call it a change of a leaf."""
    if hasattr(holder, "untyped_storage"):
        torch = torch_here()
        holder.copy_(torch.from_numpy(on_host(saved)) if not hasattr(saved, "untyped_storage") else saved)
    elif holder.flags.writeable:
        holder[...] = on_host(saved)
    else:
        address = holder.__array_interface__["data"][0]
        source = import_module("numpy").ascontiguousarray(on_host(saved))
        ctypes.memmove(address, source.__array_interface__["data"][0], source.nbytes)


@contextlib.contextmanager
def restoring(refilling: Refilling) -> Iterator[None]:
    """While an unpickler works, the functions that make arrays ask this for memory."""
    _RESTORING.append(refilling)
    try:
        yield
    finally:
        _RESTORING.pop()


_RESTORING: list[Refilling] = []


def memory_of(name: str) -> Any:
    if not _RESTORING:
        raise BadInput("a saved program is put back by the shim only, and nothing was put back")
    return _RESTORING[-1].bytes(name)


def use_as(name: str, holder: Any) -> bool:
    """Make this new memory the block, unless the block is there already."""
    if _RESTORING[-1].is_made(name):
        return False
    _RESTORING[-1].use(name, holder)
    return True
