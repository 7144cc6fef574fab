"""Restoring: which part of a state is wanted, and how it gets into what the caller has.

Rules of this file:
- A part is named by its path, as listings show it: `model`, `model.encoder`. A list is taken whole.
- In place means all or nothing: everything is checked before the first byte is copied.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sublet.core.checkpoints.checkpoint import Manifest
from sublet.core.errors import BadInput, Damaged

COPIERS = 2


def only(manifest: Manifest, keys: Sequence[str]) -> Any:
    """The tree with nothing but the parts of these paths. Raises `BadInput` for a path that names nothing."""
    found: set[str] = set()
    seen: list[str] = []
    try:
        tree = _prune(manifest.tree, "", tuple(keys), found, seen, root=True)
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise Damaged(f"the checkpoint's tree is not one of ours: {type(e).__name__}: {str(e)[:200]}") from e
    for key in keys:
        if key not in found:
            near = difflib.get_close_matches(key, seen, n=3, cutoff=0.3) or seen[:5]
            raise BadInput(
                f"{manifest.name} version {manifest.version} has nothing called {key[:200]!r}",
                remedy=f"it has, for example, {', '.join(near)}" if near else "it is no dict: load all of it",
            )
    if tree is _NOTHING:
        raise BadInput(
            f"{manifest.name} version {manifest.version} is no dict, of which parts could be wanted",
            remedy="load all of it",
        )
    return tree


_NOTHING = object()


def _prune(
    value: Any, path: str, keys: Sequence[str], found: set[str], seen: list[str], *, root: bool = False
) -> Any:
    if path and (path in keys or any(path.startswith(f"{key}.") for key in keys)):
        found.update(key for key in keys if key == path)
        _mark_within(value, path, keys, found)
        return value
    if path and not any(key.startswith(f"{path}.") for key in keys):
        return _NOTHING
    if not isinstance(value, dict):
        return _NOTHING
    mark = next(iter(value), "")
    if mark in ("$dict", "$ordered"):
        pairs = [(k, _prune(v, _joined(path, k, seen), keys, found, seen)) for k, v in value[mark]]
        left = [[k, v] for k, v in pairs if v is not _NOTHING]
        return {mark: left} if left or root else _NOTHING
    if mark.startswith("$"):
        return _NOTHING
    members = {k: _prune(v, _joined(path, k, seen), keys, found, seen) for k, v in value.items()}
    kept = {k: v for k, v in members.items() if v is not _NOTHING}
    return kept if kept or root else _NOTHING


def _mark_within(value: Any, path: str, keys: Sequence[str], found: set[str]) -> None:
    """Find paths inside a part that is taken whole, too."""
    inner = [key for key in keys if key.startswith(f"{path}.") and key not in found]
    if inner:
        _prune(value, path, inner, found, [])


def _joined(path: str, key: Any, seen: list[str]) -> str:
    joined = f"{path}.{key}" if path else str(key)
    seen.append(joined)
    return joined


def part_of(state: Any, path: str) -> Any:
    """What lies at this path of a state that was loaded with nothing else in it."""
    found = list(_parts_of(state, path))
    if len(found) != 1:
        raise BadInput(
            f"there is no {path[:200]!r} in it"
            if not found
            else f"{path[:200]!r} may be {len(found)} things",
            remedy="name a part of texts and numbers that only one thing is called",
        )
    return found[0]


def _parts_of(state: Any, path: str) -> Iterator[Any]:
    for key, member in state.items() if isinstance(state, dict) else ():
        if path == str(key):
            yield member
        elif path.startswith(f"{key}."):
            yield from _parts_of(member, path[len(str(key)) + 1 :])


def storages_of(tree: Any, manifest: Manifest) -> set[int]:
    """The storages a tree needs."""
    needed: set[int] = set()
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            for mark, body in value.items():
                if mark == "$tensor" and type(body) is int and 0 <= body < len(manifest.tensors):
                    needed.add(manifest.tensors[body].storage)
                elif mark in ("$bytes", "$bytearray") and type(body) is int:
                    needed.add(body)
                else:
                    pending.append(body)
    return needed


def chunks_of(storages: set[int], manifest: Manifest) -> list[int]:
    """The chunks that hold these storages. Both are in the order of the arena."""
    spans = sorted(
        (s for n, s in enumerate(manifest.storages) if n in storages and s.size), key=lambda s: s.offset
    )
    needed = []
    at = 0
    for number, chunk in enumerate(manifest.chunks):
        while at < len(spans) and spans[at].end <= chunk.span.offset:
            at += 1
        if at < len(spans) and spans[at].offset < chunk.span.end:
            needed.append(number)
    return needed


# --- in place -----------------------------------------------------------------------------------------------


def check_fits(source: Any, target: Any, *, part: bool = False) -> None:
    """Raises `BadInput` unless it can be copied there. A part may leave members of the target alone."""
    if not isinstance(target, (dict, list)) and not _is_array(target):
        raise BadInput("state cannot be restored in place: give a dict or list of tensors")
    _check_fits(source, target, "state", part)


def copy_into(source: Any, target: Any) -> None:
    """Copy tensors in place and replace everything else in its container. `check_fits` has been called
    before."""
    arrays = list(_replace(source, target))
    with ThreadPoolExecutor(COPIERS) as pool:
        list(pool.map(_copy, arrays))


def lends(source: Any, target: Any, *, part: bool = False) -> bool:
    """Whether an array of the source itself would end up in the target, for want of one to copy it into."""
    if isinstance(target, (dict, list)) and isinstance(source, (dict, list)):
        return any(lends(source[k], target[k], part=part) for k in _members(source, target, part))
    return not _is_array(target) and _has_array(source)


def _has_array(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_array, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_array, value))
    return hasattr(value, "shape") and getattr(value, "ndim", 1) >= 0 and type(value).__module__ != "builtins"


def _is_array(value: Any) -> bool:
    """Whether it has memory that can be written: torch's tensors and NumPy's arrays, not NumPy's scalars."""
    numpy = sys.modules.get("numpy")
    return hasattr(value, "copy_") or (numpy is not None and isinstance(value, numpy.ndarray))


