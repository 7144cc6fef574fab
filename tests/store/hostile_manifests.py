"""Manifests of somebody who means harm, each placed under its own digest with the head leading to it: they are believed, and must not matter.

`python -m tests.store.hostile_manifests manifests COUNT SEED` loads COUNT of them in a process that watches itself: what it opens, imports, runs,
allocates, and how long each takes. It prints what it saw as one line of JSON. Rules of this file:
- Mutation number n of a seed is always the same; what goes wrong is said with its number.
- The state has a canary in it wherever data goes that some format would run: pickles, npy files, YAML, names of types.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import pickle
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import torch

from sublet.core.checkpoints import checkpoint
from sublet.core.errors import InvariantBroken, SubletError
from sublet.store.save.packing import digest
from tests.in_memory import in_memory
from tests.store.rig import JOB, Shelf

SECONDS = 1.0
#: What the process may grow by over all of them: their parts are small, and so is the state they can truly have.
GROWTH_BYTES = 100 << 20


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def canary_texts(path: str) -> list[str]:
    return [
        f"!!python/object/apply:os.mkdir ['{path}']",
        f"__import__('os').mkdir('{path}')",
        f"[__import__('os').mkdir('{path}')]",
        f"(lambda: __import__('os').mkdir('{path}'))()",
        f"{{{{ os.mkdir('{path}') }}}}",
        f"cos\nmkdir\n(S'{path}'\ntR.",
        f"$(mkdir {path})",
        f"[('a', __import__('os').mkdir('{path}'))]",
        f"('a', '<f4') if __import__('os').mkdir('{path}') else 0",
    ]


def canary_state(path: str) -> dict[str, Any]:
    """Every byte of it is saved and loaded, and none of it is run."""
    bomb = pickle.dumps(Canary(path))
    arrays = np.array([Canary(path)], dtype=object)
    import io

    npy = io.BytesIO()
    np.save(npy, arrays, allow_pickle=True)
    zipped = io.BytesIO()
    torch.save({"a": Canary(path)}, zipped)
    return {
        "pickle": bomb,
        "array": np.frombuffer(bomb + bytes(3000), np.uint8),
        "npy": npy.getvalue(),
        "pt": np.frombuffer(zipped.getvalue(), np.uint8),
        "tensor": torch.arange(2500, dtype=torch.float32).reshape(50, 50).t(),
        "parameter": torch.nn.Parameter(torch.ones(7)),
        "texts": canary_texts(path),
        "scalar": np.float64(2.5),
        "fields": np.zeros(3, [("a", "<f4"), ("b", "<i8")]),
        "marks": {"$pickle": bomb, "$reduce": [1, 2], "__reduce__": "os.system", "py/object": "os.system", 7: (1, {2, 3}, 2**80)},
    }  # fmt: skip


DTYPES = [
    "O", "object", "|O", "O8", "[('a','O')]", "[('a','|O')]", "<f8", "V0", "V2147483647", "S2147483647", "U500000000", "<M8[as]", "f4,O",
    "(100000,100000)f8", "2147483647f8", "(" * 3000, "[" * 3000, "[('a',[('b',[('c','O')])])]", "float32", "load", "_inductor", "_dynamo",
    "onnx", "export", "hub", "Tensor", "bfloat16", "float8_e4m3fn", "complex128", "quint8", "__builtins__", "\x00", "", "9" * 4000, "é",
    "bfloat16\x00", "__loader__", "finfo", "os.system", "../../etc/passwd",
]  # fmt: skip
NAMES = [
    "../" * 6 + "etc/passwd", "/etc/passwd", "..", ".", "", "a/../../b", "\x00", "a\x00b", "x" * 5000, "..\\..\\x", "%2e%2e%2f", "~/.ssh/id_rsa",
    "file:///etc/passwd", "\u202e/cod", "a\nb", "CON", "../packs/" + "a" * 64, "a" * 64, "A" * 64, "g" * 64, "a" * 63, "a" * 65, "a" * 63 + "/",
    "a" * 61 + "/..", "0" * 64 + "\n", "\ud800" * 64, "１" * 64, "/proc/self/mem", "/dev/zero", "|id", "-rf",
]  # fmt: skip
NUMBERS: list[Any] = [
    -1, 0, 1, 63, 64, 65, 511, 4095, 4096, 4097, 1 << 20, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, 1 << 31, 1 << 32, 1 << 46, (1 << 46) + 1,
    1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, 10**300, -(1 << 63), 1.0, 0.5, -0.0, 1e308, float("inf"), float("nan"), True, False, None, "1",
]  # fmt: skip


def odd_trees(parts: int) -> list[Any]:
    return [
        {"$tensor": parts}, {"$tensor": -1}, {"$tensor": True}, {"$tensor": 0.0}, {"$tensor": {}}, {"$bytes": 0}, [{"$bytes": 0}] * 50,
        [{"$bytearray": 1}] * 50, {"$bytes": 1 << 40}, {"$int": "f" * 100_000}, {"$int": "1_0"}, {"$int": ""}, {"$int": "-" * 10},
        {"$float": "00" * 8}, {"$float": "ff" * 9}, {"$text": "ff"}, {"$text": "00" * 10}, {"$dict": [[[], 1]]}, {"$dict": {"a": 1}},
        {"$dict": [[1, 2, 3]]}, {"$dict": "ab"}, {"$ordered": [[{"$tensor": 0}, 1]]}, {"$set": [[1]]}, {"$set": "abc"}, {"$set": {"a": 1}},
        {"$frozenset": [{"$tensor": 0}]}, {"$tuple": "abc"}, {"$tuple": {"a": 1}}, {"$complex": [1, 2, 3]}, {"$complex": ["1j"]},
        {"$complex": [True, None]}, {"$pickle": "gASV"}, {"$reduce": ["os.system", ["id"]]}, {"$": 1}, {"$tuple": [], "x": 1}, {"x": 1, "$tuple": []},
        [[]] * 1000, [{"$tensor": n % parts} for n in range(500)], {str(n): n for n in range(500)}, "x" * 100_000,
    ]  # fmt: skip


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    members = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, member in members:
        found += spots(member, (*path, key))
    return found


def at(body: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        body = body[part]
    return body


def mutate(body: Any, good: bytes, rng: random.Random, path: str) -> bytes:
    """One manifest that somebody else wrote, as bytes."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        _change(body, rng, path)
        if not spots(body):
            break
    data = json.dumps(body, separators=(",", ":")).encode()
    if rng.random() < 0.25:
        data = _change_text(data if rng.random() < 0.5 else good, rng)
    return data


