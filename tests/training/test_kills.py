"""Killed at every place around the commit, and at random moments: each step once, the final state bit-equal (S1-S5)."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.borrowing import ensure_tenant
from sublet.core.lease import Holder, Request
from sublet.ports.ledger import LeaseKey
from sublet.runtime import train
from sublet.wiring import ensure_warden
from tests.runtime.conftest import Home, wait_until
from tests.training.rig import (
    CRASHED,
    Left,
    calm_walk,
    check_walk,
    ended,
    forked,
    looking,
    run_to_end,
    tell,
    walk,
)

STEPS = 12
#: Every named place a step, its save and its commit pass, and which hit of it is in the middle of the run.
PLACES = [
    "before_acquire_commit",
    "after_acquire_commit",
    "after_chunk_write",
    "after_chunk_fsync",
    "after_publish",
    "before_manifest",
    "after_quorum",
    "before_begin",
    "after_lock",
    "after_fence_check",
    "after_cas",
    "after_effect",
    "before_commit",
    "after_commit_before_reply",
]


@pytest.fixture
def calm(home: Home) -> Left:
    return calm_walk(STEPS)


def test_killed_at_every_place_around_the_commit(home: Home, calm: Left, engine: str) -> None:
    """One job per place: killed there in the middle of the run, and once more after it was resumed."""
    times = (1, 2) if engine == "sqlite" else (1,)  # the ledgers' own tests kill at each place of both
    died: list[str] = []
    for number, place in enumerate(PLACES):
        job = f"job-{number}"
        for nth in times:
            code = run_to_end(lambda job=job: walk(job, STEPS), armed={place: ("kill", nth)})
            if code == -signal.SIGKILL:
                died.append(place)
            else:
                assert code == 0, f"{place} ended with {code}"
        assert run_to_end(lambda job=job: walk(job, STEPS)) == 0
        check_walk(job, calm, STEPS)
    missed = set(PLACES) - set(died)
    assert not missed, f"never passed: {missed}"


@pytest.mark.parametrize("action", ["raise", "drop"])
def test_a_connection_lost_at_the_commit_neither_loses_nor_repeats(
    home: Home, calm: Left, action: str
) -> None:
    """S5: whether it happened is read, not guessed. A bug in the middle of a verb ends the run; the next start continues."""
    for place in ("before_manifest", "after_effect", "before_commit", "after_commit_before_reply"):
        code = run_to_end(lambda job=place: walk(job, STEPS), armed={place: (action, 3)})
        assert code in (0, CRASHED), place
        assert run_to_end(lambda job=place: walk(job, STEPS)) == 0, place
        check_walk(place, calm, STEPS)


KILLS = int(os.environ.get("SUBLET_TRAINING_KILLS", "60"))
AT_ONCE = 4


def test_random_kills(home: Home, calm: Left, engine: str) -> None:
    """Kill -9 at random moments, several jobs at once, until so many have died; however short the lives, the walk is the same."""
    wanted = KILLS * 2 // 3 if engine == "sqlite" else KILLS - KILLS * 2 // 3
    seed = int(os.environ.get("SUBLET_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
    print(f"SUBLET_SEED={seed}")
    chance = random.Random(seed)
    died = finished = begun = 0
    alive: dict[int, str] = {}
    at_once = {"wait": "20s", "ttl": "20s"}

    def begin(job: str) -> None:
        alive[forked(lambda: walk(job, STEPS, every=2, pause=0.002, **at_once))] = job

    try:
        while died < wanted or alive:
            while died < wanted and len(alive) < AT_ONCE:
                begun += 1
                begin(f"storm-{begun}")
            time.sleep(chance.uniform(0.0, 0.08))
            victim = chance.choice(list(alive))
            if died < wanted:
                tell(victim, signal.SIGKILL)
            code, job = ended(victim), alive.pop(victim)
            if code == 0:
                check_walk(job, calm, STEPS)
                finished += 1
                continue
            assert code == -signal.SIGKILL, f"{job} ended with {code}"
            died += 1
            begin(job)
    finally:
        for pid in alive:
            tell(pid, signal.SIGKILL)
            ended(pid)
    assert finished == begun


def committed_step(job: str) -> int:
    with looking() as ledger:
        head = ledger.head(job)
        return head.step if head is not None else 0


def test_a_zombie_is_refused_and_its_job_taken_over_only_when_its_lease_is_dead(
    home: Home, calm: Left
) -> None:
    """Frozen past its expiry, held by name so that nobody kills it; then continued (S2)."""

    def waiting(seconds: int) -> None:
        train.PREDECESSOR_US = seconds * 1_000_000
        walk("job", STEPS, every=1)

    pid = forked(lambda: walk("job", STEPS, every=1, pause=0.05, ttl="6s", holder="name"))
    try:
        wait_until(lambda: committed_step("job") >= 3)
        tell(pid, signal.SIGSTOP)
        at = committed_step("job")
        assert run_to_end(lambda: waiting(0)) == CRASHED  # EffectBusy: the frozen one's lease is alive
        assert committed_step("job") == at
        assert run_to_end(lambda: waiting(30)) == 0  # when it is dead
    finally:
        tell(pid, signal.SIGCONT)
    assert ended(pid) in (CRASHED, 85)  # it is refused, or hears of its loss first; it commits nothing
    check_walk("job", calm, STEPS)


def test_of_two_runners_at_once_one_owns_the_job(home: Home, calm: Left, tmp_path: Path) -> None:
    """Both are alive and well, neither is frozen: the second learns so, and the first is not disturbed."""

    def until_the_second_has_tried(run: Any, step: Any) -> None:
        if step.number == 5:
            wait_until((tmp_path / "tried").exists, 60)

    first = forked(lambda: walk("job", STEPS, every=1, on_step=until_the_second_has_tried))
    wait_until(lambda: committed_step("job") >= 1)

    def second() -> None:
        train.PREDECESSOR_US = 0
        try:
            walk("job", STEPS, every=1)
        except sublet.EffectBusy as busy:
            os._exit(42 if "being trained by another process" in busy.message else 1)

    code = run_to_end(second)
    (tmp_path / "tried").touch()
    assert code == 42
    assert ended(first) == 0
    check_walk("job", calm, STEPS)


@pytest.mark.parametrize("renewed", [False, True])
def test_a_predecessor_whose_host_is_gone_is_waited_for_until_its_ttl(
    home: Home, calm: Left, renewed: bool
) -> None:
    """There is no warden that could see its end. One that renews is alive, wherever it is."""
    request = Request(tenant=home.settings["tenant"], vram_bytes=1, ttl_us=4_000_000)
    ensure_warden(home.settings)
    with looking() as ledger:
        ensure_tenant(home.settings, ledger, request.tenant)
        held = ledger.acquire("L-far", "secret", request, Holder(host="far-away"))
        key = LeaseKey("L-far", held.lease.epoch, "secret")
        ledger.reserve(key, effect="train job", job="job", fingerprint=train._RUNNER)

    def impatient() -> None:
        train.PREDECESSOR_US = 0
        walk("job", STEPS)

    pid = forked(impatient)
    if renewed:
        for _ in range(8):
            time.sleep(0.5)
            with looking() as ledger:
                ledger.renew(key)
        assert ended(pid) == CRASHED
    else:
        assert ended(pid) == 0
        check_walk("job", calm, STEPS)
