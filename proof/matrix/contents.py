"""Whether two folders hold the same: asked of what files mean, not of how they were written.

Run as a program by the environment of the matrix, which has what is needed to read the files: the case as JSON, the folder of plain
Python, then the others; it prints one JSON.

Rules of this file:
- Bits are compared, not numbers that are near each other. Equal values that were pickled in another order of sharing are the same.
- A class that cannot be imported here is read as its name and its state.
- TensorBoard's files of one folder are one list of values by tag and step; their number and times do not matter, a value twice does.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proof.matrix.case import Case, from_json

#: What a value means, by path: `model.fc1.weight` to text or to a digest.
Meaning = dict[str, str]
NEVER = ("__pycache__/*", "*/__pycache__/*", "*.pyc")


class Stub:
    """An object of a class that is not here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made_of = (args, kwargs)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return type(name, (Stub,), {"__module__": module})


class Pickling:
    """As torch.load wants it."""

    Unpickler = Unpickler
    load, loads, dump, dumps, Pickler = pickle.load, pickle.loads, pickle.dump, pickle.dumps, pickle.Pickler


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Walk:
    """Of a value, everything in it by path."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.volatile = re.compile("|".join(case.volatile) or "(?!)")
        self.found: Meaning = {}
        self.above: set[int] = (
            set()
        )  # what it is inside of: a ring ends there, what is shared is looked at twice

    def add(self, path: str, value: Any) -> None:
        import numpy
        import torch

        if self.volatile.search(path.rsplit("/", 1)[-1]):
            return
        if isinstance(value, (torch.Tensor, numpy.ndarray, numpy.generic)):
            self.found[path] = self.array(path, value)
        elif value is None or isinstance(value, (bool, int, complex, float)):
            self.found[path] = repr(value)
        elif isinstance(value, str):
            self.found[path] = self.case.masked(value, str(self.folder))
        elif isinstance(value, (bytes, bytearray)):
            self.found[path] = digest(bytes(value))
        elif id(value) not in self.above:
            self.above.add(id(value))
            self.inside(path, value)
            self.above.discard(id(value))

    def array(self, path: str, value: Any) -> str:
        import numpy
        import torch

        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                value = value.to_dense()
            value = value.detach().cpu().contiguous()
            kind = f"{value.dtype}{list(value.shape)}"
            raw = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            return f"{kind} {digest(raw)}"
        value = numpy.asarray(value)
        if value.dtype == object:
            self.add(f"{path}/objects", value.tolist())
            return f"object{list(value.shape)}"
        return f"{value.dtype}{list(value.shape)} {digest(numpy.ascontiguousarray(value).tobytes())}"

    def inside(self, path: str, value: Any) -> None:
        if isinstance(value, dict):
            keys = [self.case.masked(str(key), str(self.folder)) for key in value]
            self.found[f"{path}/keys"] = " ".join(key for key in keys if not self.volatile.search(key))
            for key, item in zip(keys, value.values(), strict=True):
                self.add(f"{path}/{key}", item)
        elif isinstance(value, (set, frozenset)):
            self.found[path] = " ".join(sorted(map(repr, value)))
        elif isinstance(value, (list, tuple)):
            self.found[f"{path}/length"] = str(len(value))
            for number, item in enumerate(value):
                self.add(f"{path}/{number}", item)
        elif isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            self.found[path] = f"{value.__module__}.{value.__qualname__}"
        else:
            self.found[f"{path}/class"] = f"{type(value).__module__}.{type(value).__qualname__}"
            for key, item in sorted(self.state(value).items(), key=lambda pair: str(pair[0])):
                self.add(f"{path}/{key}", item)

    def state(self, value: Any) -> dict[Any, Any]:
        if hasattr(value, "__dict__"):
            return dict(vars(value))
        try:
            reduced = value.__reduce_ex__(4)
        except TypeError:
            return {}
        return {"reduced": reduced[1:3]} if isinstance(reduced, tuple) else {}


def meaning(path: Path, case: Case, folder: Path) -> Meaning:
    walk = Walk(case, folder)
    name = path.name
    if re.search(r"\.(pt|pth|ckpt|bin)$|\.pth\.tar$", name):
        import torch

        walk.add("", torch.load(path, map_location="cpu", weights_only=False, pickle_module=Pickling))
    elif name.endswith((".npz", ".npy")):
        import numpy

        loaded = numpy.load(path, allow_pickle=True)
        walk.add("", {key: loaded[key] for key in loaded.files} if name.endswith(".npz") else loaded)
    elif name.endswith(".safetensors"):
        from safetensors.torch import load_file

        walk.add("", load_file(path))
    elif name.endswith((".pkl", ".pickle")):
        walk.add("", Unpickler(io.BytesIO(path.read_bytes())).load())
    elif name.endswith(".joblib"):
        import joblib

        walk.add("", joblib.load(path))
    elif name.endswith(".h5"):
        import h5py

        with h5py.File(path) as file:
            file.visititems(lambda key, item: walk.add(key, item[()]) if hasattr(item, "dtype") else None)
    elif name.endswith((".json", ".ubj")) and path.stat().st_size < 50_000_000 and name.endswith(".json"):
        walk.add("", json.loads(path.read_text()))
    else:
        return _text_or_bytes(path, case, folder)
    return walk.found


def _text_or_bytes(path: Path, case: Case, folder: Path) -> Meaning:
    raw = path.read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return {"bytes": f"{len(raw)} {digest(raw)}"}
    return {f"line {n}": line for n, line in enumerate(case.masked(text, str(folder)).splitlines(), 1)}


def scalars(paths: list[Path], case: Case, folder: Path) -> Meaning:
    """Of all event files of one folder."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    walk = Walk(case, folder)
    times: dict[str, int] = {}
    for path in sorted(paths):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value if event.HasField("summary") else ():
                key = f"{value.tag.replace('/', '.')}@{event.step}"
                times[key] = times.get(key, 0) + 1
                key += "" if times[key] == 1 else f" for the {times[key]}. time"
                walk.add(key, make_ndarray(value.tensor))
    return {k: v for k, v in walk.found.items() if not walk.volatile.search(k)}


