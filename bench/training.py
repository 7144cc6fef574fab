"""What `sublet.train` costs: a commit beside the disk, a checkpoint beside training, and what preemptions take.

Rules of this file:
- A commit without state is measured against two things called "a raw fsync commit": the least SQLite can do durably, which has the goal,
  and a bare write of as many bytes to a file that was grown before, which nobody could commit anything with.
- A checkpoint inside `sublet.train` is measured against the store's own `save_behind` on the same model in the same rounds: the run may
  not add to it. The peers' loops stand beside them.
- Preemptions are in `goodput.py` and `restarts.py`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import apsw

import sublet
from bench import goodput, restarts
from bench.checkpoint_peers import Dcp, TorchSave, sync
from bench.checkpoints import Job
from bench.ledgers import furnish, on_postgres, on_sqlite, postgres_server, step_cycle
from bench.lives import home
from bench.measure import Goal, Section, Subject, interleave, median_ratio, progress
from sublet.settings import load_settings

COMMIT, COMMIT_POSTGRES = "sublet commit, SQLite", "sublet commit, PostgreSQL"
LEAST, LEAST_POSTGRES = "one-row UPDATE, SQLite", "one-row UPDATE, PostgreSQL"
BARE = "pwrite + fdatasync"
MOST_OF_RAW = 1.5
LOG_GROWN = 1500  # commits until both write-ahead logs have their size: after that they are written over, as the bare file is

ROUNDS = 5
STEPS = 6  # of a window: one save, and the steps after it
MOST_OF_STORE = 1.15
TRAIN, TRAIN_OVER = "sublet.train", "sublet.train, overlapped"
STORE, STORE_OVER = "save_behind", "save_behind, overlapped"
TORCH, DCP = "torch.save + fsync", "DCP async_save"


def run(place: Path) -> list[Section]:
    sections = [_commits(place)]
    if find_spec("torch") is not None:
        with home(place / "stalls"):
            sections.append(_stalls(place))
    return [*sections, *goodput.run(place), *restarts.run(place)]


# --- a commit without state ----------------------------------------------------------------------------------


def _commits(place: Path) -> Section:
    progress("training: commits ...")
    with contextlib.ExitStack() as stack:
        ledger = on_sqlite(place / "training.db")
        stack.callback(ledger.close)
        cycle = step_cycle(ledger, furnish(ledger)[0])
        size = _log_bytes(place / "training.db-wal", cycle)
        url = stack.enter_context(postgres_server(place))
        shared = on_postgres(url, "training")
        stack.callback(shared.close)
        shared_cycle = step_cycle(shared, furnish(shared)[0])
        rates = interleave(
            [
                Subject(COMMIT, cycle, ops=1, warm_cycles=LOG_GROWN),
                Subject(LEAST, _least_of_sqlite(place, stack), ops=1, warm_cycles=LOG_GROWN),
                Subject(BARE, _bare(place, size, stack), ops=1),
                Subject(COMMIT_POSTGRES, shared_cycle, ops=1),
                Subject(LEAST_POSTGRES, _least_of_postgres(shared), ops=1),
            ]
        )
        for each in (ledger, shared):
            faults = each.verify().faults
            assert not faults, faults[:3]
    section = Section(
        "One step committed, without state: effect and head in one transaction",
        ["", "us", "rounds", f"x {LEAST}", f"x {BARE}", ""],
    )
    notes = {
        COMMIT: "fence, head, effect, journal, clock: durable",
        LEAST: "WAL, synchronous=FULL: the least a database commits",
        BARE: f"{size:,} bytes, as many as the commit writes, over themselves",
        COMMIT_POSTGRES: "the same, one call",
        LEAST_POSTGRES: "over the same connection",
    }
    for name, found in rates.items():
        took = sorted(1e6 / rate for rate in found)
        section.rows.append(
            [
                name,
                f"{statistics.median(took):,.0f}",
                f"{took[0]:,.0f}-{took[-1]:,.0f}",
                f"{median_ratio(rates[LEAST], found):.2f}",
                f"{median_ratio(rates[BARE], found):.2f}",
                notes[name],
            ]
        )
    section.goals += [
        Goal(
            "commit, one-row UPDATEs of SQLite",
            median_ratio(rates[LEAST], rates[COMMIT]),
            MOST_OF_RAW,
            at_most=True,
        ),
        Goal(
            "commit, one-row UPDATEs of PostgreSQL",
            median_ratio(rates[LEAST_POSTGRES], rates[COMMIT_POSTGRES]),
            MOST_OF_RAW,
            at_most=True,
        ),
    ]
    section.notes += [
        "the goal is against the one-row UPDATE: the least that is durable, atomic and can be read again by somebody else",
        f"against the bare write, which is none of these, a commit on SQLite costs {median_ratio(rates[BARE], rates[COMMIT]):.2f} x",
    ]
    section.data = {name: {"per_s": found} for name, found in rates.items()}
    return section


def _log_bytes(log: Path, cycle: Callable[[], None], cycles: int = 200) -> int:
    """What one commit adds to the write-ahead log."""
    cycle()
    before = log.stat().st_size
    for _ in range(cycles):
        cycle()
    return (log.stat().st_size - before) // cycles


def _bare(place: Path, size: int, stack: contextlib.ExitStack) -> Callable[[], None]:
    fd = os.open(place / "bare", os.O_CREAT | os.O_RDWR, 0o600)
    stack.callback(os.close, fd)
    data = os.urandom(size)
    os.pwrite(fd, data, 0)
    os.fsync(fd)

    def cycle() -> None:
        os.pwrite(fd, data, 0)
        os.fdatasync(fd)

    return cycle


def _least_of_sqlite(place: Path, stack: contextlib.ExitStack) -> Callable[[], None]:
    db = apsw.Connection(str(place / "least.db"))
    stack.callback(db.close)
    for line in (
        "PRAGMA journal_mode = wal",
        "PRAGMA synchronous = full",
        "CREATE TABLE one (id INTEGER PRIMARY KEY, value INTEGER)",
        "INSERT INTO one VALUES (1, 0)",
    ):
        db.execute(line)

    def cycle() -> None:
        db.execute("UPDATE one SET value = value + 1 WHERE id = 1")

    return cycle


def _least_of_postgres(ledger: Any) -> Callable[[], None]:
    engine = ledger.engine
    engine.call(
        "SELECT 1 FROM (SELECT 1) AS nothing", (), durable=True
    )  # the connection is there, with its schema
    engine.attempt(True, lambda c: c.execute("CREATE TABLE one (id int PRIMARY KEY, value bigint)"), None)
    engine.attempt(True, lambda c: c.execute("INSERT INTO one VALUES (1, 0)"), None)

    def cycle() -> None:
        engine.attempt(True, lambda c: c.execute("UPDATE one SET value = value + 1 WHERE id = 1"), None)

    return cycle


# --- a checkpoint beside training ----------------------------------------------------------------------------


class _Windows:
    """Windows of steps, each beginning with what a way of saving does before its first one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.stall: dict[str, list[float]] = {}
        self.slower: dict[str, list[float]] = {}
        self._alone: list[float] = []

    def alone(self) -> None:
        self._alone = self._steps(lambda: None)

    def _steps(
        self, before_first: Callable[[], None], before: Callable[[], None] = lambda: None, staged: Any = None
    ) -> list[float]:
        took = []
        for number in range(STEPS):
            begun = time.perf_counter()
            (before_first if number == 0 else before)()
            waiting = staged() if staged is not None and number == 0 else None
            if waiting is None:
                self.job.step()
            else:
                self.job.optim.zero_grad()
                self.job.model(self.job.batch).square().mean().backward()
                waiting.result()  # the optimizer may not write to the state before it is staged
                self.job.optim.step()
            took.append(time.perf_counter() - begun)
        return took

    def measure(self, name: str, keep: bool, before_first: Callable[[], None], **options: Any) -> None:
        took = self._steps(before_first, **options)
        if keep:
            one = statistics.median(self._alone)
            self.stall.setdefault(name, []).append(max(took) - one)
            self.slower.setdefault(name, []).append(sum(took) - sum(self._alone))


