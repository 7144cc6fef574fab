"""Weights in files other programs read: `.safetensors` out and in, `.pt` in.

Rules of this file:
- Only tensors by name. What else a state has is left out of an export, and counted, so that it can be said.
- A file is whole or not there: written beside its name, synced, renamed.
- What is read is checked before anything is allocated: lengths, offsets, types, overlaps (C7). No code of a
  file runs: a `.pt` is read by torch's own weights-only reader, and refused where that refuses it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sublet.core.errors import BadInput, Damaged, MissingExtra, NotDurable
from sublet.machine.durable import sync_path

MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_TORCH_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32",
    "U64": "uint64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
_NAMES = {name: kind for kind, name in _TORCH_TYPES.items()}
_SIZES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    tensors: int
    bytes: int
    left_out: int  # values that are no tensors


def tensors_of(state: Any) -> tuple[dict[str, Any], int]:
    """The tensors by path, and how many other values the state has."""
    found: dict[str, Any] = {}
    others = 0

    def walk(value: Any, path: str) -> None:
        nonlocal others
        if isinstance(value, Mapping):
            for key, member in value.items():
                walk(member, f"{path}.{key}" if path else str(key))
        elif isinstance(value, (list, tuple)):
            for number, member in enumerate(value):
                walk(member, f"{path}.{number}" if path else str(number))
        elif hasattr(value, "shape") and hasattr(value, "dtype"):
            name = path or "state"
            if name in found:
                raise BadInput(f"two tensors would be called {name!r}", remedy="export one part of the state")
            found[name] = value
        else:
            others += 1

    walk(state, "")
    return found, others


def as_tensors(state: Any) -> Any:
    """The same with torch's tensors for NumPy's numbers, as torch's weights-only reader requires."""
    torch, numpy = import_module("torch"), import_module("numpy")
    if isinstance(state, dict):
        return {key: as_tensors(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(as_tensors(value) for value in state)
    if isinstance(state, (numpy.ndarray, numpy.generic)) and state.dtype.kind in "biufc":
        plain = numpy.array(state, dtype=state.dtype.newbyteorder("="))
        with contextlib.suppress(TypeError):  # a type that torch does not have
            return torch.from_numpy(plain)
    return state


# --- out ----------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, tensors: Mapping[str, Any], about: Mapping[str, str]) -> int:
    """Returns the size of the file."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    parts: list[memoryview] = []
    end = 0
    # Widest first, as others write it: every tensor is then aligned.
    for name in sorted(tensors, key=lambda n: (-_item_size(tensors[n]), n)):
        if name == "__metadata__":
            raise BadInput(
                "a .safetensors file cannot have a tensor called __metadata__", remedy="export another part"
            )
        kind, memory = _bytes_of(tensors[name], name)
        header[name] = {
            "dtype": kind,
            "shape": list(tensors[name].shape),
            "data_offsets": [end, end + memory.nbytes],
        }
        end += memory.nbytes
        parts.append(memory)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as draft, draft.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for memory in parts:
            file.write(memory)
    return 8 + len(text) + end


@contextlib.contextmanager
def whole_file(path: Path, *, kept: str = "the checkpoint is untouched") -> Iterator[Path]:
    """A draft to write to, which becomes `path` if no error was raised."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    try:
        yield draft
        sync_path(draft)
        os.replace(draft, path)
        sync_path(path.parent)
    except OSError as e:
        raise NotDurable(
            f"{path} was not written: {e.strerror or e}; {kept}",
            remedy="choose a folder that may be written to and has room",
        ) from e
    finally:
        draft.unlink(missing_ok=True)


def _item_size(tensor: Any) -> int:
    return int(tensor.dtype.itemsize)


def _bytes_of(tensor: Any, name: str) -> tuple[str, memoryview]:
    kind = _NAMES.get(getattr(tensor.dtype, "name", str(tensor.dtype).removeprefix("torch.")))
    if kind is None:
        raise BadInput(
            f"{name} is of type {tensor.dtype}, which .safetensors does not have",
            remedy="export a part without it, or keep it in the checkpoint",
        )
    if hasattr(tensor, "untyped_storage"):
        torch: Any = import_module("torch")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        array = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else None
    else:
        numpy: Any = import_module("numpy")
        plain = numpy.ascontiguousarray(tensor)
        if plain.dtype.byteorder == ">":
            plain = plain.astype(plain.dtype.newbyteorder("<"))
        array = plain.reshape(-1).view(numpy.uint8) if plain.size else None
    return kind, memoryview(array) if array is not None else memoryview(b"")


# --- in -----------------------------------------------------------------------------------------------------


def read_weights(path: Path) -> dict[str, Any]:
    """Tensors by name: torch's where torch is installed, else NumPy's."""
    if not path.is_file():
        raise BadInput(f"{path} is not a file")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return _read_torch(path)
    raise BadInput(
        f"{path.name} is neither .safetensors nor .pt", remedy="convert it with the program that wrote it"
    )


def read_safetensors(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise Damaged(f"{path.name} is not a .safetensors file: its header would have {length} bytes")
        try:
            header = json.loads(file.read(length))
            entries = _entries(header, size - 8 - length)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise Damaged(
                f"{path.name} is not a .safetensors file: {type(e).__name__}: {str(e)[:200]}",
                remedy="fetch or export it again",
            ) from e
        # Private and writable: frameworks want memory that may be written to, and the file stays as it is.
        data = memoryview(
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        )
    begin = 8 + length
    return {
        name: _made(kind, shape, data[begin + first : begin + last], name)
        for name, (kind, shape, first, last) in entries.items()
    }


def _entries(header: Any, size: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    found = {}
    taken = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if kind not in _TORCH_TYPES:
            raise ValueError(f"{name[:100]!r} has the type {str(kind)[:20]!r}")
        numbers = [first, last, *shape]
        if len(shape) > 64 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in numbers):
            raise ValueError(f"{name[:100]!r} has no proper shape or place")
        if not first <= last <= size or last - first != math.prod(shape) * _SIZES.get(kind, 1):
            raise ValueError(f"{name[:100]!r} does not fit where it should lie")
        taken.append((first, last))
        found[name] = (kind, tuple(shape), first, last)
    taken.sort()
    if any(one[1] > two[0] for one, two in itertools.pairwise(taken)):
        raise ValueError("two tensors overlap")
    return found


def _made(kind: str, shape: tuple[int, ...], memory: memoryview, name: str) -> Any:
    if find_spec("torch") is not None:
        torch: Any = import_module("torch")
        dtype = getattr(torch, _TORCH_TYPES[kind])
        if not memory.nbytes:
            return torch.empty(shape, dtype=dtype)
        # Copied: what lies askew in the file could not be viewed as its type.
        return torch.frombuffer(bytearray(memory), dtype=dtype).reshape(shape)
    numpy: Any = import_module("numpy")
    try:
        dtype = numpy.dtype(_TORCH_TYPES[kind])
    except TypeError as e:
        raise MissingExtra(
            f"{name} is of type {kind}, which NumPy does not have", remedy="pip install 'sublet[torch]'"
        ) from e
    return numpy.frombuffer(bytearray(memory), dtype=dtype).reshape(shape)


def _read_torch(path: Path) -> dict[str, Any]:
    if find_spec("torch") is None:
        raise MissingExtra(f"{path.name} needs torch to be read", remedy="pip install 'sublet[torch]'")
    torch: Any = import_module("torch")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch raises whatever its unpickler raises
        raise BadInput(
            f"{path.name} is not a file of weights: "
            f"{str(e).strip().splitlines()[0][:200] if str(e) else type(e).__name__}",
            remedy="only tensors, numbers, texts, lists and dicts are read: nothing that would run code",
        ) from e
    found, _ = tensors_of(loaded)
    if not found:
        raise BadInput(f"{path.name} has no tensors in it")
    return found
