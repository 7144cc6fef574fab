"""Versions behind a head, on both engines: retention, tags, and heads an operator moves."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from sublet.core.checkpoints.versions import Adoption, AdoptionSource, KeptVersion, check_tag
from sublet.core.errors import BadInput, Disconnected, EffectBusy, HeadMoved, NotFound, SubletError
from sublet.machine import failpoints
from sublet.machine.failpoints import FailpointHit
from tests.ledger.rig import MINUTE, Rig, a_step

JOB = "train"


@pytest.fixture
def ready(rig: Rig) -> Rig:
    """Six versions of one job."""
    rig.tenant()
    rig.tenant("bob")
    rig.device()
    answer = rig.ask(lease_id="holder", ttl_us=60 * MINUTE)
    for step in range(1, 7):
        rig.commit(answer, step)
    rig.holder = answer  # type: ignore[attr-defined]
    return rig


def kept(*versions: int, tag: str = "") -> list[KeptVersion]:
    return [KeptVersion(version=v, digest=f"digest-{v}", step=v, tag=tag) for v in versions]


def retain(rig: Rig, floor: int, *survivors: int, sweeps: int = 0) -> Any:
    return rig.ledger.retain(
        JOB, expected_sweeps=sweeps, floor=floor, kept=kept(*survivors), actor="operator"
    )


def adoption(**over: Any) -> Adoption:
    values: dict[str, Any] = {
        "job": JOB, "tenant": "ada", "expected_version": 6, "version": 7, "digest": "digest-7", "step": 3, "epoch": 0,
        "reason": "rollback", "source": AdoptionSource(job=JOB, sweeps=0),
    }  # fmt: skip
    return Adoption(**{**values, **over})


def rows(rig: Rig) -> list[tuple[int, str]]:
    return [(k.version, k.tag) for k in rig.ledger.versions(JOB).kept]


# --- retention and tags --------------------------------------------------------------------------------------


def test_a_job_begins_with_everything(ready: Rig) -> None:
    found = ready.ledger.versions(JOB)
    assert (found.head.version, found.head.floor, found.head.sweeps, found.kept) == (6, 0, 0, ())
    assert ready.ledger.all_versions() == [found]
    with pytest.raises(NotFound):
        ready.ledger.versions("other")


def test_retention(ready: Rig) -> None:
    found = retain(ready, 5, 2)
    assert (found.head.floor, found.head.sweeps, found.head.version) == (5, 1, 6)
    assert rows(ready) == [(2, "")]
    assert ready.ledger.head(JOB) == found.head
    # Again, later: what was kept may go, what is on the chain may stay, nothing comes back.
    ready.commit(ready.holder, 7)  # type: ignore[attr-defined]
    assert ready.ledger.versions(JOB).head.floor == 5, "a commit leaves the floor where it is"
    for floor, survivors in ((7, [3]), (7, [1]), (4, []), (8, []), (6, [6]), (7, [7])):
        with pytest.raises(BadInput):
            retain(ready, floor, *survivors, sweeps=1)
    assert rows(ready) == [(2, "")]
    retain(ready, 7, 2, 5, sweeps=1)
    assert rows(ready) == [(5, ""), (2, "")]
    retain(ready, 7, 5, sweeps=2)
    assert rows(ready) == [(5, "")]
    with pytest.raises(BadInput, match="dropped before"):
        ready.ledger.retain(
            JOB, expected_sweeps=3, floor=7, kept=[KeptVersion(version=5, digest="other", step=5)], actor="x"
        )
    assert ready.kinds(JOB).count("versions.retained") == 3
    assert ready.faults() == []


def test_who_read_an_older_history_is_refused(ready: Rig) -> None:
    retain(ready, 5, 2)
    with pytest.raises(HeadMoved, match="meanwhile"):
        retain(ready, 6, 5)
    with pytest.raises(HeadMoved, match="meanwhile"):
        retain(ready, 6, 5, sweeps=2)
    with pytest.raises(HeadMoved):
        ready.ledger.tag(JOB, kept(5, tag="best")[0], expected_sweeps=0, actor="x")
    with pytest.raises(HeadMoved):
        ready.ledger.adopt(adoption(), actor="x")
    assert (rows(ready), ready.ledger.versions(JOB).head.floor) == ([(2, "")], 5)
    assert ready.kinds(JOB).count("head.refused") == 4
    retain(ready, 5, 2), "asking again for what was done is answered"
    assert ready.ledger.versions(JOB).head.sweeps == 1


def test_tags(ready: Rig) -> None:
    best = kept(3, tag="best")[0]
    assert ready.ledger.tag(JOB, best, expected_sweeps=0, actor="op").tags == {"best": best}
    assert ready.ledger.tag(JOB, best, expected_sweeps=0, actor="op").head.sweeps == 0
    ready.ledger.tag(JOB, kept(3, tag="other")[0], expected_sweeps=0, actor="op")
    retain(ready, 6)
    assert rows(ready) == [(3, "best"), (3, "other")], "retention leaves tags alone"
    for gone in (2, 7):
        with pytest.raises(NotFound):
            ready.ledger.tag(JOB, kept(gone, tag="late")[0], expected_sweeps=1, actor="op")
    with pytest.raises(NotFound):
        ready.ledger.tag(
            JOB, KeptVersion(version=3, digest="other", step=3, tag="late"), expected_sweeps=1, actor="op"
        )
    # A kept version can be tagged again; moving a tag may drop what it was at.
    moved = ready.ledger.tag(JOB, kept(6, tag="best")[0], expected_sweeps=1, actor="op")
    assert ([(k.version, k.tag) for k in moved.kept], moved.head.sweeps) == ([(6, "best"), (3, "other")], 2)
    ready.ledger.untag(JOB, "other", actor="op")
    assert (rows(ready), ready.ledger.versions(JOB).head.sweeps) == ([(6, "best")], 3)
    with pytest.raises(NotFound):
        ready.ledger.untag(JOB, "other", actor="op")
    for verb in (
        lambda: ready.ledger.untag("none", "best", actor="op"),
        lambda: ready.ledger.tag("none", best, expected_sweeps=0, actor="op"),
        lambda: ready.ledger.retain("none", expected_sweeps=0, floor=0, kept=(), actor="op"),
    ):
        with pytest.raises(NotFound):
            verb()
    assert ready.faults() == []


@pytest.mark.parametrize("bad", ["", "3", "-x", "a b", "a/b", "x" * 64, "é", "a\n", None, 3])
def test_a_tag_is_never_taken_for_a_version(bad: Any) -> None:
    with pytest.raises(BadInput):
        check_tag(bad)


def test_one_version_is_kept_once(ready: Rig) -> None:
    with pytest.raises(BadInput):
        retain(ready, 5, 2, 2)


# --- adopting ------------------------------------------------------------------------------------------------


def test_a_rollback_is_a_new_version(ready: Rig) -> None:
    before = ready.ledger.versions(JOB).head
    done = ready.ledger.adopt(adoption(forget_after=3), actor="operator")
    head = done.head
    assert (head.version, head.step, head.digest, head.tenant) == (7, 3, "digest-7", "ada")
    assert (head.floor, head.sweeps, head.epoch, done.forgotten) == (0, 0, before.epoch, 3)
    assert ready.ledger.head(JOB) == head
    assert [ready.ledger.effect(f"{JOB}:{n}") is not None for n in range(1, 7)] == [True] * 3 + [False] * 3
    # A holder that saves as if nothing had happened finds the head moved; one that looked goes on, and its step runs again.
    with pytest.raises(HeadMoved) as caught:
        ready.commit(ready.holder, 7)  # type: ignore[attr-defined]
    assert caught.value.version == 7
    assert ready.commit(ready.holder, 4, expected_version=7).version == 8  # type: ignore[attr-defined]
    assert ready.kinds(JOB)[-1] == "head.adopted"
    assert ready.faults() == []


def test_a_rollback_leaves_the_floor(ready: Rig) -> None:
    """Or what was dropped would be looked for again."""
    retain(ready, 5, 2)
    done = ready.ledger.adopt(adoption(source=AdoptionSource(job=JOB, sweeps=1)), actor="operator")
    assert (done.head.floor, done.head.sweeps, rows(ready)) == (5, 1, [(2, "")])


def test_adopting_again_is_answered_once(ready: Rig) -> None:
    first = ready.ledger.adopt(adoption(forget_after=3), actor="operator")
    again = ready.ledger.adopt(adoption(forget_after=3), actor="operator")
    assert again.head == first.head
    assert ready.kinds(JOB).count("head.adopted") == 1


@pytest.mark.parametrize("place", ["adopt_before_head", "before_commit", "before_begin"])
def test_nothing_of_a_rollback_that_died(ready: Rig, place: str) -> None:
    before = ready.dump()
    failpoints.arm(place, "raise")
    with pytest.raises(FailpointHit):
        ready.ledger.adopt(adoption(forget_after=1), actor="operator")
    failpoints.disarm()
    assert ready.dump() == before


@pytest.mark.parametrize("rig", ["postgres"], indirect=True)
def test_a_lost_answer_is_asked_for_again(ready: Rig) -> None:
    """A file has no connection to lose."""
    failpoints.arm("after_commit_before_reply", "drop", nth=1)
    assert ready.ledger.adopt(adoption(forget_after=3), actor="operator").head.version == 7
    failpoints.disarm()
    failpoints.arm("after_commit_before_reply", "drop", nth=1)
    assert retain(ready, 6).head.sweeps == 1
    failpoints.disarm()
    ready.ledger.tag(JOB, kept(7, tag="best")[0], expected_sweeps=1, actor="op")
    failpoints.arm("after_commit_before_reply", "drop", nth=1)
    ready.ledger.untag(JOB, "best", actor="op")
    failpoints.disarm()
    assert ready.kinds(JOB).count("head.adopted") == ready.kinds(JOB).count("versions.retained") == 1


def test_the_wrong_version_tenant_or_source(ready: Rig) -> None:
    other = ready.ask(tenant="bob", lease_id="bobs")
    ready.commit(other, 1, job="bobs-job")
    state = ready.state()
    for wanted, error in [
        (adoption(expected_version=5), HeadMoved),
        (adoption(expected_version=0, version=1), HeadMoved),
        (adoption(job="new", expected_version=6), HeadMoved),
        (adoption(tenant="bob"), NotFound),
        (adoption(job="new", expected_version=0, version=1, tenant="bob"), NotFound),
        (adoption(job="bobs-job", expected_version=1, version=2), NotFound),
        (adoption(source=AdoptionSource(job="bobs-job", sweeps=0)), NotFound),
        (adoption(source=AdoptionSource(job="none", sweeps=0)), NotFound),
        (adoption(source=AdoptionSource(job=JOB, sweeps=1)), HeadMoved),
    ]:
        with pytest.raises(error):
            ready.ledger.adopt(wanted, actor="operator")
    with pytest.raises(NotFound, match="tenant"):
        ready.ledger.adopt(
            adoption(job="new", expected_version=0, version=1, tenant="carl", source=None), actor="operator"
        )
    assert ready.state() == state


@pytest.mark.parametrize(
    "over",
    [
        {"version": 6}, {"version": 0, "expected_version": 0}, {"step": -1}, {"epoch": -1}, {"reason": "whim"},
        {"digest": ""}, {"job": "../x"}, {"floor": 8}, {"floor": -1}, {"expected_version": -1}, {"tenant": "a b"},
        {"version": 1 << 63}, {"kept": tuple(kept(3))}, {"kept": tuple(kept(3, tag="x")), "floor": 5},
    ],
)  # fmt: skip
def test_impossible_adoptions(over: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        adoption(**over)


def test_a_fork_begins_a_job(ready: Rig) -> None:
    wanted = adoption(job="fork", expected_version=0, version=1, reason="fork", step=4)
    done = ready.ledger.adopt(wanted, actor="operator")
    assert (done.head.version, done.head.step, done.head.tenant, done.forgotten) == (1, 4, "ada", 0)
    assert ready.commit(ready.holder, 5, job="fork", expected_version=1).version == 2  # type: ignore[attr-defined]
    assert ready.ledger.versions(JOB).head.version == 6
    assert [ready.ledger.effect(f"{JOB}:{n}") is not None for n in range(1, 7)] == [True] * 6
    assert ready.faults() == []


def test_a_rebuilt_head_brings_its_history_and_fences_older_epochs(ready: Rig) -> None:
    wanted = adoption(
        job="lost", expected_version=0, version=40, epoch=1 << 50, reason="rebuild", source=None, floor=38,
        kept=tuple(kept(3, 20)),
    )  # fmt: skip
    ready.ledger.adopt(wanted, actor="operator")
    found = ready.ledger.versions("lost")
    assert (found.head.version, found.head.floor, [k.version for k in found.kept]) == (40, 38, [20, 3])
    with pytest.raises(SubletError, match="epoch"):
        ready.commit(ready.holder, 4, job="lost", expected_version=40)  # type: ignore[attr-defined]
    newer = ready.ask(lease_id="newer")
    assert newer.lease.epoch > 1 << 50
    assert ready.commit(newer, 4, job="lost", expected_version=40).version == 41
    assert ready.faults() == []


def test_reservations_of_the_living_stay(ready: Rig) -> None:
    dead = ready.ask(lease_id="dead")
    ready.ledger.reserve(ready.key(dead), effect="of-the-dead", job=JOB, fingerprint="p")
    ready.ledger.reserve(ready.key(ready.holder), effect="of-the-living", job=JOB, fingerprint="p")  # type: ignore[attr-defined]
    ready.ledger.reserve(ready.key(dead), effect="elsewhere", job="other", fingerprint="p")
    ready.release(dead)
    assert ready.ledger.adopt(adoption(forget_after=6), actor="operator").forgotten == 1
    assert ready.ledger.effect("of-the-dead") is None
    assert ready.ledger.effect("elsewhere") is not None
    other = ready.ask(lease_id="other")
    with pytest.raises(EffectBusy):
        ready.ledger.reserve(ready.key(other), effect="of-the-living", job=JOB, fingerprint="p")
    ready.ledger.reserve(ready.key(other), effect="of-the-dead", job=JOB, fingerprint="another")


def test_a_rollback_races_with_commits(ready: Rig) -> None:
    """One of them wins each version; nobody is lost and nobody wins twice."""
    outcomes: list[str] = []

    def roll_back() -> None:
        ledger = ready.open()
        for _ in range(10):
            head = ledger.versions(JOB).head
            wanted = adoption(
                expected_version=head.version, version=head.version + 1, digest=f"back-{head.version}",
                source=AdoptionSource(job=JOB, sweeps=head.sweeps),
            )  # fmt: skip
            try:
                ledger.adopt(wanted, actor="operator")
                outcomes.append("moved")
            except HeadMoved:
                outcomes.append("late")

    def save() -> None:
        ledger = ready.open()
        for n in range(10):
            head = ledger.versions(JOB).head
            step = replace(a_step(head.step + 1), expected_version=head.version, key=f"race:{n}")
            try:
                ledger.commit(ready.key(ready.holder), step)  # type: ignore[attr-defined]
                outcomes.append("moved")
            except (HeadMoved, Disconnected):
                outcomes.append("late")

    threads = [threading.Thread(target=work) for work in (roll_back, save)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 20
    assert ready.ledger.versions(JOB).head.version == 6 + outcomes.count("moved")
    assert ready.faults() == []


# --- who this ledger is --------------------------------------------------------------------------------------


def test_the_ledger_is_the_same_after_a_restore_but_its_heads_are_of_the_past(ready: Rig) -> None:
    before = ready.ledger.identity()
    assert (len(before.id), before.heads_current) == (32, True)
    ready.ledger.mark_restored(actor="operator")
    after = ready.ledger.identity()
    assert (after.id, after.heads_current) == (before.id, False)
    ready.ledger.mark_current(actor="operator")
    assert ready.ledger.identity() == before
    assert ready.faults() == []