def _change(body: Any, rng: random.Random, path: str) -> None:
    places = spots(body)
    # Half of the time somewhere that means something, not in the middle of a list of digests.
    top = [p for p in places if len(p) == 1 or p[0] in ("tree", "tensors")]
    where = rng.choice(top if rng.random() < 0.5 and top else places)
    holder, last = at(body, where[:-1]), where[-1]
    value = holder[last]
    evil = [
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(NAMES),
        lambda: rng.choice(DTYPES),
        lambda: rng.choice(canary_texts(path)),
        lambda: copy.deepcopy(rng.choice(odd_trees(len(body.get("tensors") or [1]) if isinstance(body, dict) else 1))),
        lambda: rng.choice([[], {}, [[]], [None] * 7, [1] * 70, {"format": 1}]),
    ]  # fmt: skip
    kind = rng.randrange(12)
    tensors = body.get("tensors") if isinstance(body, dict) else None
    chunks = body.get("chunks") if isinstance(body, dict) else None
    if kind < 4:
        holder[last] = rng.choice(evil)()
    elif kind == 4:
        del holder[last]
    elif kind == 5 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(value))
    elif kind == 6:
        if isinstance(value, list):
            holder[last] = {str(n): v for n, v in enumerate(value)}
        elif isinstance(value, dict):
            holder[last] = list(value.values())
    elif kind == 7:
        for _ in range(rng.choice([1, 49, 99, 101, 210])):
            value = [value] if rng.random() < 0.7 else {"$tuple": [value]}
        holder[last] = value if len(where) < 50 else None
    elif kind == 8:
        other = rng.choice(places)
        if other[: len(where)] != where and where[: len(other)] != other:
            there = at(body, other[:-1])
            holder[last], there[other[-1]] = there[other[-1]], value
    elif (
        kind == 9
        and isinstance(tensors, list)
        and tensors
        and isinstance(tensors[0], list)
        and len(tensors[0]) > 5
    ):
        row = tensors[rng.randrange(len(tensors))]
        if isinstance(row, list) and len(row) > 6:
            choice = rng.randrange(5)
            dims = [rng.choice([0, 1, 2, 50, 1 << 20, 1 << 40, 1 << 46]) for _ in range(rng.randrange(5))]
            if choice == 0:
                row[0] = rng.choice(["torch", "parameter", "numpy", "scalar", "jax", "pickle", "os"])
            elif choice == 1:
                row[1] = rng.choice(DTYPES)
            elif choice == 2:
                row[2], row[3] = dims, [rng.choice([0, 1, 7, 1 << 40]) for _ in dims]
            elif choice == 3:
                row[4] = rng.choice([0, 1, 2500, 1 << 40, 1 << 46])
            else:
                row[6] = 1 - row[6] if row[6] in (0, 1) else 1
    elif kind == 10 and isinstance(chunks, list) and len(chunks) > 1:
        one, two = rng.sample(range(len(chunks)), 2)
        if all(isinstance(chunks[n], list) and len(chunks[n]) == 5 for n in (one, two)):
            column = rng.randrange(5)
            if rng.random() < 0.5:
                chunks[one][column] = chunks[two][column]
            else:
                chunks[one][column], chunks[two][column] = chunks[two][column], chunks[one][column]
    elif type(value) is int:
        holder[last] = value + rng.choice([-4096, -64, -1, 1, 64, 4096, 8 << 20])


