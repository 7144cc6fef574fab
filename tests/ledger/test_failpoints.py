"""Dying, failing and being cut off at each named place around the one commit (S1, S5), on both engines.

For every place and every way: afterwards the step is committed once or not at all, head, effect and journal agree, repeating
the commit finds out which, and the journal verifies.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from sublet.core.errors import Disconnected
from sublet.core.progress.effect import AlreadyCommitted, Committed
from sublet.ledger.ledger import SqlLedger
from sublet.machine import failpoints
from sublet.machine.failpoints import ConnectionDropped, FailpointHit
from tests import forked
from tests.ledger.rig import Rig, a_step

#: The places, in the order a commit passes them; True once the transaction is committed.
PLACES = {
    "before_begin": False,
    "after_lock": False,
    "after_fence_check": False,
    "after_cas": False,
    "after_effect": False,
    "before_commit": False,
    "after_commit_before_reply": True,
}
#: PostgreSQL's hot verbs are one call: only what lies around the call is passed.
HOT = ["before_begin", "after_commit_before_reply"]


@pytest.fixture
def job(rig: Rig) -> Rig:
    rig.tenant()
    rig.device()
    rig.ask(10, lease_id="holder")
    return rig


def key(rig: Rig) -> Any:
    return rig.key(rig.look("holder"))


def agree(rig: Rig, steps: int) -> None:
    """S1: head, effects and journal tell the same number of steps, and nothing is half there."""
    head = rig.ledger.head("train")
    assert (head.version if head else 0) == (head.step if head else 0) == steps
    done = rig.sql("SELECT version FROM effect WHERE completed = 1 ORDER BY version")
    assert done == [(n,) for n in range(1, steps + 1)]
    rows = rig.sql("SELECT count(*) FROM journal WHERE kind = 'step.committed' AND strand = 'job:train'")
    assert rows == [(steps,)]
    started = rig.sql("SELECT count(*) FROM journal WHERE kind = 'job.started'")
    assert started == [(min(1, steps),)]
    committed_at = rig.look("holder").committed_at
    assert committed_at == (head.committed_at if head else 0)
    assert rig.faults() == []


def finds_out(rig: Rig, before: int, step: int, happened: bool) -> None:
    """S5: what happened is what the tables say; saying it again makes it true exactly once."""
    agree(rig, before + happened)
    ledger = rig.open()
    assert ledger.commit(key(rig), a_step(step)) == Committed(step)
    assert ledger.commit(key(rig), a_step(step)) == Committed(step)
    agree(rig, before + 1)
    other = rig.ask(10)
    assert ledger.commit(rig.key(other), a_step(step)) == AlreadyCommitted(step, f"outcome-{step}")
    assert ledger.commit(rig.key(other), a_step(step + 1)) == Committed(step + 1)
    assert rig.faults() == []


CHILD = """
import sys
from sublet.machine import failpoints
from sublet.core.progress.effect import Commit
from sublet.processes.clock import HostClock
from sublet.ports.ledger import LeaseKey
from sublet.testing.clock import VirtualClock

url, generic, epoch, secret, step = sys.argv[1], sys.argv[2] == "generic", int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
if url.startswith("sqlite:"):
    from sublet.ledger.engines.sqlite.engine import open_ledger
    ledger = open_ledger(url, VirtualClock())
else:
    from sublet.ledger.engines.postgres.engine import open_ledger
    ledger = open_ledger(url, HostClock())
if generic:
    from sublet.ledger.ledger import SqlLedger
    ledger = SqlLedger(ledger.engine)
failpoints.arm(sys.argv[6], "kill")
print(ledger.commit(LeaseKey("holder", epoch, secret), Commit(
    job="train", key=f"train:{step}", step=step, fingerprint=f"print-{step}", expected_version=step - 1,
    digest=f"digest-{step}", cursor=f"cursor-{step}", outcome=f"outcome-{step}")))
