"""What a checkpoint costs: until it is durable, until it is back, and what training pays for it.

Rules of this file:
- The state is a real model and its AdamW: 89 M parameters with two moments in fp32, 1.07 GB in some 590 tensors.
- Peers are in `checkpoint_peers.py`, with the same durability. Rounds interleave them; a figure is a median.
- A cold restore reads from the disk: the page cache is dropped first where we may, and the table says when we could not.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sublet
from bench.checkpoint_peers import Dcp, Orbax, State, flat, installed, sync, timed
from bench.measure import Goal, Section, progress
from sublet import wiring
from sublet.leases.warden import warden_process
from sublet.settings import Settings, load_settings

ROUNDS = 5
WIDTH, DEPTH, BATCH = 1096, 74, 8
STEPS = 5
BLOCK = 8 << 20


def run(place: Path) -> list[Section]:
    if find_spec("torch") is None:
        return []
    with _home(place) as settings:
        job = Job()
        return [
            _saves(place, settings, job),
            _replicas(place, settings, job),
            _restores(place, settings, job),
            _stalls(place, settings, job),
            _memory(place),
        ]


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
        pid = warden_process.warden_state(settings)[2]
        wiring.close_all()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


class Job:
    """A model in training."""

    def __init__(self) -> None:
        torch: Any = import_module("torch")
        torch.manual_seed(0)
        self.torch = torch
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(BATCH, WIDTH)
        self.step()
        self.bytes = sum(t.nbytes for t in flat(self.state()).values())

    def step(self) -> None:
        self.optim.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optim.step()

    def state(self) -> State:
        optim = self.optim.state_dict()
        # Texts as keys: DCP takes no others.
        return {
            "model": dict(self.model.state_dict()),
            "optim": {str(n): dict(s) for n, s in optim["state"].items()},
        }

    def touch(self, percent: int, turn: int) -> None:
        """Change so many per cent of the tensors, as one unfrozen part of a model and its moments."""
        parameters = list(self.model.parameters())
        with self.torch.no_grad():
            for parameter in parameters[: max(1, len(parameters) * percent // 100)]:
                own = self.optim.state[parameter]
                for tensor in (parameter, own["exp_avg"], own["exp_avg_sq"]):
                    tensor.add_(1e-6 * (turn + 1))


def _row(section: Section, name: str, times: list[float], *more: str) -> None:
    section.rows.append(
        [name, f"{statistics.median(times):.3f}", f"{min(times):.3f}-{max(times):.3f}", *more]
    )


def _median(times: list[float]) -> float:
    return statistics.median(times)


# --- until it is durable -------------------------------------------------------------------------------------


def _raw(place: Path, size: int) -> float:
    """The same bytes, past the page cache, in blocks of 8 MiB by two threads: what the disk can do."""
    block = mmap.mmap(-1, BLOCK)
    block.write(os.urandom(1 << 20) * 8)
    path = place / "raw"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    try:
        begun = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda at: os.pwrite(fd, block, at), range(0, size, BLOCK)))
        os.fsync(fd)
        return time.perf_counter() - begun
    finally:
        os.close(fd)
        path.unlink()


def _saves(place: Path, settings: Settings, job: Job) -> Section:
    progress("checkpoints: saves ...")
    store = sublet.checkpoints(settings=settings)
    peers = installed(place)
    full, part, raw = "sublet, full", "sublet, 10 % changed", "raw O_DIRECT"
    taken: dict[str, list[float]] = {name: [] for name in (full, part, raw, *(p.name for p in peers))}
    with sublet.gpu(vram="1GiB", ttl="10m", settings=settings) as lease:
        version = store.save(
            "bench", job.state(), expected_version=0, lease=lease
        ).version  # the arena is there
        for turn in range(ROUNDS):
            for percent, name in ((100, full), (10, part)):
                job.touch(percent, turn)
                state = job.state()
                taken[name].append(timed(store.save, "bench", state, expected_version=version, lease=lease))
                version += 1
            for peer in peers:
                taken[peer.name].append(timed(peer.save, job.state()))
            taken[raw].append(_raw(place, job.bytes))
            _keep_newest(settings)
    store.close()
    section = Section(
        f"Until a state of {job.bytes / 1e9:.2f} GB is durable, s", ["", "median", "range", "to ours, full"]
    )
    ours = _median(taken[full])
    for name, times in taken.items():
        _row(section, name, times, f"{_median(times) / ours:.2f}")
    best = min(_median(taken[p.name]) for p in peers)
    section.goals += [
        Goal("full save, against the best peer", best / ours, 1.0),
        Goal("full save, raw writes it costs", ours / _median(taken[raw]), 1.5, at_most=True),
        Goal("10 % changed, against the best peer's full save", best / _median(taken[part]), 4.0),
    ]
    section.data = dict(taken)
    return section


def _keep_newest(settings: Settings) -> None:
    """The disk is not endless: packs of older versions go, as a sweep would have it."""
    store = sublet.checkpoints(settings=settings)
    needed = set(store.manifest("bench").packs)
    for path in Path(settings.home, "store", "packs").glob("*.pack"):
        if path.stem not in needed:
            path.unlink()


def _replicas(place: Path, settings: Settings, job: Job) -> Section:
    progress("checkpoints: three replicas ...")
    taken: dict[str, list[float]] = {"one replica": [], "three, two must confirm": []}
    with sublet.gpu(vram="1GiB", ttl="10m", settings=settings) as lease:
        stores = {
            name: sublet.checkpoints(
                *(
                    f"dir:{place}/many/{name[:3]}{n}@disk{n}"
                    for n in range(1 if name.startswith("one") else 3)
                ),
                settings=settings,
            )
            for name in taken
        }
        versions = dict.fromkeys(taken, 0)
        for turn in range(ROUNDS):
            for name, store in stores.items():
                job.touch(100, turn)
                cost = timed(
                    store.save, f"bench/{name[:3]}", job.state(), expected_version=versions[name], lease=lease
                )
                versions[name] += 1
                if turn:  # not the one that makes the arena
                    taken[name].append(cost)
            for path in place.glob("many/*/packs/*.pack"):
                path.unlink()
        for store in stores.values():
            store.close()
    section = Section("Full save to replicas on one disk, s", ["", "median", "range"])
    for name, times in taken.items():
        _row(section, name, times)
    one, three = (_median(times) for times in taken.values())
    section.goals.append(Goal("three replicas, of one", three / one, 2.2, at_most=True))
    section.data = dict(taken)
    return section


# --- until it is back ----------------------------------------------------------------------------------------


def _drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def _restores(place: Path, settings: Settings, job: Job) -> Section:
    progress("checkpoints: restores ...")
    peers = installed(place)
    live = job.state()
    there = "sublet, arena there"
    fresh = {
        "sublet, new process that prefetched": "prefetch",
        "sublet, new process that did not": "plain",
        "sublet, arena outlived its process": "outlived",
    }
    taken: dict[str, list[float]] = {name: [] for name in (there, *fresh, *(p.name for p in peers))}
    cold = True
    with sublet.checkpoints(settings=settings) as store:
        store.load("bench", into=live)
        for _ in range(ROUNDS):
            cold = _drop_caches()
            slot = store._slots.get("bench")
            assert slot is not None
            slot.entries = [None] * len(
                slot.entries
            )  # its pages are there, and nothing is known of what is in them
            taken[there].append(timed(store.load, "bench", into=live))
            for peer in peers:
                _drop_caches()
                tensors = flat(live)
                taken[peer.name].append(timed(peer.load, tensors))
    for _ in range(
        ROUNDS
    ):  # apart from those above: what a new process takes from this one's memory would be paid by the next
        for name, how in fresh.items():
            taken[name].append(_in_a_new_process(how))
    section = Section("Restore into live tensors from a cold disk, s", ["", "median", "range"])
    for name, times in taken.items():
        _row(section, name, times)
    best = min(_median(taken[p.name]) for p in peers)
    section.goals += [
        Goal("restore, against the best peer", best / _median(taken[there]), 1.0),
        *(
            Goal(f"restore, {name[8:]}, against the best peer", best / _median(taken[name]), 1.0)
            for name in fresh
        ),
    ]
    section.notes.append(
        "ours verifies every byte and changes no tensor before all of them are verified; no peer verifies"
    )
    section.notes.append(
        "new processes pay for fresh pages of the arena, which the first save would pay for otherwise"
    )
    if not cold:
        section.notes.append("the page cache could not be dropped: these are warm")
    section.data = dict(taken)
    return section


NEW_PROCESS = """
import os, sys, time
import sublet
store = sublet.checkpoints()
if sys.argv[1] == "prefetch":
    store.prefetch("bench")