def _change_text(data: bytes, rng: random.Random) -> bytes:
    spot = rng.randrange(len(data)) if data else 0
    match rng.randrange(11):
        case 0:
            changed = bytearray(data or b"x")
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        case 1:
            return data[:spot]
        case 2:
            key = rng.choice(["size", "chunks", "tree", "parent", "format", "packs"])
            value = json.dumps(rng.choice([*NUMBERS[:20], *NAMES[:8], []]))
            return data[:1] + f'"{key}":{value},'.encode() + data[1:]
        case 3:
            return (
                data[:-1]
                + b","
                + f'"{rng.choice(["size", "parent", "x"])}":{rng.choice(["-1", "1e5", "null"])}'.encode()
                + b"}"
            )
        case 4:
            return data.decode("latin-1").encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-be"]))
        case 5:
            return data.replace(b'"tree":', b'"tree":' + b"[" * rng.choice([500, 5000, 100_000]), 1)
        case 6:
            return data.replace(b'"step":', b'"step":' + b"9" * rng.choice([30, 5000, 100_000]), 1)
        case 7:
            return data[:spot] + "é\u4e00\U0001f600".encode() + data[spot:]
        case 8:
            return (
                data[:spot]
                + rng.choice([b"\\u0000", b"\x00", b" " * 1000, b"\\ud800", b"NaN", b"-Infinity", b"1e999"])
                + data[spot:]
            )
        case 9:
            return data + data
        case _:
            part = rng.choice([b"[]", b"{}", b"[[]]", b'{"":0}', b"1.5", b'"ab"'])
            return data.replace(
                b'"tree":', b'"tree":[' + (part + b",") * rng.choice([10, 20_000]) + b'0],"x":', 1
            )


# --- watching oneself --------------------------------------------------------------------------------------------

PLAIN = re.compile(r"packs|manifests|drafts|aside|[0-9a-f]{64}\.(pack|json)|(pack|manifest)-[0-9a-f]{16}")
FORBIDDEN = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class", "marshal.loads", "marshal.load", "exec", "os.mkdir"}  # fmt: skip