def _members(source: Any, target: Any, part: bool) -> list[Any]:
    if isinstance(target, dict):
        return list(source) if part else list(target)
    return list(range(len(target)))


def _check_fits(source: Any, target: Any, path: str, part: bool) -> None:
    if isinstance(target, dict):
        if not isinstance(source, dict) or not (
            source.keys() <= target.keys() if part else source.keys() == target.keys()
        ):
            raise BadInput(f"{path} has other keys than what was saved")
    elif isinstance(target, list):
        if not isinstance(source, list) or len(source) != len(target):
            raise BadInput(f"{path} has another length than what was saved")
    elif _is_array(target):
        if (
            not _is_array(source)
            or tuple(source.shape) != tuple(target.shape)
            or source.dtype != target.dtype
        ):
            raise BadInput(f"{path} has another shape or type than what was saved")
        if getattr(getattr(target, "flags", None), "writeable", True) is False:
            raise BadInput(f"{path} may not be written to")
        if hasattr(target, "copy_"):
            _check_takes(target, path)
        return
    else:
        return
    for key in _members(source, target, part):
        _check_fits(source[key], target[key], f"{path}[{key!r}]", part)


def _check_takes(tensor: Any, path: str) -> None:
    """Check what torch would only refuse in the middle of the copy, or, without memory, not at all."""
    if tensor.is_meta:
        raise BadInput(f"{path} has no memory to restore into", remedy="make it with .to_empty() first")
    if str(tensor.layout) != "torch.strided":
        raise BadInput(f"{path} is no dense tensor", remedy="make it dense with .to_dense()")
    if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise BadInput(f"{path} has several elements in one place", remedy="make it whole with .contiguous()")


def _replace(source: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """Replace everything that is no array, and return the arrays that are left to copy."""
    if not isinstance(target, (dict, list)):
        yield source, target
        return
    for key in _members(source, target, True):
        if isinstance(target[key], (dict, list)) or _is_array(target[key]):
            yield from _replace(source[key], target[key])
        else:
            target[key] = source[key]


def _copy(pair: tuple[Any, Any]) -> None:
    source, target = pair
    if hasattr(target, "copy_"):
        target.detach().copy_(source.detach())
    else:
        target[...] = source