from bench.checkpoints import Job
job = Job()
if sys.argv[1] == "leave":
    version = store.manifest("bench").version
    with sublet.gpu(vram="1GiB", ttl="1m") as lease:
        store.load("bench", into=job.state())
        store.save("bench", job.state(), expected_version=version, lease=lease)
        os.kill(os.getpid(), 9)
live = job.state()
begun = time.perf_counter()
store.load("bench", into=live)
print(time.perf_counter() - begun)
store.close()
"""


def _in_a_new_process(how: str) -> float:
    """What its load takes, after the model was built."""
    if how == "outlived":  # by one that was killed after a save
        subprocess.run([sys.executable, "-c", NEW_PROCESS, "leave"], check=False, stderr=subprocess.DEVNULL)
    _drop_caches()
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, how], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


# --- what training pays --------------------------------------------------------------------------------------


def _steps(job: Job) -> float:
    def steps() -> None:
        for _ in range(STEPS):
            job.step()

    return timed(steps)


def _memcpy(job: Job) -> Callable[[], float]:
    """One copy of the state into memory that is there, by torch's own threads."""
    tensors = list(flat(job.state()).values())
    copies = [t.clone() for t in tensors]
    return lambda: timed(lambda: [c.copy_(t) for c, t in zip(copies, tensors, strict=True)])


