"""How likely a lease of a tier is to be taken for somebody more important: what an offer says besides its
price.

Rules of this file:
- Counted, not modelled: of the leases of the tier that ended lately, how many were preempted. Too few of them
  say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState, Tier

PPM = 1_000_000
#: Of fewer, one more or less would turn the answer around.
LEAST = 10


def preempted_ppm(leases: Iterable[LeaseRecord], tier: Tier) -> int | None:
    """In millionths; None while there is too little to count."""
    ended = [
        lease
        for lease in leases
        if lease.request.tier is tier and lease.state is LeaseState.ENDED and lease.granted_at
    ]
    if len(ended) < LEAST:
        return None
    return sum(lease.reason is EndReason.PREEMPTED for lease in ended) * PPM // len(ended)
