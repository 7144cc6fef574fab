"""The commit rule as a table: what is written, what is answered, what is refused, in which order (S1-S4)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.errors import BadInput, EffectBusy, Fenced, FingerprintMismatch, HeadMoved
from sublet.core.leasing.lease import LeaseRecord, LeaseState
from sublet.core.progress.effect import (
    AlreadyCommitted,
    Commit,
    Committed,
    Effect,
    Head,
    Reserved,
    decide_commit,
    decide_reserve,
)
from tests.core.pool import NOW, M, active

EPOCH = 7
LEASE = active("mine", epoch=EPOCH, job="train")
EXPIRED = replace(LEASE, expires_at=NOW)
ENDED = replace(LEASE, state=LeaseState.ENDED)
GRACE = replace(LEASE, state=LeaseState.REVOKING, expires_at=NOW - M, deadline_at=NOW + 1)
GRACE_OVER = replace(GRACE, deadline_at=NOW)
HEAD = Head(job="train", tenant="bob", version=4, step=4, digest="old", epoch=EPOCH)
COMMIT = Commit(job="train", key="train/5", step=5, fingerprint="f", expected_version=4, digest="new")


def effect(**fields: object) -> Effect:
    base = {"key": "train/5", "fingerprint": "f", "job": "train", "owner": "mine", "epoch": EPOCH}
    return Effect(**(base | fields))  # type: ignore[arg-type]


DONE = effect(completed=True, outcome="loss 0.1", version=5)
THEIRS = effect(owner="other", epoch=6)

RESERVE_TABLE = [
    # name, lease, epoch, effect, owner alive, fingerprint, answer
    ("a new key is reserved", LEASE, EPOCH, None, False, "f", Reserved(EPOCH, taken_over=False)),
    ("my own reservation again", LEASE, EPOCH, effect(), True, "f", Reserved(EPOCH, taken_over=False)),
    ("in grace it still counts", GRACE, EPOCH, None, False, "f", Reserved(EPOCH, taken_over=False)),
    ("a dead owner is taken over", LEASE, EPOCH, THEIRS, False, "f", Reserved(EPOCH, taken_over=True)),
    ("a live owner is busy", LEASE, EPOCH, THEIRS, True, "f", EffectBusy),
    (
        "S2 an older epoch takes nothing over",
        LEASE,
        EPOCH,
        effect(owner="other", epoch=8),
        False,
        "f",
        Fenced,
    ),
    ("S2 nor an equal one", LEASE, EPOCH, effect(owner="other", epoch=7), False, "f", Fenced),
    ("S4 a completed key is a duplicate", LEASE, EPOCH, DONE, False, "f", AlreadyCommitted(5, "loss 0.1")),
    (
        "S4 whoever completed it",
        LEASE,
        EPOCH,
        replace(DONE, owner="other"),
        True,
        "f",
        AlreadyCommitted(5, "loss 0.1"),
    ),
    ("S4 even for a fenced holder", ENDED, EPOCH, DONE, False, "f", AlreadyCommitted(5, "loss 0.1")),
    ("S4 other inputs are an error", LEASE, EPOCH, DONE, False, "g", FingerprintMismatch),
    ("S4 also on a reservation", LEASE, EPOCH, effect(), True, "g", FingerprintMismatch),
    ("S4 also for a fenced holder", ENDED, EPOCH, DONE, False, "g", FingerprintMismatch),
    ("S2 an expired lease is fenced", EXPIRED, EPOCH, None, False, "f", Fenced),
    ("S2 on its own reservation too", EXPIRED, EPOCH, effect(), True, "f", Fenced),
    ("S2 and cannot take over", EXPIRED, EPOCH, THEIRS, False, "f", Fenced),
    ("S2 an ended lease is fenced", ENDED, EPOCH, None, False, "f", Fenced),
    ("S2 after the grace it is fenced", GRACE_OVER, EPOCH, None, False, "f", Fenced),
    ("S2 a wrong epoch is fenced", LEASE, EPOCH - 1, None, False, "f", Fenced),
    ("S2 a future epoch too", LEASE, EPOCH + 1, None, False, "f", Fenced),
    ("S2 the fence is asked before who is busy", EXPIRED, EPOCH, THEIRS, True, "f", Fenced),
]


@pytest.mark.parametrize("row", RESERVE_TABLE, ids=lambda row: row[0])
def test_reserve(row: tuple) -> None:
    _, lease, epoch, prior, alive, fingerprint, answer = row
    got = decide_reserve(lease, epoch, prior, alive, fingerprint, NOW)
    if isinstance(answer, type):
        assert type(got) is answer
        assert str(got)
    else:
        assert got == answer


COMMIT_TABLE = [
    # name, lease, epoch, head, effect, owner alive, changes to the commit, answer
    ("the next step becomes true", LEASE, EPOCH, HEAD, None, False, {}, Committed(5)),
    ("with its reservation", LEASE, EPOCH, HEAD, effect(), True, {}, Committed(5)),
    ("in grace too", GRACE, EPOCH, HEAD, None, False, {}, Committed(5)),
    (
        "the first step of a job",
        LEASE,
        EPOCH,
        Head(job="train", tenant="bob"),
        None,
        False,
        {"step": 1, "expected_version": 0},
        Committed(1),
    ),
    ("after an older holder", LEASE, EPOCH, replace(HEAD, epoch=3), None, False, {}, Committed(5)),
    ("taking over from a dead one", LEASE, EPOCH, HEAD, THEIRS, False, {}, Committed(5)),
    (
        "S4 twice is a duplicate",
        LEASE,
        EPOCH,
        replace(HEAD, version=5),
        DONE,
        False,
        {},
        AlreadyCommitted(5, "loss 0.1"),
    ),
    (
        "S4 a duplicate is told to the fenced",
        ENDED,
        EPOCH,
        HEAD,
        DONE,
        False,
        {},
        AlreadyCommitted(5, "loss 0.1"),
    ),
    ("S4 other inputs", LEASE, EPOCH, HEAD, DONE, False, {"fingerprint": "g"}, FingerprintMismatch),
    ("S2 expired", EXPIRED, EPOCH, HEAD, None, False, {}, Fenced),
    ("S2 ended", ENDED, EPOCH, HEAD, effect(), True, {}, Fenced),
    ("S2 the grace is over", GRACE_OVER, EPOCH, HEAD, None, False, {}, Fenced),
    ("S2 a wrong epoch", LEASE, EPOCH - 1, HEAD, None, False, {}, Fenced),
    ("S2 a newer holder has committed", LEASE, EPOCH, replace(HEAD, epoch=8), None, False, {}, Fenced),
    ("somebody works on it", LEASE, EPOCH, HEAD, THEIRS, True, {}, EffectBusy),
    ("the head moved on", LEASE, EPOCH, replace(HEAD, version=5, step=5), None, False, {}, HeadMoved),
    ("the head is behind", LEASE, EPOCH, replace(HEAD, version=3, step=3), None, False, {}, HeadMoved),
    ("S3 a gap", LEASE, EPOCH, HEAD, None, False, {"step": 6}, HeadMoved),
    ("S3 a repeat", LEASE, EPOCH, HEAD, None, False, {"step": 4}, HeadMoved),
    ("S3 a step back", LEASE, EPOCH, HEAD, None, False, {"step": 1}, HeadMoved),
    (
        "S2 fenced is said before head moved",
        EXPIRED,
        EPOCH,
        replace(HEAD, version=9),
        None,
        False,
        {},
        Fenced,
    ),
]


@pytest.mark.parametrize("row", COMMIT_TABLE, ids=lambda row: row[0])
def test_commit(row: tuple) -> None:
    _, lease, epoch, head, prior, alive, changes, answer = row
    got = decide_commit(lease, epoch, head, prior, alive, replace(COMMIT, **changes), NOW)
    if isinstance(answer, type):
        assert type(got) is answer
        if isinstance(got, HeadMoved):
            assert got.version == head.version
    else:
        assert got == answer


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([LEASE, EXPIRED, ENDED, GRACE, GRACE_OVER]),
    st.integers(5, 9),
    st.builds(
        replace, st.just(HEAD), version=st.integers(0, 6), step=st.integers(0, 6), epoch=st.integers(5, 9)
    ),
    st.one_of(
        st.none(),
        st.builds(
            effect,
            owner=st.sampled_from(["mine", "other"]),
            epoch=st.integers(5, 9),
            fingerprint=st.sampled_from(["f", "g"]),
            completed=st.booleans(),
        ),
    ),
    st.booleans(),
    st.integers(1, 7),
    st.integers(0, 6),
)
def test_s2_s3_s4_nothing_is_committed_that_one_rule_forbids(
    lease: LeaseRecord, epoch: int, head: Head, prior: Effect | None, alive: bool, step: int, version: int
) -> None:
    commit = replace(COMMIT, step=step, expected_version=version)
    got = decide_commit(lease, epoch, head, prior, alive, commit, NOW)
    if isinstance(got, Committed):
        assert lease in (LEASE, GRACE)
        assert epoch == EPOCH >= head.epoch
        assert head.version == version
        assert got.version == version + 1
        assert step == head.step + 1
        assert prior is None or (prior.fingerprint == "f" and not prior.completed)
        assert prior is None or prior.owner == "mine" or (not alive and prior.epoch < epoch)
    if isinstance(got, AlreadyCommitted):
        assert prior is not None
        assert prior.completed
        assert prior.fingerprint == "f"


def test_a_commit_that_cannot_be_one_is_refused_when_it_is_made() -> None:
    for fields in ({"step": 0}, {"step": -1}, {"cursor": "x" * 65_537}, {"outcome": "x" * 65_537}):
        with pytest.raises(BadInput):
            replace(COMMIT, **fields)
    assert replace(COMMIT, cursor="x" * 65_536, outcome="x" * 65_536)