def _stalls(place: Path, settings: Settings, job: Job) -> Section:
    progress("checkpoints: beside training ...")
    store = sublet.checkpoints(settings=settings)
    dcp = Dcp(place)
    orbax = None
    if find_spec("orbax") is not None:
        with contextlib.suppress(RuntimeError):
            orbax = Orbax(place, 448, job.bytes // 4 // 448)
    torch_save = installed(place)[0]
    copy, ours, behind = "one memcpy", "sublet, copied at once", "sublet, overlapped"
    blocked: dict[str, list[float]] = {n: [] for n in (copy, ours, behind, "DCP async", "torch.save")}
    slowed: dict[str, list[float]] = {n: [] for n in (ours, behind, "DCP async", "torch.save")}
    durable: dict[str, list[float]] = {n: [] for n in slowed}
    memcpy = _memcpy(job)
    with sublet.gpu(vram="1GiB", ttl="30m", settings=settings) as lease:
        version = store.manifest("bench").version
        store.load("bench", into=job.state())
        for turn in range(ROUNDS + 1):
            alone = _steps(job)
            blocked[copy].append(memcpy())
            for name, overlap in ((ours, None), (behind, job.optim)):
                state = job.state()
                begun = time.perf_counter()
                saving = store.save_behind(
                    "bench", state, expected_version=version, lease=lease, overlap=overlap
                )
                blocked[name].append(time.perf_counter() - begun)
                slowed[name].append(_steps(job) + blocked[name][-1] - alone)
                version = saving.result().version
                durable[name].append(time.perf_counter() - begun)
                alone = min(alone, _steps(job))
            _keep_newest(settings)
            begun = time.perf_counter()
            staged, written = dcp.save_behind(job.state())
            blocked["DCP async"].append(time.perf_counter() - begun)
            # Training may not write to the state before it is staged: that wait is part of what it pays.
            slowed["DCP async"].append(_steps_after(job, staged) + blocked["DCP async"][-1] - alone)
            written.result()
            sync(dcp.path, dcp.path.parent)
            durable["DCP async"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            torch_save.save(job.state())
            blocked["torch.save"].append(time.perf_counter() - begun)
            durable["torch.save"].append(blocked["torch.save"][-1])
            slowed["torch.save"].append(_steps(job) + blocked["torch.save"][-1] - alone)
            if orbax is not None:
                a, b = orbax.save_behind()
                blocked.setdefault(orbax.name, []).append(a)
                durable.setdefault(orbax.name, []).append(b)
            if not turn:  # stagers and arenas are made in the first
                for table in (blocked, slowed, durable):
                    for times in table.values():
                        times.clear()
    dcp.close()
    if orbax is not None:
        orbax.close()
    store.close()
    section = Section(
        f"A save beside training, s ({STEPS} steps)",
        ["", "blocked", "range", "slows the steps by", "durable after"],
    )
    for name, times in blocked.items():
        _row(
            section,
            name,
            times,
            f"{_median(slowed[name]):+.2f}" if slowed.get(name) else "",
            f"{_median(durable[name]):.2f}" if durable.get(name) else "",
        )
    section.goals += [
        Goal(
            "stall, copies of the state", _median(blocked[ours]) / _median(blocked[copy]), 1.2, at_most=True
        ),
        Goal("stall when overlapped, DCP's", _median(blocked["DCP async"]) / _median(blocked[behind]), 1.0),
        Goal("stall, torch.save's", _median(blocked["torch.save"]) / _median(blocked[ours]), 8.0),
        Goal(
            "slowdown of five steps, of DCP's",
            max(0.0, min(_median(slowed[ours]), _median(slowed[behind])))
            / max(1e-3, _median(slowed["DCP async"])),
            0.5,
            at_most=True,
        ),
    ]
    if orbax is None:
        section.notes.append("Orbax is not installed: 'pip install orbax-checkpoint jax'")
    section.data = {"blocked": blocked, "slowed": slowed, "durable": durable}
    return section


def _steps_after(job: Job, staged: Any) -> float:
    begun = time.perf_counter()
    for number in range(STEPS):
        job.optim.zero_grad()
        job.model(job.batch).square().mean().backward()
        if not number:
            staged.result()
        job.optim.step()
    return time.perf_counter() - begun


# --- memory --------------------------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
import sublet
from bench.checkpoints import Job
from bench.checkpoint_peers import Dcp
job = Job()
job.step()
def peak():  # not getrusage's: a child begins with its parent's
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
if sys.argv[1] == "dcp":
    peer = Dcp(Path(sys.argv[2]))
    for _ in range(2):
        staged, written = peer.save_behind(job.state())
        written.result()
        job.step()
    peer.close()
else:
    store = sublet.checkpoints(f"dir:{sys.argv[2]}/peak")
    with sublet.gpu(vram="1GiB", ttl="5m") as lease:
        for version in range(2):
            store.save_behind("peak", job.state(), expected_version=version, lease=lease).result()
            job.step()
    store.close()
print((peak() - before) * 1024, job.bytes)
"""


def _memory(place: Path) -> Section:
    progress("checkpoints: memory ...")
    gc.collect()
    extra: dict[str, float] = {}
    size = 1
    for name in ("sublet", "dcp"):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, name, str(place)], check=True, capture_output=True, text=True
        )
        more, size = map(int, done.stdout.split())
        extra[name] = more / size
    section = Section("Peak memory of the trainer beyond training, in states", ["", "states"])
    section.rows += [[name, f"{value:.2f}"] for name, value in extra.items()]
    section.goals.append(Goal("extra memory, states", extra["sublet"], 1.0, at_most=True))
    section.notes.append(f"a state is {size / 1e9:.2f} GB; the writer process maps the trainer's arena")
    section.data = dict(extra)
    return section
