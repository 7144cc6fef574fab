"""Who is above its fair share, without asking every tenant there is.

Rules of this file:
- The sum of what all tenants have used is kept as one number that ages as a whole: each tenant's use, grown
  back to one common instant by the half-life. Read at any moment it is right to within `ERROR_PER_MILLION`,
  which covers the straight lines between the table's points, and two microseconds a tenant for rounding down.
- A tenant is compared with that. Only where the comparison is closer than the error are all tenants asked, so
  the answer is always the one that asking all of them gives; a property test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sublet.core.leasing.tenancy import HALVING, HALVING_PARTS, PPM, Tenant, used_now

#: Straight lines between 64 points of a half-life are off by 15 millionths at most; here two of them meet the
#: one of `decay`.
ERROR_PER_MILLION = 60
#: So many bits behind the point: what was used 62 half-lives ago, the last that `decay` counts, still has 34
#: of them.
POINT = 96
#: After so many half-lives the common instant is moved up. Numbers stay short, and what was used before is
#: forgotten anyway.
REBASE_AFTER = 24
#: As in `decay`.
FORGOTTEN_AFTER = 62


def grown(elapsed_us: int, half_life_us: int) -> int:
    """2^(elapsed / half-life) in `POINT`-bit fixed point; `elapsed_us` may be negative."""
    doublings, rest = divmod(elapsed_us, half_life_us)
    # 2^x = 2 × 2^-(1-x): the table falls, this rises.
    back, within = divmod((half_life_us - rest) * HALVING_PARTS, half_life_us)
    part = HALVING[back] * (half_life_us - within)
    if within:
        part += HALVING[back + 1] * within
    value = (part << POINT - 31) // half_life_us
    return value << doublings if doublings >= 0 else value >> -doublings


class FairShareIndex:
    __slots__ = (
        "_aged",
        "_base",
        "_drift",
        "_half_life_us",
        "_latest",
        "_rate",
        "_tenants",
        "_users",
        "_weight",
    )

    def __init__(self, tenants: Mapping[str, Tenant], half_life_us: int) -> None:
        self._tenants = tenants  # the pool's own, kept by it
        self._half_life_us = half_life_us
        self._rebased(tenants.values())

    def _rebased(self, tenants: Iterable[Tenant]) -> None:
        found = list(tenants)
        self._base = self._latest = max((t.as_of for t in found), default=0)
        self._aged = self._rate = self._drift = self._weight = self._users = 0
        for tenant in found:
            self._count(tenant, 1)

    def _count(self, tenant: Tenant, by: int) -> None:
        self._weight += by * tenant.weight
        self._latest = max(self._latest, tenant.as_of)
        if tenant.used_us > 0:
            self._aged += by * tenant.used_us * grown(tenant.as_of - self._base, self._half_life_us)
            self._users += by
        if tenant.rate_ppm:
            self._rate += by * tenant.rate_ppm
            self._drift += by * tenant.rate_ppm * tenant.as_of

    def change(self, old: Tenant | None, new: Tenant | None) -> None:
        if (
            old is not None
            and new is not None
            and (old.weight, old.used_us, old.rate_ppm, old.as_of)
            == (new.weight, new.used_us, new.rate_ppm, new.as_of)
        ):
            return
        if new is not None and new.as_of - self._base > REBASE_AFTER * self._half_life_us:
            self._rebased(self._tenants.values())
            return
        if old is not None:
            self._count(old, -1)
        if new is not None:
            self._count(new, 1)

    def of(self, tenant: Tenant, now: int) -> tuple[bool, int]:
        """Is it above its share, and its decayed use per weight."""
        used = used_now(tenant, now, self._half_life_us)
        return self._above(tenant, used, now), used * 100 // max(1, tenant.weight)

    def _above(self, tenant: Tenant, used: int, now: int) -> bool:
        mine = used * (self._weight or 1)
        if now < self._latest:  # somebody was counted later than this: its use is not brought back
            return mine > self.exact(now) * tenant.weight
        total = self._total(now)
        slack = abs(total) * ERROR_PER_MILLION // PPM + 2 * self._users + 2 * len(self._tenants) + 4
        if mine > (total + slack) * tenant.weight:
            return True
        if mine <= (total - slack) * tenant.weight:
            return False
        return mine > self.exact(now) * tenant.weight

    def exact(self, now: int) -> int:
        return sum(used_now(t, now, self._half_life_us) for t in self._tenants.values())

    def _total(self, now: int) -> int:
        aged = 0
        if self._aged and now - self._base < FORGOTTEN_AFTER * self._half_life_us:
            aged = self._aged // grown(now - self._base, self._half_life_us)
        return aged + (self._rate * now - self._drift) // PPM
