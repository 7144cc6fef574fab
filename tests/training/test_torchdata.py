"""torchdata's StatefulDataLoader as a part of the state: also for a second loss within one epoch, and at the end of one."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.training.conftest import LOSSES, Losing
from tests.training.processes import Nursery

pytest.importorskip("torchdata.stateful_dataloader")

JOB = "tests.training.jobs:with_torchdata"


@pytest.mark.parametrize(
    ("workers", "own_generator"),
    [(0, True), (2, False)] if LOSSES <= 3 else [(0, True), (0, False), (2, False), (2, True)],
)
def test_lost_twice_in_an_epoch_and_at_its_end(
    workers: int, own_generator: bool, torch_nursery: Nursery, losing: Callable[[Nursery], Losing]
) -> None:
    """An epoch has 10 batches. Saved every 2 steps: resumed inside the epoch twice, then at its end."""
    job = losing(torch_nursery)
    want = job.final(JOB, "whole", 26, workers, own_generator)
    losses = [(signal.SIGKILL, 3), (signal.SIGKILL, 5), (signal.SIGTERM, 10)]
    assert job.through(losses, JOB, "lost", 26, workers, own_generator, PAUSE="0.02") == want
