"""Lightning's Trainer, lost and started again, ends as one that was not."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from sublet import wiring
from tests.training.conftest import Losing
from tests.training.processes import Nursery

JOB = "tests.training.lightning_jobs:fit"
K, T = signal.SIGKILL, signal.SIGTERM


@pytest.mark.parametrize(
    ("accumulate", "workers", "losses"),
    [(1, 0, [(K, 3), (T, 5), (T, 8), (K, 13), (T, 16)]), (2, 1, [(T, 3), (K, 7), (T, 8)])],
    ids=["loader", "accumulated"],
)
def test_lost_and_resumed(
    accumulate: int,
    workers: int,
    losses: list[tuple[int, int]],
    lightning_nursery: Nursery,
    losing: Callable[[Nursery], Losing],
) -> None:
    """An epoch has 8 batches, validated every 4: losses inside epochs (twice in the first), at a validation, at an epoch's end."""
    job = losing(lightning_nursery)
    want = job.final(JOB, "whole", accumulate, workers)
    assert job.through(losses, JOB, "lost", accumulate, workers, PAUSE="0.02") == want
    total = 24 // accumulate
    head = wiring.open_ledger(job.home.settings).head("lost")
    assert head is not None
    assert head.step == total
    # Started once more there is nothing to do, and it says the same.
    assert job.final(JOB, "lost", accumulate, workers) == want


def test_warned_as_an_epoch_s_first_step_begins(
    lightning_nursery: Nursery, losing: Callable[[Nursery], Losing]
) -> None:
    """The step is finished and committed; the Trainer is not told that its epoch is over."""
    job = losing(lightning_nursery)
    want = job.final(JOB, "whole", 1)
    warned = job.start(JOB, "lost", 1, WARNED_AT="9")
    assert warned.wait() == 85, warned.said()
    head = wiring.open_ledger(job.home.settings).head("lost")
    assert head is not None
    assert head.step == 9
    assert job.final(JOB, "lost", 1) == want


def test_data_without_a_place_is_refused(
    lightning_nursery: Nursery, losing: Callable[[Nursery], Losing]
) -> None:
    job = losing(lightning_nursery).start("tests.training.lightning_jobs:refused", "refused")
    assert job.wait() == 0, job.said()
    assert re.findall(r"^a (\w+) cannot be resumed exactly", job.said(), re.M) == [
        "DataLoader",
        "StatefulDataLoader",
    ]
