"""Jobs that are killed and started again, each in a home of its own."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import need
from tests.forked import with_torch, with_trainers
from tests.homes import Home
from tests.training.processes import Job, Nursery

#: Losses in each of the tests that lose a job at random steps; `make proof` asks for more.
LOSSES = int(os.environ.get("SUBLET_TRAINING_LOSSES", "2"))


@pytest.fixture(scope="session")
def torch_nursery() -> Iterator[Nursery]:
    need(_there("torch"), "torch")
    nursery = Nursery(with_torch())
    yield nursery
    nursery.end_jobs()


@pytest.fixture(scope="session")
def hf_nursery() -> Iterator[Nursery]:
    need(_there("transformers") and _there("accelerate"), "transformers with accelerate")
    nursery = Nursery(with_trainers())
    yield nursery
    nursery.end_jobs()


@pytest.fixture(scope="session")
def lightning_nursery() -> Iterator[Nursery]:
    need(_there("lightning"), "lightning")
    nursery = Nursery(with_trainers())
    yield nursery
    nursery.end_jobs()


def _there(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


class Losing:
    """One job, started as often as it takes, lost on the way."""

    def __init__(self, nursery: Nursery, home: Home, folder: Path) -> None:
        self.nursery = nursery
        self.home = home
        self.folder = folder

    def start(self, job: str, *args: object, **environment: str) -> Job:
        return self.nursery.start(
            job, *args, folder=self.folder, environment=self.home.environment | environment
        )

    def final(self, job: str, *args: object, **environment: str) -> str:
        """What an undisturbed run ends with."""
        started = self.start(job, *args, **environment)
        assert started.wait() == 0, started.said()
        return last_line(started)

    def through(
        self,
        losses: list[tuple[int, int]],
        job: str,
        *args: object,
        seed: int = 0,
        **environment: str,
    ) -> str:
        """Lost by (signal, at step) each, then left alone: what it ends with."""
        draw = random.Random(seed)
        for number, at in losses:
            started = self.start(job, *args, **environment)
            started.wait_for_step(at)
            pause(draw.random() * 0.01)
            started.kill(number)
            code = started.wait()
            assert code == (85 if number == signal.SIGTERM else -number), started.said()
        return self.final(job, *args, **environment)


def pause(seconds: float) -> None:
    import time

    time.sleep(seconds)


def last_line(job: Job) -> str:
    found = [line for line in job.said().splitlines() if line.startswith("final ")]
    assert found, job.said()
    return found[-1]


def random_losses(total: int, count: int, seed: int) -> list[tuple[int, int]]:
    """At rising steps, by kill -9 and SIGTERM."""
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(1, total - 1), count))
    return [(draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]), step) for step in steps]


@pytest.fixture
def losing(sqlite_home: Home, tmp_path: Path) -> Callable[[Nursery], Losing]:
    return lambda nursery: Losing(nursery, sqlite_home, tmp_path)