def _stalls(place: Path) -> Section:
    progress("training: checkpoints beside training ...")
    job = Job()
    windows = _Windows(job)
    settings = load_settings()
    store = sublet.checkpoints(settings=settings)
    torch_save, dcp = TorchSave(place), Dcp(place)
    state = {"model": job.model, "optim": job.optim}
    runs = {
        name: sublet.train(
            f"bench/{n}",
            state,
            every=STEPS,
            overlap=overlap,
            vram="1GiB",
            ttl="10m",
            progress=False,
            settings=settings,
        )
        for n, (name, overlap) in enumerate({TRAIN: None, TRAIN_OVER: job.optim}.items())
    }
    loops = {name: run.steps(1 << 40) for name, run in runs.items()}
    for loop in loops.values():  # to the step before which it saves for the first time
        for _ in range(STEPS):
            next(loop)
    versions = {STORE: 0, STORE_OVER: 0}
    with sublet.gpu(vram="1GiB", ttl="30m", settings=settings) as lease:
        for turn in range(ROUNDS + 1):
            keep = turn > 0  # arenas and stagers are made in the first
            windows.alone()
            for name, loop in loops.items():
                advance = _nothing_returned(loop)
                windows.measure(name, keep, advance, before=advance)
                _settle(runs[name])
            for name, overlap in ((STORE, None), (STORE_OVER, job.optim)):
                saving: list[Any] = []

                def save(name: str = name, overlap: Any = overlap, saving: list[Any] = saving) -> None:
                    saving.append(
                        store.save_behind(
                            f"bench/{name[-4:]}",
                            job.state(),
                            expected_version=versions[name],
                            lease=lease,
                            overlap=overlap,
                        )
                    )

                windows.measure(name, keep, save)
                versions[name] = saving[0].result().version
            _keep_newest(settings)
            written: list[Any] = []

            def stage(written: list[Any] = written) -> Any:
                staged, upload = dcp.save_behind(job.state())
                written.append(upload)
                return staged

            windows.measure(DCP, keep, lambda: None, staged=stage)
            written[0].result()
            sync(dcp.path, dcp.path.parent)
            windows.measure(TORCH, keep, lambda: torch_save.save(job.state()))
    dcp.close()
    store.close()
    for loop in loops.values():
        loop.close()  # type: ignore[attr-defined]  # leaves in the middle of a step: what is committed is committed
    return _stall_section(windows, job)


