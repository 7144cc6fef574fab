"""What an offer says: the smaller slice, until when, its price, and how likely it is to be taken again."""

from __future__ import annotations

import secrets

from sublet.core.leasing.lease import EndReason, Holder, Request, Tier
from sublet.core.studio.session import job_of
from tests.studio.running import HOST, Running, give_lease

GIB = 1 << 30


def _hold(studio: Running, gb: int, tier: Tier = Tier.INTERACTIVE) -> str:
    lease_id = f"L{secrets.token_hex(10)}"
    request = Request(tenant="ann", vram_bytes=gb * GIB, ttl_us=60_000_000, tier=tier, host=HOST)
    studio.ledger.acquire(lease_id, "secret", request, Holder(host=HOST))
    return lease_id


def _offered(studio: Running) -> str:
    session_id = f"S{secrets.token_hex(10)}"
    request = Request(
        tenant="bea",
        vram_bytes=60 * GIB,
        ttl_us=60_000_000,
        wants_offers=True,
        tier=Tier.SPOT,
        host=HOST,
        job=job_of("bea", session_id),
    )
    studio.ledger.open_session(session_id, "bea", request=request, warm_us=60_000_000, host=HOST)
    give_lease(studio.ledger, session_id, "bea")
    return session_id


def test_an_offer_names_its_price_and_its_odds(studio_here: Running) -> None:
    ann, bea = studio_here.token("ann"), studio_here.token("bea")
    studio_here.ledger.set_price("host", 2_500_000, actor="op")
    for n in range(12):  # of twelve on spot three were preempted
        lease = _hold(studio_here, 1, Tier.SPOT)
        reason = EndReason.PREEMPTED if n < 3 else EndReason.RELEASED
        epoch = studio_here.ledger.look(lease).lease.epoch
        assert studio_here.ledger.end(lease, epoch, reason=reason, detail="a test")
    _hold(studio_here, 50)
    session_id = _offered(studio_here)
    found = studio_here.ask("GET", f"/v1/sessions/{session_id}", bea).json
    assert found["status"] == "offered"
    offer = found["offer"]
    assert 0 < offer["vram_bytes"] <= 30 * GIB
    assert offer["until"] > found["opened_at"]
    assert float(offer["price_per_hour"]) == 2.5
    assert offer["preemption_odds"] == 0.25
    dashboard = studio_here.ask("GET", "/v1/dashboard", bea).json
    assert dashboard["sessions"][0]["offer"]["preemption_odds"] == 0.25
    assert studio_here.ask("GET", f"/v1/sessions/{session_id}", ann).status == 404