class Watch:
    """What this process does while `on`. An audit hook cannot be taken away, so it is switched."""

    def __init__(self, shelf: Shelf) -> None:
        self.on = False
        self.allowed = {str(f) for f in shelf.folders} | {".", "owner.json"}  # below an open root
        self.ledger = shelf.rig.url.removeprefix("sqlite:")
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in FORBIDDEN:
            self.seen.append(f"{event} {args!r:.200}")
        elif event == "open" and not isinstance(args[0], int):
            path = os.fsdecode(args[0])
            if path not in self.allowed and not PLAIN.fullmatch(path) and not path.startswith(self.ledger):
                self.seen.append(f"open {path[:200]}")
        elif event == "import" and args[0].partition(".")[0] not in ("jax", "ml_dtypes", *sys.modules):
            self.seen.append(f"import {args[0]}")


def touch(value: Any, size: int) -> None:
    """Look at what was loaded, at both ends of each tensor: memory that is not its own would end this process."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, dict):
            pending += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple, set, frozenset)):
            pending += list(found)
        elif isinstance(found, np.ndarray):
            assert found.nbytes <= size, f"an array of {found.nbytes} bytes out of {size}"
            assert not found.dtype.hasobject or not found.size
            bytes(found.tobytes())
        elif isinstance(found, torch.Tensor):
            assert found.untyped_storage().nbytes() <= size
            if found.numel():
                found.detach()[(0,) * found.dim()].clone(), found.detach()[(-1,) * found.dim()].clone()


def payloads(count: int, rng: random.Random) -> list[str]:
    """Names that lead out of a folder, or would in some reading of them."""
    ups = [
        "../",
        "..\\",
        "..%2f",
        "%2e%2e/",
        "..\u2215",
        ".../",
        "....//",
        "/../",
        "./../",
        "..;/",
        "\u2025/",
        "..\x00/",
    ]
    ends = [
        "etc/passwd",
        "outside/secret",
        "outside/secret.json",
        "outside/secret.pack",
        "",
        "packs",
        "proc/self/environ",
        "dev/zero",
    ]
    found = list(NAMES)
    while len(found) < count:
        way = "".join(rng.choice(ups) for _ in range(rng.randint(1, 6)))
        name = rng.choice(["", "/", "a/", "packs/", "job/", "~", "file:", "C:"]) + way + rng.choice(ends)
        found.append(name if rng.random() < 0.8 else (name + "a" * 64)[:64])
    return found[:count]


def run_names(count: int, seed: int) -> dict[str, Any]:
    """Each payload as a job's name, and in each place of a believed manifest where a name of a file stands."""
    with in_memory() as folder:
        root = folder / "in" / "here"
        root.mkdir(parents=True)
        (folder / "outside").mkdir()
        for name in ("secret", "secret.json", "secret.pack"):
            (folder / "outside" / name).write_bytes(b"secret")
        shelf = Shelf(root, replicas=1)
        shelf.save({"a": b"x" * 9000}, 0)
        head = shelf.rig.ledger.head(JOB)
        assert head is not None
        body = json.loads(shelf.replicas[0].get_manifest(head.digest) or b"")
        watch = Watch(shelf)
        ledger_file = apsw.Connection(shelf.rig.url.removeprefix("sqlite:"))
        ledger_file.set_busy_timeout(5000)
        store, kinds, wrong = shelf.open(), Counter[str](), list[str]()

        def refused(what: str, call: Callable[[], Any]) -> None:
            watch.on = True
            try:
                call()
                kinds["taken"] += 1
            except SubletError as e:
                kinds[type(e).__name__] += 1
            except BaseException as e:
                wrong.append(f"{what} of seed {seed}: {type(e).__name__}: {e!s:.200}")
            finally:
                watch.on = False
            if watch.seen:
                wrong.append(f"{what} of seed {seed}: {watch.seen[:3]}")
                watch.seen.clear()

        for number, name in enumerate(payloads(count, random.Random(seed))):
            what = f"payload {number} {name[:80]!r}"
            for call in (store.load, store.repair):
                refused(what, lambda call=call, name=name: call(name))
            refused(what, lambda name=name: store.save(name, {"a": 1}, expected_version=0, lease=shelf.lease))
            for spot in ("parent", "packs", "chunks"):
                changed = copy.deepcopy(body)
                if spot == "parent":
                    changed["parent"] = name
                elif spot == "packs":
                    changed["packs"][0] = name
                else:
                    changed["chunks"][0][2] = name
                data = json.dumps(changed).encode()
                shelf.replicas[0].put_manifest(digest(data), data)
                ledger_file.execute("UPDATE head SET digest = ? WHERE job = ?", (digest(data), JOB))
                for verb in (
                    store.load,
                    store.repair,
                ):  # the one goes to the chunks, the other to the parents
                    refused(f"{what} as {spot}", lambda verb=verb: verb(JOB))
                shelf.replicas[0].remove("manifest", digest(data))
            if len(wrong) > 20:
                break
        if sorted(p.name for p in (folder / "outside").iterdir()) != ["secret", "secret.json", "secret.pack"]:
            wrong.append("something was changed outside")
        shelf.close()
        return {"kinds": dict(kinds), "wrong": wrong}


