"""The codec of a Durable's value: a tree of plain values and tensors, in one run of bytes. No pickle.

Rules of this file:
- Layout: the length of the description, the description (JSON), then the storages, each aligned for its
  tensors.
- The same trees as a checkpoint's (`store.tree`), bit for bit. Whatever is read is checked before it is used:
  every storage lies inside the bytes, none overlaps another, each is used by one part of the tree only (C7).
"""

from __future__ import annotations

import json
import struct
from importlib.metadata import entry_points
from typing import Any

from sublet.core.checkpoints.checkpoint import (
    MAX_MANIFEST_BYTES,
    MAX_PARTS,
    aligned,
    read_tensors,
    tensor_rows,
)
from sublet.core.errors import BadInput, Damaged, Misconfigured, Unsavable
from sublet.ports.region import Codec
from sublet.store.tree import put_together, take_apart

ALIGN = 64
_LENGTH = struct.Struct("<Q")


class TreeCodec:
    """Implements `ports.region.Codec`."""

    id = "tree-1"

    def encode(self, value: Any) -> list[memoryview]:
        taken = take_apart(value)
        sizes = [storage.nbytes for storage in taken.storages]
        body = {"tree": taken.tree, "tensors": tensor_rows(taken.tensors), "sizes": sizes}
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        _check_readable(len(text), len(sizes), body["tensors"])
        parts = [memoryview(_LENGTH.pack(len(text))), memoryview(text)]
        end = _LENGTH.size + len(text)
        for storage in taken.storages:
            start = aligned(end, ALIGN)
            parts += [memoryview(bytes(start - end)), storage]
            end = start + storage.nbytes
        return parts

    def decode(self, data: memoryview) -> Any:
        try:
            if data.nbytes < _LENGTH.size:
                raise Damaged("the value is too short to be one")
            (length,) = _LENGTH.unpack_from(data)
            if length > min(MAX_MANIFEST_BYTES, data.nbytes - _LENGTH.size):
                raise Damaged("the value's description reaches beyond it")
            body = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
            if type(body) is not dict or body.keys() != {"tree", "tensors", "sizes"}:
                raise Damaged("the value's description is not one of ours")
            storages = _storages(data, _LENGTH.size + length, body["sizes"])
            tensors = read_tensors(body["tensors"], len(storages))
        except Damaged:
            raise
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, BadInput) as e:
            raise Damaged(
                f"the value's description is not one of ours: {type(e).__name__}: {str(e)[:200]}"
            ) from e
        used: set[int] = set()

        def storage(number: int) -> memoryview:
            # Whatever we write uses each once; a tree that repeats one could ask for any amount of memory.
            if number in used:
                raise Damaged("the value's tree uses one storage twice")
            used.add(number)
            return storages[number]

        return put_together(body["tree"], tensors, storage)


def _check_readable(length: int, storages: int, tensors: Any) -> None:
    """A checkpoint that returned must be one that restores (C6)."""
    try:
        if length > MAX_MANIFEST_BYTES or storages > MAX_PARTS:
            raise Damaged("it has too many parts")
        read_tensors(json.loads(json.dumps(tensors)), storages)
    except Damaged as e:
        raise Unsavable(
            f"the value could not be read again: {e.message}",
            remedy="put long lists of numbers into one array, and long texts into bytes",
        ) from e


def _storages(data: memoryview, end: int, sizes: Any) -> list[memoryview]:
    if type(sizes) is not list or len(sizes) > MAX_PARTS:
        raise Damaged("the value's description is not one of ours")
    found = []
    for size in sizes:
        start = aligned(end, ALIGN)
        if type(size) is not int or not 0 <= size <= data.nbytes - start:
            raise Damaged("the value has a storage that reaches beyond it")
        found.append(data[start : start + size])
        end = start + size
    if end != data.nbytes:
        raise Damaged("the value is longer than its description says")
    return found


def find_codec(name: str) -> Codec:
    """The codec with this id: ours, or one that a package registered as a `sublet.codecs` entry point."""
    if name == TreeCodec.id:
        return TreeCodec()
    found = entry_points(group="sublet.codecs")
    if name not in found.names:
        raise Misconfigured(
            f"the value was written by the codec {name[:40]!r}, which is not installed",
            remedy="install the package that brings it, or give it: Durable.restore(locator, codec=...)",
        )
    codec: Codec = found[name].load()()
    return codec
