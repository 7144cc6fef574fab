"""Lives of jobs: each a process forked from one that has everything imported, as the zygote's are, and ended as the measurement says.

Rules of this file:
- The real thing: `sublet.train` with a ledger, a warden and a store on the disk that is measured. Only the step is small.
- What a life did is told through memory it shares with the measuring process, because a killed process tells nothing afterwards.
- The measuring process is a fresh one (`in_a_warm_process`): it computes nothing, starts no thread, and keeps no ledger open while it forks.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import sublet
import sublet.ledger.engines.sqlite.engine
import sublet.store.replicas.opening
import sublet.training.train
from sublet import wiring
from sublet.leases.warden import warden_process
from sublet.ports.ledger import Ledger
from sublet.settings import load_settings

DRAINED = 85
CRASHED = 1
END_S = 60.0
VALUES = 4096  # float64: 32 KiB, so that what is measured is the protocol and not the disk

_CALL = (
    "import json, sys; from importlib import import_module; "
    "print(json.dumps(getattr(import_module(sys.argv[1]), sys.argv[2])(*sys.argv[3:])))"
)


def in_a_warm_process(module: str, function: str, *args: object) -> Any:
    """What the function returns. It runs in a new process, which may fork: no thread of ours is in it."""
    done = subprocess.run(
        [sys.executable, "-c", _CALL, module, function, *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@contextlib.contextmanager
def home(folder: Path, *, devices: str = "host:1x16GiB") -> Iterator[None]:
    """A ledger, a store and a warden of their own, for this process and those it starts."""
    settings = {
        "SUBLET_HOME": str(folder),
        "SUBLET_LEDGER": f"sqlite:{folder}/ledger.db",
        "SUBLET_STORE": f"dir:{folder}/store",
        "SUBLET_DEVICES": devices,
        # Device memory is looked for machine-wide: each home must have devices of its own.
        "SUBLET_HOST": f"bench-{os.getpid()}-{folder.name}",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        warden_process.ensure_warden(load_settings())
        _warm_up()
        yield
    finally:
        pid = warden_process.warden_state(load_settings())[2]
        wiring.close_all()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                # Asked to leave it would stay for leases of processes that were just killed, and nobody comes back to this home.
                os.kill(pid, signal.SIGKILL)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _warm_up() -> None:
    """What a start looks for and imports late, once, so that every life has it from the beginning."""
    wiring.notice_sources(load_settings(), grace_us=1)
    with looking() as ledger, sublet.checkpoints():
        ledger.now()


@contextlib.contextmanager
def looking() -> Iterator[Ledger]:
    """At what lives left. Nothing stays open for the next one to inherit."""
    try:
        yield wiring.open_ledger(load_settings())
    finally:
        wiring.close_all()


class Told:
    """What a life tells while it lives. Times are monotonic, in ns."""

    NAMES = (
        "begun",  # the last step begun
        "done",  # the last one whose body ended
        "resumed",  # the step this life began after
        "first_at",  # when its first step began
        "body_at",  # when the body that runs began; 0 between bodies
        "body_ns",  # in bodies, over all lives
        "bodies",
        "between_ns",  # between bodies, over all lives
        "saves",  # committed, over all lives
    )

    def __init__(self) -> None:
        memory = mmap.mmap(-1, 8 * len(self.NAMES))
        self._values = np.frombuffer(memory, dtype=np.int64)

    def __getitem__(self, name: str) -> int:
        return int(self._values[self.NAMES.index(name)])

    def __setitem__(self, name: str, value: int) -> None:
        self._values[self.NAMES.index(name)] = value


@dataclass
class Life:
    """One job, and the process that runs it now."""

    job: str
    every: Any
    step_s: float
    told: Told = field(default_factory=Told)
    pid: int = 0

    def begin(self) -> None:
        self.told["first_at"] = self.told["body_at"] = 0
        self.pid = forked(lambda: _live(self.job, self.every, self.step_s, self.told))

    def told_to(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> int:
        """Its exit code, negative for a signal."""
        deadline = time.monotonic() + END_S
        while True:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise RuntimeError(f"{self.job} did not end within {END_S} s")
            time.sleep(0.0005)


def forked(work: Callable[[], None]) -> int:
    """Start it; its pid. It ends as a program would."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = CRASHED
    try:
        work()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else CRASHED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _live(job: str, every: Any, step_s: float, told: Told) -> None:
    values, counted = np.zeros(VALUES), {"steps": 0}
    run = sublet.train(
        job,
        {"values": values, "counted": counted},
        every=every,
        vram="256MiB",
        ttl="20s",
        wait="30s",
        progress=False,
    )
    told["resumed"] = run.resumed_at
    before = 0
    saved = run.version
    for step in run.steps(1 << 40):
        began = time.monotonic_ns()
        if before:
            told["between_ns"] += began - before
        else:
            told["first_at"] = began
        told["body_at"], told["begun"] = began, step.number
        values += 1.0
        counted["steps"] += 1
        time.sleep(max(0.0, step_s - (time.monotonic_ns() - began) / 1e9))
        before = time.monotonic_ns()
        told["body_ns"] += before - began
        told["bodies"] += 1
        told["saves"] += run.version - saved
        saved = run.version
        told["body_at"], told["done"] = 0, step.number


def check_once(jobs: list[str]) -> dict[str, int]:
    """The last committed step of each job. Raises unless each was committed once, in order, with the state it left (S1, S3)."""
    found: dict[str, int] = {}
    with looking() as ledger:
        spans: dict[str, list[tuple[int, int]]] = {job: [] for job in jobs}
        after = 0
        while rows := ledger.tail(after=after, limit=5000):
            after = rows[-1][0]
            for _, entry in rows:
                job = entry.strand.removeprefix("job:")
                if entry.kind == "step.committed" and job in spans:
                    body = json.loads(entry.body)
                    spans[job].append((body["first"], body["step"]))
        with sublet.checkpoints() as store:
            for job, committed in spans.items():
                head = ledger.head(job)
                at = head.step if head is not None else 0
                firsts = [first for first, _ in committed]
                if firsts != [1, *(last + 1 for _, last in committed)][: len(firsts)] or (
                    committed and committed[-1][1] != at
                ):
                    raise RuntimeError(f"{job}: its steps were not committed once each, in order")
                seen = store.load(job)["state"]["counted"]["steps"]
                if seen != at:
                    raise RuntimeError(f"{job}: the state at step {at} has seen {seen} steps")
                found[job] = at
        faults = ledger.verify().faults
        if faults:
            raise RuntimeError(f"the journal is damaged: {faults[0]}")
    return found
