"""Pickling values between a process and its worker.

Rules of this file:
- Large memory leaves the pickle stream as buffers (protocol 5): NumPy arrays, torch storages. Tensors that
  share a storage still share it on the other side.
- Functions and classes of `__main__` travel by value, bound to the other side's `__main__`. The globals they
  read travel apart (`processes/worker/main_module.py`), so that a state kept there in a global is not
  overwritten by every call.
- A class belongs to the process that defined it. When it comes back there it is the original class again, and
  keeps what was stored in it meanwhile.
- An array that is a file (`numpy.memmap`) stays that file: a copy would be as large, and what is written to
  it would reach no file.
- Both ends run the same user's code. Pickles from anybody else must not be read with this.
"""

from __future__ import annotations

import functools
import io
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

#: The pickle itself, then its buffers.
Pickled = list[memoryview]
#: The objects a pickle was made of, by id: where in it each first stands, and the object itself.
Seen = dict[int, tuple[int, Any]]

ATOMS = (type(None), bool, int, float, complex, str, bytes)
_ATOMS = frozenset(ATOMS)


def pack(value: Any, met: list[FunctionType] | None = None, *, snapshot: bool = False) -> Pickled:
    """Pickle a value. `met` collects the functions of `__main__` that were packed by value. With `snapshot`,
    the content of mapped files is packed instead of their names."""
    if is_plain(value):
        return pack_plain(value)
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, buffers, met, snapshot=snapshot).dump(value)
    return [memoryview(file.getvalue()), *(b.raw() for b in buffers)]


def pack_seen(value: Any, met: list[FunctionType] | None = None) -> tuple[Pickled, Seen]:
    """Pickle a value, and return every object that was met on the way."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler: Any
    if is_plain(value):
        pickler = pickle.Pickler(file, 5, buffer_callback=buffers.append)
    else:
        pickler = _Pickler(file, buffers, met)
    pickler.dump(value)
    return [memoryview(file.getvalue()), *(b.raw() for b in buffers)], pickler.memo.copy()


def pack_plain(value: Any) -> Pickled:
    """Pickle what `is_plain` accepts: pickle's own pickler is many times faster."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return [memoryview(data), *(b.raw() for b in buffers)] if buffers else [memoryview(data)]


def pack_whole(value: Any, met: list[FunctionType] | None = None) -> bytes:
    """Pickle into one string, buffers included, to be compared with another."""
    file = io.BytesIO()
    _Pickler(file, None, met).dump(value)
    return file.getvalue()


def unpack(parts: Sequence[memoryview]) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])


def unpack_whole(data: bytes) -> Any:
    return pickle.loads(data)


def is_plain(value: Any, depth: int = 4) -> bool:
    """Whether nothing in it needs our own pickler: numbers, texts, arrays, and small containers of them."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is tuple or kind is list:
        members = value
    elif kind is dict:
        members = value.values()
        if any(type(key) is not str for key in value):
            return False
    else:
        return kind.__module__ == "numpy" and kind.__name__ == "ndarray" and not value.dtype.hasobject
    if depth == 0 or len(value) > 64:
        return False
    for member in members:  # noqa: SIM110 (a generator is slower, and every call comes by here)
        if not is_plain(member, depth - 1):
            return False
    return True


def main_globals() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


class _MainGlobals(dict[str, Any]):
    """Stands for the globals of `__main__`, and arrives as those of the other side."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return main_globals, ()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        buffers: list[pickle.PickleBuffer] | None,
        met: list[FunctionType] | None,
        *,
        snapshot: bool = False,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=None if buffers is None else buffers.append)
        self._met = met
        self._snapshot = snapshot
        self._main = main_globals()
        # Not empty, so that it is taken as it is instead of being filled with names of this process.
        self.globals_ref[id(self._main)] = _MainGlobals(__name__="__main__")

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is FunctionType and value.__globals__ is self._main:
            reduced = super().reducer_override(value)
            if reduced is not NotImplemented and len(reduced) == 6:
                if self._met is not None:
                    self._met.append(value)
                maker, made_of, (state, slots), *rest = reduced
                return (maker, made_of, (state, {**slots, "__globals__": {}}), *rest)
            return reduced
        if kind is FunctionType and value.__name__ == "_rebuild_tensor_v3":
            return _rebuild_new_dtypes, ()
        if issubclass(kind, type):  # not `isinstance`: what an object says it is may be anything
            reduced = super().reducer_override(value)
            if reduced is not NotImplemented and len(reduced) == 6:
                maker, made_of, state, _, _, setter = reduced
                if value not in _arrived:
                    _ours.add(value)
                return maker, made_of, (setter, state), None, None, _fill
            return reduced
        if kind is _CACHED and value.__module__ == "__main__":
            return _cached, (value.__wrapped__, value.cache_parameters())
        if kind.__module__ in ("torch", "torch.storage"):
            reduced = _reduce_torch(value)
            if reduced is not None:
                return reduced
        if kind.__module__ == "numpy" and kind.__name__ == "memmap" and not self._snapshot:
            reduced = _reduce_memmap(value)
            if reduced is not None:
                return reduced
        return super().reducer_override(value)


