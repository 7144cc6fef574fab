"""What a report reads, on both engines: who held what, and what was committed under it."""

from __future__ import annotations

import json

import pytest

from sublet.core.checkpoints.versions import Adoption, AdoptionSource
from tests.ledger.rig import SECOND, Rig


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.device()
    rig.tenant()
    rig.tenant("bob")
    return rig


def _worked(us: int) -> str:
    return json.dumps({"compute_us": us})


def test_leases_and_commits_of_the_time_asked_for(pool: Rig) -> None:
    old = pool.ask(10, job="train")
    pool.commit(old, 2, first=1, expected_version=0, outcome=_worked(70))
    pool.release(old)
    pool.later(10 * SECOND)
    since = pool.ledger.now()
    live, other = pool.ask(10, job="train"), pool.ask(10, tenant="bob", job="cell")
    pool.ask(71, job="waits", wait_us=None)
    pool.commit(live, 5, first=3, expected_version=1, outcome=_worked(50))
    found = pool.ledger.held()
    assert [x.id for x in found.leases] == [x.lease.id for x in (old, live, other)]
    assert [(c.lease, c.job, c.steps, c.compute_us) for c in found.commits] == [
        (old.lease.id, "train", 2, 70),
        (live.lease.id, "train", 3, 50),
    ]
    assert found.at >= found.commits[-1].at >= since
    newer = pool.ledger.held(since=since)
    assert {x.id for x in newer.leases} == {live.lease.id, other.lease.id}
    assert len(newer.commits) == 1
    assert [x.id for x in pool.ledger.held(tenant="bob").leases] == [other.lease.id]
    assert {x.id for x in pool.ledger.held(job="train").leases} == {old.lease.id, live.lease.id}


def test_a_lease_without_a_job_belongs_to_what_it_committed(pool: Rig) -> None:
    lease = pool.ask(10)
    pool.commit(lease, 1)
    assert [x.id for x in pool.ledger.held(job="train").leases] == [lease.lease.id]


def test_work_that_a_rollback_took_back_is_not_useful(pool: Rig) -> None:
    lease = pool.ask(10)
    for step in (1, 2, 3):
        pool.commit(lease, step, outcome=_worked(step))
    head = pool.ledger.head("train")
    moved = Adoption(
        job="train",
        tenant="ada",
        expected_version=3,
        version=4,
        digest="again",
        step=1,
        epoch=head.epoch,
        reason="rollback",
        source=AdoptionSource(job="train", sweeps=head.sweeps),
        forget_after=1,
    )
    pool.ledger.adopt(moved, actor="test")
    pool.commit(lease, 2, expected_version=4, outcome=_worked(20))
    assert [c.compute_us for c in pool.ledger.held().commits] == [1, 0, 0, 20]


@pytest.mark.parametrize(
    "outcome", ["", "words", "[1]", "7", '{"compute_us": "x"}', '{"compute_us": -4}', '{"compute_us": true}']
)
def test_an_outcome_that_says_no_time_says_none(pool: Rig, outcome: str) -> None:
    pool.commit(pool.ask(10), 1, outcome=outcome)
    assert [c.compute_us for c in pool.ledger.held().commits] == [0]
