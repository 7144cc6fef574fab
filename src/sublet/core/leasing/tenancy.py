"""Tenants: what they may hold, and how much they have used lately.

Rules of this file:
- Use is counted in GPU-microseconds weighted by the part of the device taken, and halves every half-life.
- The name of a tenant that was removed stays reserved: what it had is kept under it (threat 29).
- A tenant's row keeps (used, rate, as_of): use grows by rate × time and is brought forward only when the rate
  changes, so neither a tick nor a grant ever sums over leases.
"""

from __future__ import annotations

from dataclasses import dataclass

from sublet.core.errors import BadInput
from sublet.core.replace import copier
from sublet.core.scheduling.device import Exclusivity

PPM = 1_000_000
DEFAULT_WEIGHT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    name: str
    weight: int = DEFAULT_WEIGHT
    max_leases: int = 0  # 0: no limit, here and below
    max_vram_bytes: int = 0
    max_waiting: int = 0
    live_leases: int = 0
    live_bytes: int = 0
    waiting: int = 0
    used_us: int = 0
    rate_ppm: int = 0
    as_of: int = 0
    cooldown_until: int = 0
    gpu_us_per_day: int = 0  # see core.billing.allowance
    left_us: int = 0  # of it, as of left_at
    left_at: int = 0
    max_sessions: int = 0  # studio sessions open at once
    max_storage_bytes: int = 0  # of checkpoints


tenant_changed = copier(Tenant)

#: 2^(-i/64) in 32-bit fixed point. A straight line over a whole half-life would forget too slowly when a row
#: is brought forward often; over a 64th of one the error stays below half a percent.
HALVING_PARTS = 64
HALVING = tuple(round(2**32 * 2 ** (-i / HALVING_PARTS)) for i in range(HALVING_PARTS + 1))


def decay(used_us: int, elapsed_us: int, half_life_us: int) -> int:
    """Halved once per half-life: integer, exact at the ends, never rising."""
    if used_us <= 0 or elapsed_us <= 0:
        return max(used_us, 0)
    halvings, rest = divmod(elapsed_us, half_life_us)
    if halvings >= 62:
        return 0
    part, within = divmod(rest * HALVING_PARTS, half_life_us)
    weight = HALVING[part] * (half_life_us - within) + HALVING[part + 1] * within
    return (used_us >> halvings) * weight // (half_life_us << 32)


def used_now(tenant: Tenant, now: int, half_life_us: int) -> int:
    elapsed = now - tenant.as_of
    if elapsed <= 0:
        return max(tenant.used_us, 0)
    used = decay(tenant.used_us, elapsed, half_life_us)
    # Asked of every tenant there is, and most hold nothing now.
    return used + tenant.rate_ppm * elapsed // PPM if tenant.rate_ppm else used


def rate_of(exclusivity: Exclusivity, vram_bytes: int, capacity_bytes: int) -> int:
    """The part of a device a slice takes from others, in millionths."""
    if exclusivity is not Exclusivity.SHARED:
        return PPM
    return max(1, vram_bytes * PPM // capacity_bytes)


def check_former(name: str, *, former: bool, returning: bool) -> BadInput | None:
    """None if a tenant of this name may be added."""
    if former and not returning:
        return BadInput(
            f"the name {name} is reserved: a tenant of that name was removed, and its checkpoints, leases, "
            "receipts and journal rows are kept under it",
            remedy="use another name; if it is the same tenant that comes back to what it had: "
            f"'sublet tenant add {name} --returning'",
        )
    if returning and not former:
        return BadInput(f"no tenant {name} was removed, so none can come back")
    return None


def over_quota(tenant: Tenant, need_bytes: int) -> str:
    """'' or why the tenant may not hold this much more now."""
    if tenant.max_leases and tenant.live_leases + 1 > tenant.max_leases:
        return f"tenant {tenant.name} holds {tenant.live_leases} of {tenant.max_leases} leases"
    if tenant.max_vram_bytes and tenant.live_bytes + need_bytes > tenant.max_vram_bytes:
        return (
            f"tenant {tenant.name} holds {tenant.live_bytes} of {tenant.max_vram_bytes} bytes of VRAM "
            f"and asks for {need_bytes} more"
        )
    return ""


def never_within_quota(tenant: Tenant, need_bytes: int) -> bool:
    return bool(tenant.max_vram_bytes) and need_bytes > tenant.max_vram_bytes