def _nothing_returned(loop: Any) -> Callable[[], None]:
    def advance() -> None:
        next(loop)

    return advance


def _settle(run: Any) -> None:
    """Wait until its save is durable, so that it does not run beside the next subject."""
    behind = run._saves.under_way
    if behind is not None:
        behind.saving.wait()


def _keep_newest(settings: Any) -> None:
    """The disk is not endless: packs of older versions go, as a sweep would have it."""
    with sublet.checkpoints(settings=settings) as store:
        from sublet.wiring import open_ledger

        heads = open_ledger(settings).heads()
        needed = {pack for head in heads for pack in store.manifest(head.job).packs}
    for path in Path(settings.home, "store", "packs").glob("*.pack"):
        if path.stem not in needed:
            path.unlink()


def _stall_section(windows: _Windows, job: Job) -> Section:
    section = Section(
        f"A checkpoint of {job.bytes / 1e9:.2f} GB every {STEPS} steps, s",
        ["", "longest step, beyond one alone", "range", "slows the window by", "range"],
    )
    stall = {name: statistics.median(found) for name, found in windows.stall.items()}
    slower = {name: statistics.median(found) for name, found in windows.slower.items()}
    for name in (TRAIN, STORE, TRAIN_OVER, STORE_OVER, DCP, TORCH):
        stalls, slows = windows.stall[name], windows.slower[name]
        section.rows.append(
            [
                name,
                f"{stall[name]:.3f}",
                f"{min(stalls):.3f}-{max(stalls):.3f}",
                f"{slower[name]:+.2f}",
                f"{min(slows):+.2f}-{max(slows):+.2f}",
            ]
        )
    for ours, own, what in ((TRAIN, STORE, ""), (TRAIN_OVER, STORE_OVER, ", overlapped")):
        section.goals += [
            Goal(
                f"stall in a run{what}, of the store's own",
                _ratio(stall[ours], stall[own]),
                MOST_OF_STORE,
                at_most=True,
            ),
            Goal(
                f"slowdown in a run{what}, of the store's own",
                _ratio(slower[ours], slower[own]),
                MOST_OF_STORE,
                at_most=True,
            ),
        ]
    section.notes.append(
        "DCP stages in the background into shared memory it keeps; its first optimizer step waits for the staging"
    )
    section.data = {"stall": windows.stall, "slower": windows.slower}
    return section


def _ratio(ours: float, other: float) -> float:
    """Below 10 ms a difference is the machine's."""
    return max(ours, 0.01) / max(other, 0.01)
