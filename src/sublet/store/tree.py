"""A state as a tree: plain JSON with tensors and bytes taken out, and back. No pickle, no code.

Rules of this file:
- What can be saved is closed: numbers, texts, bytes, None, lists, tuples, dicts, counters, sets, and arrays
  of NumPy, torch and JAX. Anything else is an error that names its path in the tree.
- Bit-exact or refused: floats that JSON cannot write travel as their eight bytes, dicts keep their order and
  their keys' types.
- Tensors that share memory share it again: what is taken out is storages, and tensors are views of them.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from sublet.core.checkpoints.checkpoint import MAX_DEPTH, TensorEntry
from sublet.core.errors import Damaged, MissingExtra, Unsavable

#: A lone view of a storage at least so many times its size is saved as itself, not with everything around it.
LONELY = 2
#: Larger ones travel as hexadecimal: Python writes and reads no more than 4,300 decimal digits.
_PLAIN_INT = 1 << 64


@dataclass(frozen=True, slots=True)
class TakenState:
    """A state taken apart."""

    tree: Any
    tensors: tuple[TensorEntry, ...]
    storages: tuple[memoryview, ...]  # bytes, contiguous; they belong to the state until it is copied
    keeps: tuple[Any, ...]  # what owns the memory


def take_apart(state: Any) -> TakenState:
    return _Taker().run(state)


def _torch() -> Any:
    return sys.modules.get("torch")


def _numpy() -> Any:
    return import_module("numpy")


class _Taker:
    def __init__(self) -> None:
        self._tensors: list[TensorEntry] = []
        self._storages: list[memoryview] = []
        self._keeps: list[Any] = []
        self._known: dict[int, int] = {}  # id of an object to its tensor
        self._torch_storages: dict[tuple[int, int], int] = {}  # address and size to its storage
        self._sharers: dict[int, set[int]] = {}  # address of a torch storage to the tensors that view it

    def run(self, state: Any) -> TakenState:
        torch = _torch()
        if torch is not None:
            with contextlib.suppress(_Deep):  # encoding it says where
                self._count(state, torch, 0)
        tree = self._encode(state, "state", 0)
        return TakenState(tree, tuple(self._tensors), tuple(self._storages), tuple(self._keeps))

    def _count(self, value: Any, torch: Any, depth: int) -> None:
        """How many tensors view each storage: a lone slice of a large one need not bring all of it."""
        if depth > MAX_DEPTH:
            raise _Deep  # at once: what contains itself twice has more paths than can be walked
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and value.device.type == "cpu":
                address = value.untyped_storage().data_ptr()
                self._sharers.setdefault(address, set()).add(id(value))
        elif isinstance(value, dict):
            for member in value.values():
                self._count(member, torch, depth + 1)
        elif isinstance(value, (list, tuple)):
            for member in value:
                self._count(member, torch, depth + 1)

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Unsavable(f"{path[:200]} is nested deeper than {MAX_DEPTH}, or contains itself")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_PLAIN_INT < value < _PLAIN_INT else {"$int": f"{value:x}"}
        if kind is str:
            # Two halves of a surrogate pair would come back from JSON as one character.
            return {"$text": value.encode("utf-8", "surrogatepass").hex()} if _has_surrogate(value) else value
        if kind is float:
            return value if value - value == 0 else {"$float": struct.pack("<d", value).hex()}
        if kind is complex:
            return {
                "$complex": [self._encode(value.real, path, depth), self._encode(value.imag, path, depth)]
            }
        if kind in (bytes, bytearray):
            return {"$bytes" if kind is bytes else "$bytearray": self._add_bytes(value)}
        if kind is list:
            return [self._encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
        if isinstance(value, tuple) and (kind is tuple or kind.__module__ == "torch"):
            return {"$tuple": [self._encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]}
        if kind is dict or kind is OrderedDict:
            return self._encode_dict(value, path, depth)
        if kind is Counter:
            return {"$counter": self._encode(dict(value), path, depth + 1)}
        if kind in (set, frozenset):
            members = [self._encode(v, f"{path}{{}}", depth + 1) for v in value]
            return {"$set" if kind is set else "$frozenset": sorted(members, key=json.dumps)}
        found = self._tensor(value, path)
        if found is not None:
            return {"$tensor": found}
        raise Unsavable(
            f"{path[:200]} is {kind.__module__}.{kind.__qualname__}, which cannot be saved without running "
            "code on restore",
            remedy="save what it is made of: numbers, texts, lists, dicts and tensors (for a module, its "
            "state_dict())",
        )

    def _encode_dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        plain = type(value) is dict and all(
            type(k) is str and not k.startswith("$") and not _has_surrogate(k) for k in value
        )
        if plain:
            return {k: self._encode(v, f"{path}[{k!r}]", depth + 1) for k, v in value.items()}
        pairs = []
        for key, member in value.items():
            if not isinstance(key, (str, int, float, bool, bytes, tuple, type(None))):
                raise Unsavable(f"{path[:200]} has a key of type {type(key).__name__}: use texts or numbers")
            pairs.append(
                [
                    self._encode(key, f"{path} key", depth + 1),
                    self._encode(member, f"{path}[{_shown(key)}]", depth + 1),
                ]
            )
        return {"$ordered" if type(value) is OrderedDict else "$dict": pairs}

    # memory

    def _add_storage(self, memory: memoryview, owner: Any) -> int:
        self._storages.append(memory)
        self._keeps.append(owner)
        return len(self._storages) - 1

    def _add_bytes(self, value: bytes | bytearray) -> int:
        return self._add_storage(memoryview(value).cast("B"), value)

    def _tensor(self, value: Any, path: str) -> int | None:
        known = self._known.get(id(value))
        if known is not None:
            return known
        torch = _torch()
        if torch is not None and isinstance(value, torch.Tensor):
            entry = self._torch_tensor(value, torch, path)
        else:
            made = self._array(value, path)
            if made is None:
                return None
            entry = made
        self._tensors.append(entry)
        self._keeps.append(value)  # so that its id stays its own
        self._known[id(value)] = len(self._tensors) - 1
        return len(self._tensors) - 1

    def _array(self, value: Any, path: str) -> TensorEntry | None:
        """NumPy arrays and scalars, and whatever else says how it becomes an array: JAX."""
        kind = type(value)
        module = kind.__module__.partition(".")[0]
        if module not in ("numpy", "jax", "jaxlib", "ml_dtypes"):
            return None
        numpy = _numpy()
        if module == "numpy" and not isinstance(value, (numpy.ndarray, numpy.generic)):
            return None
        if isinstance(value, numpy.ndarray) and kind not in (numpy.ndarray, numpy.memmap):
            raise Unsavable(
                f"{path[:200]} is a {kind.__name__}, of which only the numbers could be saved",
                remedy="save its parts as plain arrays (for a masked array: .data and .mask)",
            )
        try:
            array = numpy.asarray(value)
        except TypeError as e:
            raise Unsavable(
                f"{path[:200]} is a {kind.__name__} that is no array of numbers: {str(e)[:200]}",
                remedy="for a random key of JAX, save jax.random.key_data(key) and wrap it again after "
                "loading",
            ) from e
        if array.dtype.hasobject:
            raise Unsavable(f"{path[:200]} is an array of Python objects: use a list")
        if isinstance(value, (numpy.str_, numpy.bytes_)) and array[()] != value:
            raise Unsavable(
                f"{path[:200]} is a NumPy text that ends in NUL, which NumPy cuts off: use str or bytes"
            )
        if array.size and not array.nbytes:
            raise Unsavable(f"{path[:200]} is an array of items that have no bytes")
        text = _dtype_text(numpy, array.dtype, path)
        flat = numpy.ascontiguousarray(array)
        memory = memoryview(flat.reshape(-1).view(numpy.uint8)) if flat.nbytes else memoryview(b"")
        framework = "jax" if module in ("jax", "jaxlib") else "numpy"
        if isinstance(value, numpy.generic):
            framework = "scalar"
        return TensorEntry(
            framework=framework,
            dtype=text,
            shape=tuple(array.shape),
            stride=None,
            offset=0,
            storage=self._add_storage(memory, flat),
        )

    def _torch_tensor(self, value: Any, torch: Any, path: str) -> TensorEntry:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise Unsavable(
                f"{path[:200]} is a {type(value).__qualname__}, of which only the numbers could be saved",
                remedy="save it as a plain tensor, with .as_subclass(torch.Tensor)",
            )
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise Unsavable(
                f"{path[:200]} is a {value.layout} tensor on {value.device}: only dense tensors can be saved",
                remedy="make it dense with .to_dense() or .dequantize()",
            )
        plain = value.detach()
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        if plain.device.type != "cpu":
            plain = plain.cpu()
        storage = plain.untyped_storage()
        bytes_of_its_own = plain.numel() * plain.element_size()
        lonely = len(self._sharers.get(storage.data_ptr(), ())) <= 1
        if lonely and storage.nbytes() > LONELY * bytes_of_its_own:
            with contextlib.suppress(RuntimeError):  # types torch cannot copy yet bring the whole storage
                plain = plain.contiguous().clone()
                storage = plain.untyped_storage()
        at = (storage.data_ptr(), storage.nbytes())
        number = self._torch_storages.get(at)
        if number is None or storage.nbytes() == 0:
            # Not by way of a tensor and an array: hundreds of these are made while training waits.
            size = storage.nbytes()
            memory = (
                memoryview((ctypes.c_ubyte * size).from_address(storage.data_ptr())).cast("B")
                if size
                else memoryview(b"")
            )
            number = self._torch_storages[at] = self._add_storage(memory, (storage, plain))
        framework = "parameter" if isinstance(value, torch.nn.Parameter) else "torch"
        return TensorEntry(
            framework=framework,
            dtype=str(plain.dtype).removeprefix("torch."),
            shape=tuple(plain.shape),
            stride=tuple(plain.stride()),
            offset=int(plain.storage_offset()),
            storage=number,
            grad=bool(value.requires_grad),
        )


# --- and back -----------------------------------------------------------------------------------------------


def put_together(tree: Any, tensors: Sequence[TensorEntry], storage: Callable[[int], memoryview]) -> Any:
    """`storage` gives the bytes of one; they become the tensors' own memory. `Damaged` if the tree is none of
    ours (C7)."""
    try:
        return _Putter(tensors, storage).decode(tree, 0)
    except ImportError as e:
        raise MissingExtra(
            f"the checkpoint has arrays of the package {e.name}, which is not installed",
            remedy=f"install it with 'pip install {e.name}'",
        ) from e
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
        struct.error,
    ) as e:
        raise Damaged(f"the checkpoint's tree is not one of ours: {type(e).__name__}: {str(e)[:200]}") from e


class _Putter:
    def __init__(self, tensors: Sequence[TensorEntry], storage: Callable[[int], memoryview]) -> None:
        self._entries = tensors
        self._storage = storage
        self._made: dict[int, Any] = {}
        self._torch_storages: dict[int, Any] = {}
        self._taken: set[int] = set()  # storages that became bytes

    def decode(self, value: Any, depth: int) -> Any:
        if depth > 2 * MAX_DEPTH + 4:
            raise Damaged("the checkpoint's tree is nested too deeply")
        if isinstance(value, list):
            return [self.decode(v, depth + 1) for v in value]
        if not isinstance(value, dict):
            return value
        mark = next(iter(value), "")
        if not mark.startswith("$"):
            return {k: self.decode(v, depth + 1) for k, v in value.items()}
        if len(value) != 1:
            raise Damaged(f"the checkpoint's tree has a malformed {mark[:20]!r}")
        return self._marked(mark, value[mark], depth)

    def _marked(self, mark: str, body: Any, depth: int) -> Any:
        if mark == "$tensor":
            return self._tensor(body)
        if mark == "$float":
            return struct.unpack("<d", bytes.fromhex(body))[0]
        if mark == "$int":
            return int(body, 16)
        if mark == "$text":
            return bytes.fromhex(body).decode("utf-8", "surrogatepass")
        if mark in ("$bytes", "$bytearray"):
            if _index(body) in self._taken:  # a few letters each would fill any memory with copies
                raise Damaged("the checkpoint's tree has the same bytes twice")
            self._taken.add(body)
            data = bytes(self._storage(body))
            return data if mark == "$bytes" else bytearray(data)
        if mark in ("$dict", "$ordered"):
            made = OrderedDict() if mark == "$ordered" else {}
            for key, member in body:
                made[self.decode(key, depth + 1)] = self.decode(member, depth + 1)
            return made
        if mark == "$counter":
            counted = self.decode(body, depth + 1)
            if type(counted) is not dict:
                raise Damaged("the checkpoint's tree has a count of nothing")
            return Counter(counted)
        members = [self.decode(v, depth + 1) for v in body]
        if mark == "$tuple":
            return tuple(members)
        if mark == "$complex":
            return complex(*members)
        if mark == "$set":
            return set(members)
        if mark == "$frozenset":
            return frozenset(members)
        raise Damaged(f"the checkpoint's tree has a {mark[:20]!r}, which this version does not know")

    def _tensor(self, number: int) -> Any:
        _index(number)
        if number not in self._made:
            entry = self._entries[number]
            made = (
                self._torch_tensor(entry) if entry.framework in ("torch", "parameter") else self._array(entry)
            )
            self._made[number] = made
        return self._made[number]

    def _array(self, entry: TensorEntry) -> Any:
        numpy = _numpy()
        text = entry.dtype
        if text[:1] in "[(":
            dtype = numpy.lib.format.descr_to_dtype(ast.literal_eval(text))
        else:
            dtype = _dtype(numpy, text)
        memory = self._storage(entry.storage)
        if memory.nbytes:
            array = numpy.frombuffer(memory, dtype=dtype).reshape(entry.shape)
        elif 0 not in entry.shape:
            raise Damaged("the checkpoint has an array without its bytes")
        else:
            array = numpy.empty(entry.shape, dtype)
        if entry.framework == "scalar":
            return array[()]
        if entry.framework == "jax":
            return import_module("jax.numpy").asarray(array)
        return array

    def _torch_tensor(self, entry: TensorEntry) -> Any:
        torch: Any = import_module("torch")
        dtype = vars(torch).get(entry.dtype)  # not getattr: torch imports modules by that
        # Quantized types want a scale that is nowhere here; torch gives a tensor that fails when it is
        # touched.
        if not isinstance(dtype, torch.dtype) or entry.dtype.startswith("q"):
            raise Damaged(
                f"the checkpoint has a tensor of type {entry.dtype[:40]!r}, which this torch does not know"
            )
        storage = self._torch_storages.get(entry.storage)
        if storage is None:
            memory = self._storage(entry.storage)
            if memory.nbytes:
                storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            else:
                storage = torch.UntypedStorage(0)
            self._torch_storages[entry.storage] = storage
        furthest = entry.offset + sum(
            (n - 1) * s for n, s in zip(entry.shape, entry.stride or (), strict=True)
        )
        if 0 not in entry.shape and (furthest + 1) * dtype.itemsize > storage.nbytes():
            raise Damaged("the checkpoint has a tensor that reaches beyond its storage")
        made = torch.empty(0, dtype=dtype).set_(storage, entry.offset, entry.shape, entry.stride)
        if entry.framework == "parameter":
            return torch.nn.Parameter(made, requires_grad=entry.grad)
        return made.requires_grad_() if entry.grad else made


class _Deep(Exception):
    """Nested deeper than is saved."""


def _has_surrogate(text: str) -> bool:
    try:
        if not text.isascii():
            text.encode()
        return False
    except UnicodeEncodeError:
        return True


def _shown(key: Any) -> str:
    """A key for an error's path. A number of thousands of digits cannot even be printed."""
    try:
        return repr(key)[:80]
    except ValueError:
        return "a number of that size"


def _index(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise Damaged("the checkpoint's tree refers to a part that is none")
    return number


def _dtype_text(numpy: Any, dtype: Any, path: str) -> str:
    """What `_array` reads back as the same type."""
    if dtype.names is not None:
        try:
            descr = numpy.lib.format.dtype_to_descr(dtype)
            if numpy.lib.format.descr_to_dtype(descr) == dtype:
                return repr(descr)
        except (ValueError, TypeError):
            pass
        raise Unsavable(
            f"{path[:200]} has fields that overlap or lie out of order: save each as its own array"
        )
    return str(dtype.str if numpy.dtype(dtype.str) == dtype else dtype.name)


def _dtype(numpy: Any, name: str) -> Any:
    try:
        return numpy.dtype(name)
    except TypeError:
        return numpy.dtype(getattr(import_module("ml_dtypes"), name))  # bfloat16 and float8 of JAX
