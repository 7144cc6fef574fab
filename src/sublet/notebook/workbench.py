"""What a notebook's magics work with: its settings, its lease, what it keeps, and where its GPUs come from.

Rules of this file:
- There is one per kernel, created when the extension is loaded. Everything that costs time is created when
  first needed, or warmed up during the user's first cells.
- GPUs come from this machine or from a studio (`GpuSource`). Nothing else asks which it is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import threading
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sublet.core.errors import SubletError
from sublet.core.leasing.tenancy import used_now
from sublet.functions.on_gpu import disabled
from sublet.leases import current
from sublet.leases.acquire import OnOffer, OnWait
from sublet.leases.lease import WATCHDOG_US
from sublet.leases.request import ensure_tenant, local_gpu, studio_of
from sublet.leases.sessions import opening_of
from sublet.leases.warden.warden_process import ensure_warden
from sublet.notebook.cells import inside_cell
from sublet.notebook.cells.keep import KeepStore, KeptState
from sublet.notebook.cells.notebook_lease import CellOutcome, CellSource, NotebookLease
from sublet.notebook.options import CellOptions
from sublet.notebook.screen import Frontend, WaitDisplay
from sublet.ports.held_lease import HeldLease
from sublet.ports.ledger import Answer
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, checkpoints, open_ledger, placement, workers

if TYPE_CHECKING:
    from sublet.client.studio import Studio


class Workbench:
    def __init__(self, front: Frontend) -> None:
        self._front = front
        kept = KeptState(_job_name(front), lambda: self.place.store(), lambda job: self.place.version(job))
        self.cells = NotebookLease(self._take, self._look, CLOCK, kept, inside_cell.run)
        atexit.register(self.close)

    @functools.cached_property
    def settings(self) -> Settings:
        return load_settings()

    @functools.cached_property
    def place(self) -> GpuSource:
        """The source of GPUs: this machine, or the studio that SUBLET_URL named when the first cell ran."""
        return gpu_source(self.settings)

    def runs_in_process(self) -> bool:
        return disabled()

    def warm_up(self) -> None:
        """Prepares ledger, warden and worker, or the studio, in the background for the first cell."""

        def warm() -> None:
            with contextlib.suppress(SubletError, OSError):
                self.place.warm_up()

        if not self.runs_in_process():
            threading.Thread(target=warm, name="sublet-warms-up", daemon=True).start()

    def run(self, wish: CellOptions, source: CellSource, space: MutableMapping[str, Any]) -> CellOutcome:
        return self.cells.run(wish, source, space, self._front)

    def release(self) -> HeldLease | None:
        lease = self.cells.lease
        self.cells.release()
        return lease

    def restore(self, space: dict[str, Any], job: str) -> tuple[str, ...]:
        return self.cells.kept.restore(space, job)

    def quota(self) -> TenantQuota:
        """The tenant's quota and usage."""
        return self.place.quota(self.cells.lease)

    def _look(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
        return self.place.look(lease_id, patience_us=patience_us)

    def _take(self, wish: CellOptions) -> HeldLease:
        waiting = WaitDisplay(self._front)
        asks = self._front.can_ask() and not wish.gpu.least
        try:
            return self.place.take(wish, self.cells.kept.job, waiting, waiting.offered if asks else None)
        finally:
            waiting.over()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.cells.release()
            self.cells.kept.close()


def _job_name(front: Frontend) -> str:
    """The name of this kernel's checkpoints: the notebook's, made unique to this kernel."""
    space = front.shell.user_ns
    path = os.environ.get("JPY_SESSION_NAME") or str(space.get("__vsc_ipynb_file__", "")) or front.kind
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).stem)[:40].strip("-._") or "notebook"
    return f"{stem}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """What the tenant may use, and uses. A limit of 0 means none."""

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


class GpuSource(Protocol):
    def warm_up(self) -> None:
        """Prepares everything for the first cell, in the background. May raise anything."""

    def take(self, wish: CellOptions, job: str, on_wait: OnWait, on_offer: OnOffer | None) -> HeldLease: ...
    def look(self, lease_id: str, *, patience_us: int | None = None) -> Answer: ...
    def store(self) -> KeepStore: ...
    def version(self, job: str) -> int:
        """The version of the checkpoint of this name."""

    def quota(self, lease: HeldLease | None) -> TenantQuota: ...


def gpu_source(settings: Settings) -> GpuSource:
    return StudioGpuSource(settings) if settings["url"] else LocalGpuSource(settings)


class LocalGpuSource:
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

    def take(self, wish: CellOptions, job: str, on_wait: OnWait, on_offer: OnOffer | None) -> HeldLease:
        asked = local_gpu(
            replace(wish.gpu, job=job, holder="worker"),
            on_wait=on_wait,
            on_offer=on_offer,
            settings=self._settings,
            placed=placement(self._settings),
        )
        lease = asked.hold()
        openings = [opening_of(self._settings, lease, i, WATCHDOG_US) for i in range(len(lease.devices))]
        lease.run(current.set_openings, openings)
        return lease

    def look(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
        return open_ledger(self._settings).look(lease_id, patience_us=patience_us)

    def store(self) -> KeepStore:
        return checkpoints(settings=self._settings)

    def version(self, job: str) -> int:
        head = open_ledger(self._settings).head(job)
        return head.version if head is not None else 0

    def quota(self, lease: HeldLease | None) -> TenantQuota:
        ledger = open_ledger(self._settings)
        name = lease.tenant if lease is not None else self._settings["tenant"]
        ensure_tenant(self._settings, ledger, name)
        tenant, policy, now = ledger.tenant(name), ledger.policy(), ledger.now()
        time = ledger.allowance(name) if tenant.gpu_us_per_day else None
        return TenantQuota(
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


class StudioGpuSource:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @functools.cached_property
    def studio(self) -> Studio:
        return studio_of(self._settings)

    def warm_up(self) -> None:
        with contextlib.suppress(SubletError):
            self.studio.me()

    def take(self, wish: CellOptions, job: str, on_wait: OnWait, on_offer: OnOffer | None) -> HeldLease:
        asked = self.studio.lease(replace(wish.gpu, job=job), on_wait=on_wait, on_offer=on_offer)
        return asked.acquire()

    def look(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
        return self.studio.look_lease(lease_id, patience_us=patience_us)

    def store(self) -> KeepStore:
        return self.studio.store()

    def version(self, job: str) -> int:
        """Always 0: the studio saves under its own lease and knows the next version."""
        return 0

    def quota(self, lease: HeldLease | None) -> TenantQuota:
        me = self.studio.me()
        quotas, time = _table(me.get("quotas")), _table(me.get("allowance"))
        now = _us(me.get("at"))
        return TenantQuota(
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
