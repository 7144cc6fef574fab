"""Ways to share a pool: ours, and the usual ones. Data only.

Rules of this file:
- A scheme says when a GPU that is not being used goes back, and who gets it next. Everything else (the pool,
  the work, what a restore costs) is the same for all.
- The other schemes are given their best case: they misread nothing, lose nothing, and are never late.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from sublet.core.leasing.policy import Policy
from sublet.core.values import HOUR_US, MAX_DURATION_US, MINUTE_US, format_duration


class ServiceOrder(Enum):
    """Who is next."""

    OURS = "ours"  # core.scheduling.schedule.tick: fair order, idle on demand, hold cap with cooldown
    ARRIVAL = "arrival"  # first come, first served; nothing is ever taken from anybody


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    name: str
    says: str  # in a table
    order: ServiceOrder
    ttl_us: int
    idle_us: (
        int | None
    )  # an unused GPU goes back after so long; 0: after each request; None: when the stay is over
    stay_us: int | None = None  # it goes back so long after it was granted, used or not
    policy: Policy = field(default_factory=Policy)


TTL_US = 5 * MINUTE_US

OURS = Scheme(
    name="ours",
    says="ttl 5m, renewed while used, idle on demand",
    order=ServiceOrder.OURS,
    ttl_us=TTL_US,
    idle_us=TTL_US,
)
#: Ours without that one rule, which shows what idle on demand is worth.
FAIR_TTL = Scheme(
    name="fair-ttl",
    says="ours without idle on demand",
    order=ServiceOrder.OURS,
    ttl_us=TTL_US,
    idle_us=TTL_US,
    policy=Policy(idle_after_us=MAX_DURATION_US),
)
PASSIVE_TTL = Scheme(
    name="passive-ttl",
    says="ttl 5m, renewed while used, first come first served",
    order=ServiceOrder.ARRIVAL,
    ttl_us=TTL_US,
    idle_us=TTL_US,
)
IDLE_CULL = Scheme(
    name="idle-cull",
    says="culled after 30m idle, as JupyterHub does",
    order=ServiceOrder.ARRIVAL,
    ttl_us=30 * MINUTE_US,
    idle_us=30 * MINUTE_US,
)
PER_USER = Scheme(
    name="per-user",
    says="an instance per user for 8h",
    order=ServiceOrder.ARRIVAL,
    ttl_us=8 * HOUR_US,
    idle_us=None,
    stay_us=8 * HOUR_US,
)
PER_REQUEST = Scheme(
    name="per-request",
    says="a GPU per request, first come first served",
    order=ServiceOrder.ARRIVAL,
    ttl_us=TTL_US,
    idle_us=0,
)

SCHEMES = {s.name: s for s in (OURS, FAIR_TTL, PASSIVE_TTL, IDLE_CULL, PER_USER, PER_REQUEST)}


def with_ttl(scheme: Scheme, ttl_us: int) -> Scheme:
    """The same with another ttl; a scheme that has none of its own stays as it is."""
    if scheme.idle_us != TTL_US or ttl_us == TTL_US:
        return scheme
    says = scheme.says.replace("ttl 5m", f"ttl {format_duration(ttl_us)}")
    return replace(scheme, ttl_us=ttl_us, idle_us=ttl_us, says=says)
