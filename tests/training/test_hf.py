"""Hugging Face's Trainer, lost and started again: weights, losses, evaluations and learning rates as of the run that was not."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from sublet import wiring
from tests.free_ports import free_port
from tests.training.conftest import LOSSES, Losing, last_line, random_losses
from tests.training.processes import Job, Nursery

JOB = "tests.training.hf_jobs:train"


@pytest.mark.parametrize("plain", [False, True], ids=["language model", "plain module"])
def test_lost_and_resumed(plain: bool, hf_nursery: Nursery, losing: Callable[[Nursery], Losing]) -> None:
    """An epoch has 7 optimizer steps: losses inside epochs, and one at the end of the first, before the second begins."""
    job = losing(hf_nursery)
    want = job.final(JOB, "whole", plain)
    losses = (
        random_losses(21, LOSSES, seed=3)
        if plain
        else [(signal.SIGKILL, 3), (signal.SIGTERM, 7), (signal.SIGKILL, 10)]
    )
    assert job.through(losses, JOB, "lost", plain, PAUSE="0.02") == want
    head = wiring.open_ledger(job.home.settings).head("lost")
    assert head is not None
    assert head.step == 21
    if plain:
        # Started once more there is nothing to do, and it says the same; with one more epoch it goes on.
        assert job.final(JOB, "lost", plain) == want
        assert job.final(JOB, "lost", plain, 4).split()[2] == "28"


def test_two_ranks(hf_nursery: Nursery, losing: Callable[[Nursery], Losing]) -> None:
    """The Trainer under torchrun's environment: SIGTERM to one rank, and both resume as if nothing had been."""
    job = losing(hf_nursery)

    def start(name: str, **environment: str) -> list[Job]:
        port = str(free_port())
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | environment
        return [job.start(JOB, name, True, RANK=str(n), LOCAL_RANK=str(n), **common) for n in range(2)]

    def finals(jobs: list[Job]) -> list[str]:
        assert [one.wait() for one in jobs] == [0, 0], jobs[0].said() + jobs[1].said()
        return [last_line(one) for one in jobs]

    want = finals(start("whole"))
    ranks = start("lost", PAUSE="0.05")
    ranks[1].wait_for_step(5)
    ranks[1].kill(signal.SIGTERM)
    assert [one.wait() for one in ranks] == [85, 85], ranks[0].said() + ranks[1].said()
    assert finals(start("lost")) == want
