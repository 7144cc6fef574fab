"""A client that is refused again and again is told each time, and does not fill the journal (A1, both engines)."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sublet.core.errors import NeverFits, QuotaReached, SubletError
from sublet.core.journal.counters import Declined
from sublet.core.journal.refusals import ROWS_IN_SPAN, SUMMED
from sublet.core.leasing.block import BlockRequest
from sublet.core.leasing.lease import Holder
from tests.ledger.rig import HERE, MINUTE, Rig
from tests.ledger.verbs.studio.test_sessions import open_one

MANY = 5 * ROWS_IN_SPAN


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.tenant("ada", max_sessions=1)
    rig.tenant("bob")
    rig.device("gpu0", 100)
    return rig


def rows(pool: Rig, kind: str, tenant: str = "ada") -> list[dict[str, object]]:
    found = pool.sql("SELECT body FROM journal WHERE kind = ? AND tenant = ? ORDER BY id", kind, tenant)
    return [json.loads(body) for (body,) in found]


def refused(verb: Callable[[], object], error: type[SubletError]) -> str:
    with pytest.raises(error) as raised:
        verb()
    return str(raised.value)


def test_a1_opens_that_are_refused_are_summed_up_by_the_minute(pool: Rig) -> None:
    open_one(pool, "ada")
    said = {refused(lambda: open_one(pool, "ada"), QuotaReached) for _ in range(MANY)}
    assert len(said) == 1
    assert len(rows(pool, "session.refused")) == ROWS_IN_SPAN
    assert rows(pool, SUMMED) == []
    pool.advance(MINUTE)
    pool.ledger.tick()
    [summed] = rows(pool, SUMMED)
    assert (summed["refused"], summed["count"]) == ("session.refused", MANY - ROWS_IN_SPAN)
    pool.advance(MINUTE)
    pool.ledger.tick()
    assert len(rows(pool, SUMMED)) == 1, "a sum is written once"
    assert pool.sql("SELECT count(*) FROM refusal_tally") == [(0,)]
    assert pool.faults() == []


def test_a1_leases_too_each_tenant_and_reason_for_itself_and_the_metric_counts_all(pool: Rig) -> None:
    for _ in range(MANY):
        assert "500" in refused(lambda: pool.ask(500), NeverFits)
    assert len(rows(pool, "lease.refused")) == ROWS_IN_SPAN
    refused(lambda: pool.ask(500, tenant="bob"), NeverFits)
    assert len(rows(pool, "lease.refused", "bob")) == 1
    pool.advance(MINUTE)
    refused(lambda: pool.ask(500), NeverFits)
    [summed] = rows(pool, SUMMED)
    assert (summed["code"], summed["count"]) == (NeverFits.code, MANY - ROWS_IN_SPAN)
    happened = pool.ledger.metered(after=0, late_after=0).happened
    counted = sum(what.count for _, _, what in happened if isinstance(what, Declined))
    assert counted == MANY + 2
    assert pool.faults() == []


def test_a1_blocks_too(pool: Rig) -> None:
    pool.policy(tenant_blocks_max=2)
    request = BlockRequest(tenant="ada", blocks=4, ttl_us=MINUTE)
    for n in range(MANY):
        refused(
            lambda n=n: pool.ledger.grant_block(f"B{n:020d}", "secret", request, Holder(host=HERE)),  # type: ignore[misc]
            QuotaReached,
        )
    assert len(rows(pool, "block.refused")) == ROWS_IN_SPAN