#: Classes that travel by value: those defined here that have been sent, and those that came from elsewhere.
_ours: weakref.WeakSet[type] = weakref.WeakSet()
_arrived: weakref.WeakSet[type] = weakref.WeakSet()


def _fill(made: type, filling: tuple[Callable[[type, Any], None], Any]) -> None:
    setter, state = filling
    if made not in _ours:
        _arrived.add(made)
        setter(made, state)


_CACHED = type(functools.lru_cache(lambda: None))


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


# --- arrays that are files ---


def _reduce_memmap(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Reduce a memmap to its file. None: its content travels, because it is no longer a file's, must not
    reach the file, or lies scattered in it."""
    order = "C" if value.flags.c_contiguous else "F" if value.flags.f_contiguous else ""
    memory, mode = value._mmap, {"r": "r", "r+": "r+", "w+": "r+"}.get(value.mode or "")
    if memory is None or mode is None or not order or not value.nbytes or value.filename is None:
        return None
    import numpy

    mapped = numpy.frombuffer(memory, numpy.uint8)
    path = os.fspath(value.filename)
    if not _is_mapped_at(mapped.ctypes.data, path):
        return None
    # As NumPy maps it: from the start of a page.
    first = value.offset - value.offset % mmap.ALLOCATIONGRANULARITY
    at = first + value.ctypes.data - mapped.ctypes.data
    return _memmap, (path, value.dtype, mode, at, value.shape, order)


def _memmap(path: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], order: Any) -> Any:
    import numpy

    return numpy.memmap(path, dtype, mode, offset, shape, order)


def _is_mapped_at(address: int, path: str) -> bool:
    """Whether the name still leads to the mapped file, which may have been deleted or replaced."""
    try:
        now = os.stat(path).st_ino
        with open("/proc/self/maps") as maps:
            for line in maps:
                where, _, _, _, inode = line.split(None, 5)[:5]
                first, _, last = where.partition("-")
                if int(first, 16) <= address < int(last, 16):
                    return int(inode) == now
    except OSError:
        pass
    return False


# --- torch ---


def _reduce_torch(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Reduce storages to buffers. A tensor's own reduction refers to its storage, so everything about tensors
    stays torch's."""
    torch = _torch()
    if type(value) is torch.storage.TypedStorage:
        return _typed, (value._untyped_storage, value.dtype)
    if type(value) is torch.UntypedStorage:
        if value.device.type != "cpu":
            value = value.cpu()  # device memory does not outlive its worker
        if value.nbytes() == 0:
            return _untyped, (b"",)
        whole = torch.tensor([], dtype=torch.uint8).set_(value, 0, (value.nbytes(),), (1,))
        return _untyped, (pickle.PickleBuffer(whole.numpy()),)
    return None


def _typed(untyped: Any, dtype: Any) -> Any:
    return _torch().storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _untyped(memory: Any) -> Any:
    torch = _torch()
    if not len(memory):
        return torch.UntypedStorage(0)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _rebuild_new_dtypes() -> Callable[..., Any]:
    """Return torch's own maker of tensors of its newer dtypes (float8, uint16), which wants its storage as
    `torch.load` gives it."""
    torch = _torch()

    def rebuild(untyped: Any, *rest: Any) -> Any:
        return torch._utils._rebuild_tensor_v3(_typed(untyped, torch.uint8), *rest)

    return rebuild


def _torch() -> Any:
    import torch

    return torch
