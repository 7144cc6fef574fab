"""Killed at every place around the commit, and at random moments: each step once, the final state bit-equal (S1-S5)."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.core.leasing.lease import Holder, Request
from sublet.leases.request import ensure_tenant
from sublet.leases.warden.warden_process import ensure_warden
from sublet.ports.ledger import LeaseKey
from sublet.training import single_runner
from tests.homes import Home, wait_until
from tests.seeds import SEED
from tests.training.rig import (
    CRASHED,
    Left,
    calm_walk,
    check_walk,
    check_walks,
    ended,
    forked,
    has_ended,
    looking,
    run_to_end,
    same_walk,
    state_of,
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


KILLS = int(os.environ.get("SUBLET_TRAINING_KILLS", "24"))
AT_ONCE = 4
#: Of a job in the storm: so many that it is killed again and again before it is over.
STORM_STEPS = 100
#: Of three kills one comes before a life's first step, while it asks for its lease or loads; the others this many steps after it, at most.
MOST_STEPS = 8
SHOW_EVERY_S = 15


class Lives:
    """One byte for each life, written by itself: 0, 1 when it has begun its run, and one more with each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.count = 0

    def new(self) -> int:
        self.count += 1
        os.pwrite(self.file, b"\0", self.count)
        return self.count

    def reached(self, number: int) -> int:
        return os.pread(self.file, 1, number)[0]

    def close(self) -> None:
        os.close(self.file)


def live(path: Path, number: int, job: str) -> None:
    """In the child."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.pwrite(file, b"\1", number)
    made = 1

    def on_step(run: Any, step: Any) -> None:
        nonlocal made
        made = min(255, made + 1)
        os.pwrite(file, bytes([made]), number)

    walk(job, STORM_STEPS, every=2, on_step=on_step, pause=0.001, wait="20s", ttl="20s")


@dataclass
class Life:
    job: str
    number: int
    steps: int  # after which it is killed
    later: float  # and so many seconds after that was seen; before the first step, as a part of what lives take to it
    begun: float = 0.0
    due: float = 0.0


class Storm:
    """Jobs that are killed and begun again, with what their kills hit."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.chance = chance
        self.lives = Lives(folder / "lives")
        self.alive: dict[int, Life] = {}
        self.jobs = 0
        self.before_a_step = self.among_steps = 0
        self.to_the_first_step = 0.05  # seconds that lives take, about

    @property
    def died(self) -> int:
        return self.before_a_step + self.among_steps

    def begin(self, job: str = "") -> None:
        if not job:
            self.jobs += 1
            job = f"storm-{self.jobs}"
        early = self.chance.random() < 1 / 3
        life = Life(
            job,
            self.lives.new(),
            steps=0 if early else self.chance.randint(1, MOST_STEPS),
            later=self.chance.random() if early else self.chance.uniform(0.0, 0.005),
        )
        path, number = self.lives.path, life.number
        self.alive[forked(lambda: live(path, number, job))] = life

    def is_due(self, life: Life, now: float) -> bool:
        reached = self.lives.reached(life.number)
        if not reached:
            return False  # not begun: there is nothing to interrupt
        if not life.begun:
            life.begun = now
        if not life.due and reached > life.steps:
            life.due = now + life.later * (1 if life.steps else self.to_the_first_step)
            if life.steps == 1:
                self.to_the_first_step += 0.1 * (now - life.begun - self.to_the_first_step)
        return 0 < life.due <= now

    def kill(self, pid: int) -> Life | None:
        """The life, if it was killed in the middle of its run; None if it had just ended by itself."""
        tell(pid, signal.SIGKILL)
        return self.bury(pid)

    def bury(self, pid: int) -> Life | None:
        code, life = ended(pid), self.alive.pop(pid)
        if code == 0:
            return None
        assert code == -signal.SIGKILL, f"{life.job} ended with {code}"
        reached = self.lives.reached(life.number)
        assert reached, "killed before it had begun"
        self.before_a_step += reached == 1
        self.among_steps += reached > 1
        return life

    def end(self) -> None:
        for pid in self.alive:
            tell(pid, signal.SIGKILL)
            ended(pid)
        self.lives.close()


def test_random_kills(home: Home, engine: str, tmp_path: Path) -> None:
    """Kill -9 at random moments, several jobs at once, until so many have died; however short the lives, the walk is the same.

    A kill counts when the process had begun its run and was still at it.
    """
    wanted = KILLS * 2 // 3 if engine == "sqlite" else KILLS - KILLS * 2 // 3
    calm = calm_walk(STORM_STEPS)
    storm = Storm(random.Random(SEED), tmp_path)
    finished: list[str] = []
    shown = time.monotonic()
    try:
        while storm.died < wanted or storm.alive:
            while storm.died < wanted and len(storm.alive) < AT_ONCE:
                storm.begin()
            time.sleep(0.002)
            now = time.monotonic()
            for pid, life in list(storm.alive.items()):
                if has_ended(pid):
                    killed = storm.bury(pid)
                elif storm.died < wanted and storm.is_due(life, now):
                    killed = storm.kill(pid)
                else:
                    continue
                if killed is not None:
                    storm.begin(life.job)
                    continue
                left = state_of(life.job)
                assert left.head is not None
                assert left.head.step == STORM_STEPS
                assert same_walk(left.state, calm.state), life.job
                finished.append(life.job)
            if now - shown > SHOW_EVERY_S:
                shown = now
                print(f"{engine}: {storm.died} of {wanted} kills, {len(finished)} jobs over", flush=True)
    finally:
        storm.end()
    assert len(finished) == storm.jobs
    commits = check_walks(finished, STORM_STEPS)
    if storm.died >= 500:  # of few, by chance, all may be of one kind
        assert min(storm.before_a_step, storm.among_steps) > storm.died / 10
    print(
        f"{storm.died} killed, {len(finished)} jobs finished: {storm.before_a_step} killed before the first step of a life, "
        f"{storm.among_steps} after it; {commits} commits in between"
    )


def committed_step(job: str) -> int:
    with looking() as ledger:
        head = ledger.head(job)
        return head.step if head is not None else 0


def test_a_zombie_is_refused_and_its_job_taken_over_only_when_its_lease_is_dead(
    home: Home, calm: Left
) -> None:
    """Frozen past its expiry, held by name so that nobody kills it; then continued (S2)."""

    def waiting(seconds: int) -> None:
        single_runner.PREDECESSOR_US = seconds * 1_000_000
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
        single_runner.PREDECESSOR_US = 0
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
        ledger.reserve(key, effect="train job", job="job", fingerprint=single_runner.RUNNER)

    def impatient() -> None:
        single_runner.PREDECESSOR_US = 0
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
