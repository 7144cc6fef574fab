"""Runs in forked children: everything is imported once, so that a start costs milliseconds and hundreds of kills are affordable.

What a child does is a function of the test's own, which takes with it what it refers to: nothing that the test has patched in its own process.
The parent holds no lease and opens no ledger while children run: it looks at what they left, and closes again.
"""

from __future__ import annotations

import atexit
import base64
import functools
import json
import os
import pickle
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

import sublet
import sublet.ledger.engines.postgres.engine
import sublet.ledger.engines.sqlite.engine
import sublet.store.replicas.opening
import sublet.training.train
from sublet import wiring
from sublet.core.journal.chain import Entry
from sublet.core.progress.effect import Effect, Head
from sublet.machine import failpoints
from sublet.ports.ledger import Ledger
from sublet.settings import load_settings
from tests.forked import MODULES, Forked, Origin, with_torch

CRASHED = 1
_DO = "import sys; from tests.training.rig import do; do(sys.argv[1])"
_TESTS = [f"tests.training.test_{name}" for name in ("edges", "kills", "run", "shim", "step", "store_outage")]
_children: dict[int, subprocess.Popen[str]] = {}


def forked(
    work: Callable[[], None], *, armed: dict[str, tuple[str, int]] | None = None, torch: bool = False
) -> int:
    """Start it; its pid. It ends as a program would: 0, the code of a SystemExit, or 1 with a traceback on standard error."""
    wiring.close_all()
    given = base64.b85encode(cloudpickle.dumps((work, armed or {}))).decode()
    process = Forked([sys.executable, "-c", _DO, given], origin=with_torch() if torch else _without_torch())
    _children[process.pid] = process
    return process.pid


def do(given: str) -> None:
    """In the process that was forked."""
    code = CRASHED
    try:
        work, armed = pickle.loads(base64.b85decode(given))
        for name, (action, nth) in armed.items():
            failpoints.arm(name, action, nth=nth)
        work()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else CRASHED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@functools.cache
def _without_torch() -> Origin:
    """Where a job has no use for it: it would be saved with every step, and forked with every life."""
    made = Origin((*MODULES, "numpy.random", *_TESTS))
    atexit.register(made.end)
    return made


def ended(pid: int, seconds: float = 60.0) -> int:
    """Its exit code, negative for a signal."""
    process = _children.pop(pid, None)
    if process is not None:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"process {pid} did not end within {seconds} s") from None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # forked by one that was forked


def has_ended(pid: int) -> bool:
    return _children[pid].poll() is not None


def tell(pid: int, number: int) -> None:
    """A signal, to one that may have ended."""
    _children[pid].send_signal(number)


def run_to_end(work: Callable[[], None], **options: Any) -> int:
    return ended(forked(work, **options))


@contextmanager
def looking() -> Iterator[Ledger]:
    """At what the children left. Nothing stays open for the next one to inherit."""
    try:
        yield wiring.open_ledger(load_settings())
    finally:
        wiring.close_all()


@dataclass(frozen=True)
class Left:
    head: Head | None
    state: Any
    spans: list[tuple[int, int]]
    effects: dict[str, Effect]
    faults: list[str]


def left_of(job: str, *keys: str) -> Left:
    with looking() as ledger:
        rows: list[tuple[int, Entry]] = []
        after = 0
        while batch := ledger.tail(after=after, limit=5000):
            rows += batch
            after = batch[-1][0]
        bodies = [
            json.loads(e.body) for _, e in rows if e.strand == f"job:{job}" and e.kind == "step.committed"
        ]
        head = ledger.head(job)
        with sublet.checkpoints() as store:
            state = store.load(job) if head is not None else None
        found = {key: effect for key in keys if (effect := ledger.effect(key)) is not None}
        faults = [f"{f.strand}#{f.seq}: {f.what}" for f in ledger.verify().faults]
        return Left(head, state, [(b["first"], b["step"]) for b in bodies], found, faults)


def state_of(job: str) -> Left:
    """Without the journal, whose reading grows with what all jobs have done: `check_walks` reads it once for all."""
    with looking() as ledger, sublet.checkpoints() as store:
        head = ledger.head(job)
        return Left(head, store.load(job) if head is not None else None, [], {}, [])


# --- a job that would show any step lost, repeated or torn ---------------------------------------------------


class Walk:
    """A random walk: every step depends on all before it and on every random state that is part of a run."""

    def __init__(self, size: int = 64) -> None:
        self.place = np.zeros(size)
        self.own = np.random.default_rng(7)
        self.counts = {"steps": 0}

    @property
    def state(self) -> dict[str, Any]:
        return {"place": self.place, "own": self.own, "counts": self.counts}

    def step(self) -> None:
        self.place *= 0.99
        self.place += self.own.standard_normal(self.place.size) * np.random.random() + random.random()
        self.counts["steps"] += 1


def walk(
    job: str,
    steps: int,
    *,
    every: Any = 3,
    pause: float = 0.0,
    on_step: Callable[[Any, Any], None] | None = None,
    size: int = 64,
    **options: Any,
) -> None:
    random.seed(1)
    np.random.seed(2)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(3)
    walking = Walk(size)
    options.setdefault("vram", "1GiB")
    options.setdefault("ttl", "5s")
    options.setdefault("progress", False)
    run = sublet.train(job, walking.state, every=every, **options)
    for step in run.steps(steps):
        walking.step()
        if on_step is not None:
            on_step(run, step)
        if pause:
            time.sleep(pause)


@functools.cache
def calm_walk(steps: int, size: int = 64) -> Left:
    """What a run that nobody disturbs leaves, which is the same in every home: made in the first that asks."""
    assert run_to_end(lambda: walk("calm", steps, size=size)) == 0
    return left_of("calm")


def same_walk(one: Any, other: Any) -> bool:
    """Bit for bit, random states included."""
    return _bits(one) == _bits(other)


def _bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bits(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_bits(member) for member in value]
    if hasattr(value, "numpy"):  # torch's, whose random state is part of a run when it is imported
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    return value


def check_walk(job: str, calm: Left, steps: int) -> Left:
    """Each step once and in order, and the state a run that nobody disturbed has."""
    left = left_of(job)
    assert left.head is not None
    assert left.head.step == steps
    assert [first for first, _ in left.spans] == [1, *(last + 1 for _, last in left.spans[:-1])]
    assert left.spans[-1][1] == steps
    assert same_walk(left.state, calm.state)
    assert left.faults == []
    return left


def check_walks(jobs: list[str], steps: int) -> int:
    """Each step of each of these jobs once and in order, and a whole journal. How many commits there were."""
    spans: dict[str, list[tuple[int, int]]] = {}
    with looking() as ledger:
        assert [f"{f.strand}#{f.seq}: {f.what}" for f in ledger.verify().faults] == []
        after = 0
        while batch := ledger.tail(after=after, limit=5000):
            for _, entry in batch:
                if entry.kind == "step.committed":
                    body = json.loads(entry.body)
                    spans.setdefault(entry.strand.removeprefix("job:"), []).append(
                        (body["first"], body["step"])
                    )
            after = batch[-1][0]
    for job in jobs:
        found = spans.get(job, [])
        assert [first for first, _ in found] == [1, *(last + 1 for _, last in found[:-1])], job
        assert found[-1][1] == steps, job
    return sum(len(spans[job]) for job in jobs)