"""


def killed(rig: Rig, place: str, step: int, *, generic: bool) -> None:
    k = key(rig)
    done = forked.run(
        [
            sys.executable,
            "-c",
            CHILD,
            rig.url,
            "generic" if generic else "hot",
            str(k.epoch),
            k.secret,
            str(step),
            place,
        ],
        timeout=60,
        env={**os.environ, "SUBLET_FAILPOINTS": ""},
    )
    assert done.returncode == -signal.SIGKILL, f"{place} was not reached: {done.stdout}{done.stderr[-1500:]}"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("before", [0, 2])
def test_killed(job: Rig, place: str, before: int) -> None:
    """kill -9 of the holder, in a process of its own, through the generic verb."""
    for done in range(1, before + 1):
        job.ledger.commit(key(job), a_step(done))
    killed(job, place, before + 1, generic=True)
    finds_out(job, before, before + 1, PLACES[place])


@pytest.mark.parametrize("place", HOT)
def test_killed_in_a_hot_commit(postgres: Rig, place: str) -> None:
    postgres.tenant()
    postgres.device()
    postgres.ask(10, lease_id="holder")
    postgres.ledger.commit(key(postgres), a_step(1))
    killed(postgres, place, 2, generic=False)
    finds_out(postgres, 1, 2, PLACES[place])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("before", [0, 2])
def test_raised(job: Rig, place: str, before: int) -> None:
    """A bug in the middle of the verb: it gets out, and takes nothing with it."""
    for done in range(1, before + 1):
        job.ledger.commit(key(job), a_step(done))
    generic = SqlLedger(job.ledger.engine)
    failpoints.arm(place, "raise", nth=1)
    with pytest.raises(FailpointHit):
        generic.commit(key(job), a_step(before + 1))
    failpoints.disarm()
    finds_out(job, before, before + 1, PLACES[place])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("before", [0, 2])
def test_dropped(postgres: Rig, place: str, before: int) -> None:
    """The connection is lost: the engine runs it again on a new one, and the caller sees one commit."""
    postgres.tenant()
    postgres.device()
    postgres.ask(10, lease_id="holder")
    for done in range(1, before + 1):
        postgres.ledger.commit(key(postgres), a_step(done))
    generic = SqlLedger(postgres.ledger.engine)
    hits: list[int] = []

    def cut() -> None:
        hits.append(1)
        raise ConnectionDropped("cut")

    failpoints.arm(place, cut, nth=1)
    assert generic.commit(key(postgres), a_step(before + 1)) == Committed(before + 1)
    assert hits == [1]
    failpoints.disarm()
    finds_out(postgres, before, before + 1, True)


@pytest.mark.parametrize("place", PLACES)
def test_dropped_for_good(postgres: Rig, place: str) -> None:
    """The connection is lost every time: `Disconnected`, which promises nothing, and the tables still agree."""
    postgres.tenant()
    postgres.device()
    postgres.ask(10, lease_id="holder")
    postgres.ledger.engine.patience_us = 60_000
    holder = key(postgres)
    failpoints.arm(place, "drop")
    with pytest.raises(Disconnected):
        SqlLedger(postgres.ledger.engine).commit(holder, a_step(1))
    failpoints.disarm()
    postgres.ledger.engine.patience_us = 10_000_000
    finds_out(postgres, 0, 1, PLACES[place])


@pytest.mark.parametrize("place", HOT)
def test_dropped_in_a_hot_commit(postgres: Rig, place: str) -> None:
    postgres.tenant()
    postgres.device()
    postgres.ask(10, lease_id="holder")
    postgres.ledger.commit(key(postgres), a_step(1))
    failpoints.arm(place, "drop", nth=1)
    assert postgres.ledger.commit(key(postgres), a_step(2)) == Committed(2)
    failpoints.disarm()
    finds_out(postgres, 1, 2, True)


def test_which_places_a_commit_passes(job: Rig) -> None:
    """The first commit of a job passes them all, in order; a hot one only those around its one call."""
    passed: list[str] = []
    holder = key(job)
    for place in PLACES:
        failpoints.arm(place, lambda place=place: passed.append(place))
    job.ledger.commit(holder, a_step(1))
    # PostgreSQL tries the hot call first, which passes the two places around it.
    first_try = HOT if job.engine == "postgres" else []
    assert passed == [*first_try, *PLACES]
    passed.clear()
    job.ledger.commit(holder, a_step(2))
    assert passed == (HOT if job.engine == "postgres" else list(PLACES))


@pytest.mark.parametrize("action", ["raise", "kill"])
@pytest.mark.parametrize("place", ["before_begin", "before_commit", "after_commit_before_reply"])
def test_acquire_at_the_same_places(job: Rig, place: str, action: str) -> None:
    """L1: a grant happened once or not at all, and asking again with the same id finds out."""
    generic = SqlLedger(job.ledger.engine)
    if action == "raise":
        failpoints.arm(place, "raise", nth=1)
        with pytest.raises(FailpointHit):
            job.ask(10, lease_id="lost", ledger=generic)
        failpoints.disarm()
    else:
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                failpoints.arm(place, "kill")
                job.ask(10, lease_id="lost", ledger=generic)
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    granted = job.sql("SELECT count(*) FROM journal WHERE kind = 'lease.granted' AND subject = 'lost'")
    assert granted == [(int(PLACES[place]),)]
    if action == "raise":
        assert job.ask(10, lease_id="lost").lease.epoch == 2
    assert job.ledger.devices()[0].leases == (2 if PLACES[place] or action == "raise" else 1)
    assert job.faults() == []


@pytest.mark.parametrize("place", ["reaper_after_read", "reaper_before_write", "before_commit"])
def test_a_reaper_that_fails_reaps_nothing_by_half(job: Rig, place: str) -> None:
    held = [job.ask(10) for _ in range(3)]
    job.advance(10 * 60 * 1_000_000)
    failpoints.arm(place, "raise", nth=2 if place == "reaper_before_write" else 1)
    with job.only_journals(), pytest.raises(FailpointHit):
        job.ledger.tick()
    failpoints.disarm()
    job.ledger.tick()
    assert all(job.look(h).reason is not None for h in held)
    assert len(job.ledger.usage()) == 4
    assert job.faults() == []


def test_arming_something_unknown() -> None:
    with pytest.raises(ValueError, match="unknown failpoint"):
        failpoints.arm("nowhere", "kill")