def written(folder: Path, case: Case, given: set[str]) -> dict[str, list[Path]]:
    """Files by name, without those the program was given; event files of one folder are one."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name in given or any(fnmatch.fnmatch(name, p) for p in (*NEVER, *case.skip)):
            continue
        shown = re.sub(r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_[^/]+", "<date>", name)
        shown = re.sub(r"\d{10}(\.\d+)?", "<time>", shown)
        if "events.out.tfevents" in name:
            shown = str(Path(shown).parent / "events")
        found.setdefault(shown, []).append(path)
    return found


def compare(case: Case, plain: Path, other: Path, given: set[str]) -> dict[str, str]:
    """What differs, by file: the first difference and how many there are."""
    ours, theirs = written(plain, case, given), written(other, case, given)
    differs = {name: "missing" for name in ours if name not in theirs}
    differs |= {name: "not written by plain Python" for name in theirs if name not in ours}
    for name in sorted(set(ours) & set(theirs)):
        if not name.endswith("events") and ours[name][0].read_bytes() == theirs[name][0].read_bytes():
            continue
        try:
            read = [_read(name, files[name], case, at) for files, at in ((ours, plain), (theirs, other))]
        except Exception as error:
            differs[name] = f"cannot be read: {type(error).__name__}: {str(error)[:120]}"
            continue
        if said := _difference(*read):
            differs[name] = said
    return differs


def _read(name: str, paths: list[Path], case: Case, folder: Path) -> Meaning:
    return scalars(paths, case, folder) if name.endswith("events") else meaning(paths[0], case, folder)


def _difference(ours: Meaning, theirs: Meaning) -> str:
    unlike = list(_unlike(ours, theirs))
    if not unlike:
        return ""
    first = unlike[0]
    was, became = (str(each.get(first, "nothing"))[:60] for each in (ours, theirs))
    return f"{len(unlike)} of {len(ours)} differ, first {first or 'the value'}: {was!r} became {became!r}"


def _unlike(ours: Meaning, theirs: Meaning) -> Iterator[str]:
    for key in ours:
        if ours[key] != theirs.get(key):
            yield key
    yield from (key for key in theirs if key not in ours)


def is_model(name: str, case: Case) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in case.model)


def main() -> None:
    case = from_json(json.loads(sys.argv[1]))
    plain, *others = (Path(arg) for arg in sys.argv[2:])
    given = set()
    if case.source.is_dir():
        given = {p.relative_to(case.source).as_posix() for p in case.source.rglob("*") if p.is_file()}
    given.add(case.script)
    said: dict[str, Any] = {"models": [n for n in written(plain, case, given) if is_model(n, case)]}
    said["files"] = sorted(written(plain, case, given))
    said["others"] = {str(other): compare(case, plain, other, given) for other in others}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
