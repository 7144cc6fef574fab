"""Two ranks that train together: one commit for both, the same last step on both, and nobody waits for the dead.

Most ranks here are started one by one, which is what torchrun does; real torchrun is in the last test.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable

import pytest

from sublet import wiring
from sublet.training.ranks import find_ranks
from tests.forked import ROOT
from tests.free_ports import free_port
from tests.homes import Home, process_is_gone
from tests.training.conftest import LOSSES, Losing
from tests.training.processes import Nursery, wait_for

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")

JOB = "tests.training.jobs:rank"
TOTAL = 24


class Ranks:
    def __init__(
        self,
        job: Losing,
        name: str,
        fault: str = "",
        every: int | str = 3,
        of_rank_0: dict[str, str] | None = None,
        **environment: str,
    ) -> None:
        port = str(free_port())
        self.jobs = [
            job.start(
                JOB, name, TOTAL, fault, every,
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                **environment, **((of_rank_0 or {}) if rank == 0 else {}),
            )
            for rank in range(2)
        ]  # fmt: skip

    def wait(self, seconds: float = 100.0) -> list[int]:
        return [job.wait(seconds) for job in self.jobs]

    def finals(self) -> list[str]:
        assert self.wait() == [0, 0], self.said()
        return [re.findall(r"^final (.*)$", job.said(), re.M)[-1] for job in self.jobs]

    def said(self) -> str:
        return "\n---\n".join(job.said() for job in self.jobs)


@pytest.fixture
def job(torch_nursery: Nursery, losing: Callable[[Nursery], Losing]) -> Losing:
    return losing(torch_nursery)


def head(home: Home, name: str) -> tuple[int, int]:
    found = wiring.open_ledger(home.settings).head(name)
    return (found.version, found.step) if found is not None else (0, 0)


_WHOLE: list[str] = []


def whole(job: Losing) -> list[str]:
    """What undisturbed ranks end with, which is the same in every home."""
    if not _WHOLE:
        _WHOLE.extend(Ranks(job, "whole").finals())
    return _WHOLE


def test_ranks_that_are_lost_end_as_those_that_were_not(job: Losing) -> None:
    """S1, S3: a rank killed anywhere, SIGTERM to one rank; each start resumes what both had at one step."""
    want = whole(job)
    assert want[0] != want[1], "the shards, and with them the draws, are each rank's own"
    draw = random.Random(5)
    at = 0
    for loss in range(LOSSES):
        ranks = Ranks(job, "lost", PAUSE="0.01")
        victim = ranks.jobs[loss % 2]
        at = min(TOTAL - 2, at + 1 + draw.randrange(6))
        victim.wait_for_step(at)
        time.sleep(draw.random() * 0.02)
        number = signal.SIGTERM if loss == LOSSES - 1 else signal.SIGKILL
        victim.kill(number)
        codes = ranks.wait()
        if number == signal.SIGTERM:
            left = {re.findall(r"^left at (\d+ \d+)$", one.said(), re.M)[-1] for one in ranks.jobs}
            assert codes == [85, 85], ranks.said()
            assert len(left) == 1, "both left at the same step, and both know what is committed"
            step, committed = map(int, left.pop().split())
            assert step == committed == head(job.home, "lost")[1]
            at = committed
        else:
            other = ranks.jobs[1 - loss % 2]
            assert codes[loss % 2] == -signal.SIGKILL
            # In sublet's own word (an error of ours) or in the model's all-reduce (an error of torch's).
            assert other.code in (1, 3), other.said()
            if other.code == 3:
                assert "error rank_lost" in other.said()
            at = head(job.home, "lost")[1]
            assert at % 3 == 0, "commits hold whole spans of both"
    # What rank 1 has of the model is what rank 0 sends before each pass. With no step left there is none, and its running means are rank 0's.
    same = 2 if at < TOTAL else 1
    assert Ranks(job, "lost").finals()[:same] == want[:same]
    assert len(wiring.open_ledger(job.home.settings).usage()) >= LOSSES


@pytest.mark.parametrize(("place", "kept"), [("after_quorum", 3), ("after_commit_before_reply", None)])
def test_rank_0_killed_in_the_middle_of_a_save(place: str, kept: int | None, job: Losing) -> None:
    """S1, C6: the head holds a span of both ranks, or it did not move."""
    nth = 2 if kept is not None else 5
    ranks = Ranks(job, "mid-save", of_rank_0={"SUBLET_FAILPOINTS": f"{place}=kill@{nth}"}, PAUSE="0.02")
    codes = ranks.wait()
    assert codes[0] == -signal.SIGKILL, ranks.said()
    assert codes[1] in (1, 3), ranks.said()
    version, step = head(job.home, "mid-save")
    assert step == 3 * version
    assert kept is None or step == kept
    assert Ranks(job, "mid-save").finals() == whole(job)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_ends_the_other_at_once(failing: int, job: Losing) -> None:
    ranks = Ranks(job, "failing", f"raise:{failing}:8")
    began = time.monotonic()
    codes = ranks.wait(60)
    assert time.monotonic() - began < 55, "well before the timeout of a silent rank"
    assert codes[failing] == 1
    assert codes[1 - failing] in (1, 3), ranks.said()
    assert head(job.home, "failing") == (2, 6)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_lives_on_after_its_failure_frees_the_other(failing: int, job: Losing) -> None:
    """Nothing of it ends but the run: the other one must not wait for its sockets."""
    ranks = Ranks(job, "lingering", f"late:{failing}:8")
    other = ranks.jobs[1 - failing]
    assert other.wait(25) == 3, ranks.said()
    assert "error rank_lost" in other.said()
    assert ranks.jobs[failing].poll() is None, "it lives on"
    ranks.jobs[failing].kill()


def test_a_save_that_fails_leaves_no_rank_waiting(job: Losing) -> None:
    """Only rank 0 knows of it; what it could not save is in the next save of both."""
    ranks = Ranks(job, "failed-save", of_rank_0={"SUBLET_FAILPOINTS": "after_quorum=drop@2"})
    assert ranks.finals() == whole(job)
    version, step = head(job.home, "failed-save")
    assert step == TOTAL
    assert version < TOTAL // 3, "the steps of the failed one are in another"


def test_rank_0_alone_decides_how_often(job: Losing) -> None:
    ranks = Ranks(job, "auto", every="auto", PAUSE="0.1")
    ranks.finals()
    assert head(job.home, "auto")[0] <= 4, "saves as of one clock, not as of two"


def test_a_rank_that_says_nothing_is_given_up(job: Losing) -> None:
    """With a timeout of its own: a stopped process closes nothing."""
    ranks = Ranks(job, "silent", PAUSE="0.05", RANK_TIMEOUT="3")
    ranks.jobs[0].wait_for_step(4)
    ranks.jobs[0].kill(signal.SIGSTOP)
    try:
        assert ranks.jobs[1].wait(60) in (1, 3), ranks.said()
    finally:
        ranks.jobs[0].kill(signal.SIGKILL)
    ranks.wait()


def test_ranks_without_torch_distributed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sublet

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(sublet.BadInput, match=r"rank 1 of 2, and torch\.distributed is not initialised"):
        find_ranks()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_ranks().world == 1


def test_under_torchrun(job: Losing) -> None:
    """The launcher told to end; then one rank killed, which the launcher answers by ending the other."""
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PAUSE": "0.05"}
    launcher = job.start("tests.training.jobs:torchrun", "lost", TOTAL, **environment)
    launcher.wait_for_step(4)
    launcher.kill(signal.SIGTERM)
    assert launcher.wait() != 0
    left = set(re.findall(r"^left at (\d+ \d+)$", launcher.said(), re.M))
    assert len(left) == 1, launcher.said()
    step, committed = map(int, left.pop().split())
    assert step == committed == head(job.home, "lost")[1]
    assert step >= 4
    # Forked by the launcher: two more imports of torch would tell nothing new.
    forking = ("--run-path", "--start-method", "fork")
    launcher = job.start("tests.training.jobs:torchrun", "lost", TOTAL, *forking, **environment)
    launcher.wait_for_step(step + 5)
    [victim] = map(int, re.findall(r"^rank 1 is (\d+)$", launcher.said(), re.M))
    os.kill(victim, signal.SIGKILL)
    assert launcher.wait() != 0
    wait_for(lambda: process_is_gone(victim), 10)
    assert head(job.home, "lost")[1] % 3 == 0 or head(job.home, "lost")[1] == step
    assert Ranks(job, "lost").finals() == whole(job)