def run(count: int, seed: int) -> dict[str, Any]:
    with in_memory() as folder:
        return _run(folder, count, seed)


def _run(folder: Path, count: int, seed: int) -> dict[str, Any]:
    checkpoint.GROUP_BYTES = 2048
    path = str(folder / "canary")
    shelf = Shelf(folder)
    shelf.save(canary_state(path), 0)
    head = shelf.rig.ledger.head(JOB)
    assert head is not None
    good = shelf.replicas[0].get_manifest(head.digest)
    assert good is not None
    body = json.loads(good)
    ledger_file = apsw.Connection(shelf.rig.url.removeprefix("sqlite:"))
    ledger_file.set_busy_timeout(5000)

    def lead_to(name: str) -> None:
        ledger_file.execute("UPDATE head SET digest = ?", (name,))

    def load(data: bytes) -> None:
        nonlocal longest
        name = digest(data)
        for replica in shelf.replicas:
            replica.put_manifest(name, data)
        lead_to(name)
        try:
            watch.on = True
            began = time.perf_counter()
            try:
                touch(store.load(JOB), checkpoint.MAX_STATE_BYTES if size is None else size)
                kinds["loaded"] += 1
            finally:
                took.append(time.perf_counter() - began)
                watch.on = False
            list(store.history(JOB))
        except InvariantBroken:
            raise
        except SubletError as e:
            kinds[type(e).__name__] += 1
            longest = max(longest, len(e.message))
        for replica in shelf.replicas if name != head.digest else ():
            replica.remove("manifest", name)

    with contextlib.suppress(ImportError):  # where it is installed it is ours, and imported as such
        importlib.import_module("ml_dtypes")
    sys.modules["jax"] = None  # type: ignore[assignment]  # not here: it would open half of the machine
    watch = Watch(shelf)
    store = shelf.open()
    kinds: Counter[str] = Counter()
    took: list[float] = []
    wrong: list[str] = []
    size: int | None = None
    longest = 0
    load(good)  # and everything is imported
    size = 64 << 20
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + (2 << 30),) * 2)
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        data = mutate(body, good, rng, path)
        try:
            load(data)
        except BaseException as e:
            wrong.append(f"number {number} of seed {seed}: {type(e).__name__}: {e!s:.300}")
        if took[-1] > SECONDS:
            # Twice: the machine may have been busy with something else.
            load(data)
            if took[-1] > SECONDS:
                wrong.append(f"number {number} of seed {seed}: {took[-1]:.2f} s")
        if watch.seen:
            wrong.append(f"number {number} of seed {seed}: {watch.seen[:3]}")
            watch.seen.clear()
        if len(wrong) > 20:
            break
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base
    lead_to(head.digest)
    after = store.load(JOB)
    assert after["pickle"] == canary_state(path)["pickle"]
    if longest > 2000:
        wrong.append(f"an error of {longest} characters")
    if os.path.exists(path):
        wrong.append("the canary ran")
    shelf.close()
    return {"kinds": dict(kinds), "slowest": max(took), "growth": growth, "wrong": wrong}


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps({"manifests": run, "names": run_names}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))))
