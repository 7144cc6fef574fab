"""What a checkpoint costs: until it is durable, until it is back, and what the training thread pays.

Rules of this file:
- The state is a model of 89 M parameters with two Adam moments in fp32: 1.07 GB in 448 tensors, made once, the same for everybody.
- Same durability on both sides: a peer's file is synced, with its folder, before its clock stops.
- A cold restore reads from the disk: the page cache is dropped first where we may, and the table says when we could not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sublet
from bench.measure import Goal, Section, progress
from sublet import wiring
from sublet.settings import Settings, load_settings

ROUNDS = 5
TENSORS = 448
PARAMETERS = 89_000_000


def run(place: Path) -> list[Section]:
    if find_spec("torch") is None:
        return []
    with _home(place) as settings:
        state = _state()
        return [_saves(place, settings, state), _restores(place, settings, state)]


@contextlib.contextmanager
def _home(place: Path) -> Iterator[Settings]:
    os.environ.update(
        SUBLET_HOME=str(place / "checkpoints"),
        SUBLET_LEDGER=f"sqlite:{place}/checkpoints/ledger.db",
        SUBLET_STORE=f"dir:{place}/checkpoints/store",
        SUBLET_DEVICES="host:1x4GiB",
    )
    settings = load_settings()
    try:
        yield settings
    finally:
        pid = wiring.warden_state(settings)[2]
        wiring.close_all()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _state() -> dict[str, Any]:
    torch: Any = import_module("torch")
    torch.manual_seed(0)
    names = [f"layer{n}.weight" for n in range(TENSORS // 3)]
    each = PARAMETERS // len(names)
    return {part: {name: torch.randn(each) for name in names} for part in ("model", "exp_avg", "exp_avg_sq")}


def _bytes(state: dict[str, Any]) -> int:
    return sum(t.nbytes for part in state.values() for t in part.values())


def _touch(state: dict[str, Any], percent: int, turn: int) -> None:
    """Change so many per cent of the tensors, in every part."""
    names = list(state["model"])
    for name in names[: max(1, len(names) * percent // 100)]:
        for part in state.values():
            part[name].add_(1.0 + turn)


def _sync(path: Path) -> None:
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _peers(place: Path) -> dict[str, tuple[Callable[[dict[str, Any]], None], Callable[[], Any]]]:
    """How each saves durably, and how it reads back into memory that was touched."""
    torch: Any = import_module("torch")
    pt = place / "peer.pt"

    def save_torch(state: dict[str, Any]) -> None:
        torch.save(state, pt)
        _sync(pt)

    def load_torch() -> Any:
        loaded = torch.load(pt, mmap=True, weights_only=True)
        return sum(float(t.sum()) for part in loaded.values() for t in part.values())

    peers = {"torch.save": (save_torch, load_torch)}
    if find_spec("safetensors") is not None:
        tensors: Any = import_module("safetensors.torch")
        st = place / "peer.safetensors"

        def save_safe(state: dict[str, Any]) -> None:
            tensors.save_file({f"{p}.{n}": t for p, part in state.items() for n, t in part.items()}, st)
            _sync(st)

        def load_safe() -> Any:
            return sum(float(t.sum()) for t in tensors.load_file(st).values())

        peers["safetensors"] = (save_safe, load_safe)
    return peers


def _timed(work: Callable[..., Any], *args: Any, **options: Any) -> float:
    begun = time.perf_counter()
    work(*args, **options)
    return time.perf_counter() - begun


def _raw(place: Path, size: int) -> float:
    """The same bytes, past the page cache, in blocks of 8 MiB: what the disk can do."""
    mmap: Any = import_module("mmap")
    block = mmap.mmap(-1, 8 << 20)
    block.write(os.urandom(1 << 20) * 8)
    path = place / "raw"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    try:
        begun = time.perf_counter()
        for at in range(0, size, 8 << 20):
            os.pwrite(fd, block, at)
        os.fsync(fd)
        return time.perf_counter() - begun
    finally:
        os.close(fd)
        path.unlink()


def _saves(place: Path, settings: Settings, state: dict[str, Any]) -> Section:
    progress("checkpoints: saves ...")
    store = sublet.checkpoints(settings=settings)
    peers = _peers(place)
    taken: dict[str, list[float]] = {"sublet, full": [], "sublet, 10 % changed": [], "raw O_DIRECT": []}
    taken |= {name: [] for name in peers}
    version = 0
    with sublet.gpu(vram="1GiB", ttl="5m", settings=settings) as lease:
        version = store.save(
            "bench", state, expected_version=version, lease=lease
        ).version  # the arena is there
        for turn in range(ROUNDS):
            _touch(state, 100, turn)
            taken["sublet, full"].append(
                _timed(store.save, "bench", state, expected_version=version, lease=lease)
            )
            version += 1
            _touch(state, 10, turn)
            taken["sublet, 10 % changed"].append(
                _timed(store.save, "bench", state, expected_version=version, lease=lease)
            )
            version += 1
            for name, (save, _) in peers.items():
                taken[name].append(_timed(save, state))
            taken["raw O_DIRECT"].append(_raw(place, _bytes(state)))
    section = Section(
        f"Until a state of {_bytes(state) / 1e9:.2f} GB is durable, s",
        ["", "median", "range", "to ours, full"],
    )
    ours = statistics.median(taken["sublet, full"])
    for name, times in taken.items():
        median = statistics.median(times)
        section.rows.append(
            [name, f"{median:.2f}", f"{min(times):.2f}-{max(times):.2f}", f"{median / ours:.2f}"]
        )
    best = min(statistics.median(taken[name]) for name in peers)
    section.goals += [
        Goal("full save, against the best peer", best / ours, 1.0),
        Goal(
            "full save, raw writes it costs",
            ours / statistics.median(taken["raw O_DIRECT"]),
            1.5,
            at_most=True,
        ),
        Goal(
            "10 % changed, against the best peer",
            best / statistics.median(taken["sublet, 10 % changed"]),
            4.0,
        ),
    ]
    section.data = dict(taken)
    return section


def _drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def _restores(place: Path, settings: Settings, state: dict[str, Any]) -> Section:
    progress("checkpoints: restores ...")
    store = sublet.checkpoints(settings=settings)
    peers = _peers(place)
    cold = True
    taken: dict[str, list[float]] = {"sublet, verified": []} | {name: [] for name in peers}
    for _ in range(ROUNDS):
        cold = _drop_caches()
        taken["sublet, verified"].append(_timed(lambda: store.load("bench", into=state)))
        for name, (_, load) in peers.items():
            _drop_caches()
            taken[name].append(_timed(load))
    section = Section("Restore, s", ["", "median", "range"])
    for name, times in taken.items():
        section.rows.append([name, f"{statistics.median(times):.2f}", f"{min(times):.2f}-{max(times):.2f}"])
    best = min(statistics.median(taken[name]) for name in peers)
    section.goals.append(
        Goal("restore, against the best peer", best / statistics.median(taken["sublet, verified"]), 1.0)
    )
    section.notes.append(
        "ours copies into live tensors and verifies every byte; a peer's tensors are read once"
    )
    if not cold:
        section.notes.append("the page cache could not be dropped: these are warm")
    section.data = dict(taken)
    return section
