"""Where a notebook's GPUs come from: this machine, or a studio.

Rules of this file:
- What the magics need of either, and nothing that one of them alone could do. Nothing else asks which it is.
- Everything that costs time is made when it is first needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sublet import under_lease
from sublet.borrowing import ensure_tenant, local_gpu, studio_of
from sublet.core.errors import SubletError
from sublet.core.tenancy import used_now
from sublet.ports.held import HeldLease
from sublet.ports.ledger import Answer
from sublet.runtime.acquire import OnOffer, OnWait
from sublet.runtime.cell_keep import Store
from sublet.runtime.cell_wish import Wish
from sublet.runtime.holding import WATCHDOG_US
from sublet.settings import Settings
from sublet.wiring import checkpoints, ensure_warden, open_ledger, opening_of, placement, workers

if TYPE_CHECKING:
    from sublet.remote.studio import Studio


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What the tenant may use, and uses. 0 of a limit: none."""

    tenant: str
    weight: int
    live_leases: int
    max_leases: int
    live_bytes: int
    max_vram_bytes: int
    waiting: int
    max_waiting: int
    used_us: int
    half_life_us: int  # 0: not told
    cooling_us: int
    per_day_us: int = 0
    left_us: int = 0
    full_at: int = 0


class Place(Protocol):
    def warm_up(self) -> None:
        """Behind the user's back: the first cell then finds everything ready. May raise anything."""

    def take(self, wish: Wish, job: str, on_wait: OnWait, on_offer: OnOffer | None) -> HeldLease: ...
    def look(self, lease_id: str, *, patience_us: int | None = None) -> Answer: ...
    def store(self) -> Store: ...
    def version(self, job: str) -> int:
        """Of what is kept under this name."""

    def quota(self, lease: HeldLease | None) -> Quota: ...


def place_of(settings: Settings) -> Place:
    return StudioPlace(settings) if settings["url"] else ThisMachine(settings)


def _words(wish: Wish) -> dict[str, Any]:
    return {
        "count": wish.count,
        "exclusivity": wish.exclusivity,
        "tier": wish.tier,
        "wait": wish.wait or None,
        "least": wish.least or None,
        "tenant": wish.tenant or None,
    }


class ThisMachine:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def warm_up(self) -> None:
        open_ledger(self._settings)
        ensure_warden(self._settings, wait=False)
        placed = placement(self._settings)
        if placed is not None:
            placed.ready()
        else:
            workers(self._settings).warm()

    def take(self, wish: Wish, job: str, on_wait: OnWait, on_offer: OnOffer | None) -> HeldLease:
        asked = local_gpu(
            wish.vram,
            wish.ttl,
            **_words(wish),
            job=job,
            holder="worker",
            on_wait=on_wait,
            on_offer=on_offer,
            settings=self._settings,
            placed=placement(self._settings),
        )
        lease = asked._keep()
        openings = [opening_of(self._settings, lease, i, WATCHDOG_US) for i in range(len(lease.devices))]
        lease.run(under_lease.move_in, openings)
        return lease

    def look(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
        return open_ledger(self._settings).look(lease_id, patience_us=patience_us)

    def store(self) -> Store:
        return checkpoints(settings=self._settings)

    def version(self, job: str) -> int:
        head = open_ledger(self._settings).head(job)
        return head.version if head is not None else 0

    def quota(self, lease: HeldLease | None) -> Quota:
        ledger = open_ledger(self._settings)
        name = lease.tenant if lease is not None else self._settings["tenant"]
        ensure_tenant(self._settings, ledger, name)
        tenant, policy, now = ledger.tenant(name), ledger.policy(), ledger.now()
        time = ledger.allowance(name) if tenant.gpu_us_per_day else None
        return Quota(
            tenant=name,
            weight=tenant.weight,
            live_leases=tenant.live_leases,
            max_leases=tenant.max_leases,
            live_bytes=tenant.live_bytes,
            max_vram_bytes=tenant.max_vram_bytes,
            waiting=tenant.waiting,
            max_waiting=tenant.max_waiting or policy.tenant_waiting_max,
            used_us=used_now(tenant, now, policy.half_life_us),
            half_life_us=policy.half_life_us,
            cooling_us=max(0, tenant.cooldown_until - now),
            per_day_us=time.per_day_us if time else 0,
            left_us=time.left_us if time else 0,
            full_at=time.full_at if time else 0,
        )


class StudioPlace:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @functools.cached_property
    def studio(self) -> Studio:
        return studio_of(self._settings)

    def warm_up(self) -> None:
        with contextlib.suppress(SubletError):
            self.studio.me()

    def take(self, wish: Wish, job: str, on_wait: OnWait, on_offer: OnOffer | None) -> HeldLease:
        asked = self.studio.gpu(
            wish.vram, wish.ttl, **_words(wish), job=job, on_wait=on_wait, on_offer=on_offer
        )
        return asked.acquire()

    def look(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
        return self.studio.look_lease(lease_id, patience_us=patience_us)

    def store(self) -> Store:
        return self.studio.store()

    def version(self, job: str) -> int:
        """The studio saves under its own lease and knows which is next."""
        return 0

    def quota(self, lease: HeldLease | None) -> Quota:
        me = self.studio.me()
        quotas, time = _table(me.get("quotas")), _table(me.get("allowance"))
        now = _us(me.get("at"))
        return Quota(
            tenant=str(me.get("tenant", "")),
            weight=int(me.get("weight") or 0),
            live_leases=int(me.get("live") or 0),
            max_leases=int(quotas.get("max_leases") or 0),
            live_bytes=int(me.get("live_bytes") or 0),
            max_vram_bytes=int(quotas.get("max_vram_bytes") or 0),
            waiting=int(me.get("waiting") or 0),
            max_waiting=int(quotas.get("max_waiting") or 0),
            used_us=_us(me.get("recent_gpu_seconds")),
            half_life_us=_us(me.get("half_life_seconds")),
            cooling_us=max(0, _us(me.get("cooldown_until")) - now) if now else 0,
            per_day_us=_us(time.get("per_day_seconds")),
            left_us=_us(time.get("left_seconds")),
            full_at=_us(time.get("full_at")),
        )


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _us(seconds: Any) -> int:
    return round(float(seconds or 0) * 1e6)


#: What `Workbench` is made with; another one in tests.
MakesPlace = Callable[[Settings], Place]
