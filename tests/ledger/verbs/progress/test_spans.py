"""A commit of several steps, and effects that come true with it (S1, S3, S4), on both engines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sublet.core.errors import BadInput, EffectBusy, FingerprintMismatch, HeadMoved
from sublet.core.progress.effect import Commit, Committed, Done, said
from tests.ledger.rig import Rig


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.device()
    rig.tenant()
    return rig


def _mail(key: str = "mail:1", fingerprint: str = "to ada", outcome: str = "sent") -> Done:
    return Done(key=key, fingerprint=fingerprint, outcome=outcome)


def _told(pool: Rig) -> list[dict[str, Any]]:
    rows = pool.sql("SELECT body FROM journal WHERE kind = 'step.committed' ORDER BY id")
    return [json.loads(body) for (body,) in rows]


def test_spans_follow_each_other_without_gap_or_repeat(pool: Rig) -> None:
    answer = pool.ask(10)
    assert pool.commit(answer, 7, first=1, expected_version=0) == Committed(1)
    assert pool.commit(answer, 8, expected_version=1) == Committed(2)
    assert pool.commit(answer, 20, first=9, expected_version=2) == Committed(3)
    head = pool.ledger.head("train")
    assert (head.version, head.step) == (3, 20)
    assert [(b["first"], b["step"]) for b in _told(pool)] == [(1, 7), (8, 8), (9, 20)]
    assert pool.faults() == []


@pytest.mark.parametrize(("first", "step"), [(5, 9), (7, 9), (1, 9), (6, 6), (8, 8)])
def test_a_span_that_leaves_a_gap_or_repeats_a_step_is_refused(pool: Rig, first: int, step: int) -> None:
    answer = pool.ask(10)
    pool.commit(answer, 3, first=1, expected_version=0)
    pool.commit(answer, 5, first=4, expected_version=1)
    refuses = first != 6
    if refuses:
        with pool.only_journals("step.refused"), pytest.raises(HeadMoved, match=f"step {first} does not"):
            pool.commit(answer, step, first=first, expected_version=2, key="new")
    else:
        assert pool.commit(answer, step, first=first, expected_version=2, key="new") == Committed(3)


def test_a_job_may_begin_elsewhere_only_on_purpose(pool: Rig) -> None:
    answer = pool.ask(10)
    with pool.only_journals("step.refused"), pytest.raises(HeadMoved):
        pool.commit(answer, 42, expected_version=0)
    assert pool.commit(answer, 42, starts=True, expected_version=0) == Committed(1)
    with pool.only_journals("step.refused"), pytest.raises(HeadMoved):
        pool.commit(answer, 44, starts=True, expected_version=1)
    assert pool.commit(answer, 43, starts=True, expected_version=1) == Committed(2)


def test_the_right_step_on_another_version_is_refused(pool: Rig) -> None:
    """The compare-and-swap alone: the step would follow, the state it was made from is another."""
    answer = pool.ask(10)
    pool.commit(answer, 1, expected_version=0)
    for version in (0, 2):
        with pool.only_journals("step.refused"), pytest.raises(HeadMoved, match=f"version 1, not {version}"):
            pool.commit(answer, 2, expected_version=version)


@pytest.mark.parametrize("first", [-1, 4])
def test_a_span_runs_forwards(first: int) -> None:
    with pytest.raises(BadInput, match="not a span"):
        Commit(job="j", key="k", step=3, first=first, fingerprint="f", expected_version=0, digest="d")


def test_what_a_commit_stored_is_spoken_for_in_the_journal(pool: Rig) -> None:
    answer = pool.ask(10)
    for step, cursor in enumerate(["", "käse 🧀", "1:2"], 1):
        pool.commit(answer, step, cursor=cursor, outcome="{\n}")
        told = _told(pool)[-1]
        assert (told["said"], told["cursor"]) == (said(f"print-{step}", "{\n}"), said("", cursor))
    assert said("ab", "c") != said("a", "bc")


@pytest.mark.parametrize("before", [0, 2])
def test_effects_become_true_with_the_commit(pool: Rig, before: int) -> None:
    """S1: the head, the commit's own effect and those that join it."""
    answer = pool.ask(10)
    for step in range(1, before + 1):
        pool.commit(answer, step)
    key = pool.key(answer)
    pool.ledger.reserve(key, effect="mail:1", job="train", fingerprint="to ada")
    joined = (_mail(), _mail("row:2", "a row", "{}"))
    assert pool.commit(answer, before + 1, effects=joined) == Committed(before + 1)
    for done in joined:
        effect = pool.ledger.effect(done.key)
        assert effect is not None
        assert (effect.completed, effect.outcome, effect.version, effect.job) == (
            True,
            done.outcome,
            before + 1,
            "train",
        )
    assert _told(pool)[-1]["effects"] == {d.key: said(d.fingerprint, d.outcome) for d in joined}
    with pool.only_journals():
        assert pool.commit(answer, before + 1, effects=joined) == Committed(before + 1)
    assert pool.faults() == []


@pytest.mark.parametrize("before", [0, 1])
def test_an_effect_that_may_not_join_keeps_the_whole_commit_from_happening(pool: Rig, before: int) -> None:
    other, answer = pool.ask(10), pool.ask(10)
    for step in range(1, before + 1):
        pool.commit(answer, step)
    pool.ledger.reserve(pool.key(other), effect="busy", job="else", fingerprint="f")
    pool.commit(other, 1, job="else", effects=(_mail("done", "f"),))
    refusals = [
        (_mail("busy", "f"), EffectBusy),
        (_mail("done", "f"), HeadMoved),
        (_mail("done", "other inputs"), FingerprintMismatch),
    ]
    for done, error in refusals:
        with pool.only_journals("step.refused"), pytest.raises(error):
            pool.commit(answer, before + 1, effects=(_mail("fresh", "f"), done))
    assert pool.ledger.effect("fresh") is None
    assert pool.commit(answer, before + 1) == Committed(before + 1)


def test_an_effect_whose_owner_is_dead_is_taken_over_by_the_commit(pool: Rig) -> None:
    dead, answer = pool.ask(10), pool.ask(10)
    pool.ledger.reserve(pool.key(dead), effect="mail:1", job="train", fingerprint="to ada")
    pool.release(dead)
    assert pool.commit(answer, 1, effects=(_mail(),)) == Committed(1)
    effect = pool.ledger.effect("mail:1")
    assert effect is not None
    assert (effect.owner, effect.completed) == (answer.lease.id, True)


def test_one_key_stands_once_in_a_commit() -> None:
    with pytest.raises(BadInput, match="twice"):
        Commit(
            job="j", key="k", step=1, fingerprint="f", expected_version=0, digest="d", effects=(_mail("k"),)
        )
    with pytest.raises(BadInput, match="twice"):
        Commit(
            job="j",
            key="k",
            step=1,
            fingerprint="f",
            expected_version=0,
            digest="d",
            effects=(_mail("a"), _mail("a")),
        )
