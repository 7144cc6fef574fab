"""The price list in the ledger, on both engines: rows that are only added, each with its journal row."""

from __future__ import annotations

import json

import pytest

from sublet.core.billing.price import PriceList
from sublet.core.errors import BadInput, NotFound
from tests.ledger.rig import SECOND, Rig


def now_costs(rig: Rig, device_class: str = "host", tier: str = "spot") -> int | None:
    return PriceList(rig.ledger.prices()).at(device_class, tier, rig.ledger.now())


def test_a_price_holds_from_its_moment_until_the_next(rig: Rig) -> None:
    moments = []
    for micro in (2_500_000, 3_000_000):
        rig.ledger.set_price("host", micro, actor="op")
        moments.append(rig.ledger.now())
        rig.advance(SECOND)
    rig.ledger.set_price("host", 1, actor="op", tier="spot")
    rig.ledger.set_price("*", 7, actor="op")
    assert now_costs(rig) == 1
    assert now_costs(rig, tier="batch") == 3_000_000
    assert now_costs(rig, "H200") == 7
    rig.advance(SECOND)
    rig.ledger.remove_price("host", actor="op", tier="spot")
    rig.ledger.remove_price("host", actor="op")
    assert now_costs(rig) == 7
    listed = PriceList(rig.ledger.prices())
    assert [listed.at("host", "batch", at) for at in moments] == [2_500_000, 3_000_000]
    assert [p.device_class for p in listed.current(rig.ledger.now())] == ["*"]
    rig.advance(SECOND)
    rig.ledger.set_price("host", 9, actor="op")
    assert now_costs(rig) == 9
    assert rig.faults() == []


def test_every_change_is_in_the_journal_and_no_change_is_not(rig: Rig) -> None:
    made = rig.ledger.set_price("NVIDIA A100", 5, actor="ops", tier="batch")
    rig.advance(SECOND)
    with rig.only_journals():
        assert rig.ledger.set_price("NVIDIA A100", 5, actor="ops", tier="batch") == made
        for wrong in ("", "two\nlines"):
            with pytest.raises(BadInput):
                rig.ledger.set_price(wrong, 1, actor="ops")
        with pytest.raises(BadInput):
            rig.ledger.set_price("host", -1, actor="ops")
        with pytest.raises(BadInput):
            rig.ledger.set_price("host", 1, actor="ops", tier="gold")
        with pytest.raises(NotFound):
            rig.ledger.remove_price("NVIDIA A100", actor="ops")
    rig.ledger.remove_price("NVIDIA A100", actor="ops", tier="batch")
    rows = rig.sql("SELECT kind, tenant, body FROM journal WHERE subject = 'NVIDIA A100' ORDER BY id")
    assert [(kind, tenant) for kind, tenant, _ in rows] == [("price.set", ""), ("price.removed", "")]
    assert json.loads(rows[0][2]) == {"by": "ops", "micro_per_gpu_hour": 5, "tier": "batch"}
    with rig.only_journals(), pytest.raises(NotFound):
        rig.ledger.remove_price("NVIDIA A100", actor="ops", tier="batch")
