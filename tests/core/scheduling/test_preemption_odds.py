"""The odds of being preempted are what happened, or nothing."""

from __future__ import annotations

from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, LeaseState, Request, Tier
from sublet.core.scheduling.preemption_odds import LEAST, preempted_ppm


def _ended(reason: EndReason, tier: Tier = Tier.SPOT, *, granted: int = 1, live: bool = False) -> LeaseRecord:
    return LeaseRecord(
        id="L1",
        request=Request(tenant="a", vram_bytes=1, ttl_us=1_000_000, tier=tier),
        holder=Holder(host="h"),
        state=LeaseState.ACTIVE if live else LeaseState.ENDED,
        granted_at=granted,
        reason=None if live else reason,
    )


def test_too_few_say_nothing() -> None:
    assert preempted_ppm([_ended(EndReason.PREEMPTED)] * (LEAST - 1), Tier.SPOT) is None
    assert preempted_ppm([_ended(EndReason.PREEMPTED)] * LEAST, Tier.SPOT) == 1_000_000


def test_only_preemptions_of_the_tier_count_and_only_of_what_was_granted_and_is_over() -> None:
    leases = [_ended(EndReason.PREEMPTED)] * 3 + [_ended(EndReason.RELEASED)] * 9
    others = [_ended(EndReason.PREEMPTED, Tier.BATCH)] * 50
    never = [_ended(EndReason.RELEASED, granted=0)] * 50
    live = [_ended(EndReason.PREEMPTED, live=True)] * 50
    assert preempted_ppm(leases + others + never + live, Tier.SPOT) == 250_000
    assert preempted_ppm(leases, Tier.INTERACTIVE) is None
