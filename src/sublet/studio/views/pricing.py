"""What sessions used and cost, as the service shows it: totalled by the ledger, cached for a moment.

Rules of this file:
- Totals are the ledger's, from its lease rows. A session that is looked at repeatedly is totalled every
  `FRESH_SECONDS`.
- Prices come from the price list. Where it has none, no cost is shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sublet.core.billing.price import PriceList, class_of
from sublet.core.leasing.lease import LeaseRecord
from sublet.core.scheduling.preemption_odds import PPM, preempted_ppm
from sublet.core.studio.session import SessionStatus
from sublet.json_shapes import Shape, money, usage_json
from sublet.ports.ledger import SessionAnswer
from sublet.studio.service import Service

FRESH_SECONDS = 2.0
#: How old totals may be where many sessions are shown.
LIST_FRESH_SECONDS = 10.0
KEPT = 20_000
#: The odds of preemption are counted over so many leases of all tenants, this often.
ODDS_LEASES = 500
ODDS_FRESH_SECONDS = 60.0


class Pricing:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._ledger = service.ledger
        self._kept: dict[str, tuple[float, int, Shape]] = {}
        self._list = PriceList([])
        self._classes: dict[str, str] = {}
        self._listed_at = 0.0
        self._lately: list[LeaseRecord] = []
        self._counted_at = float("-inf")

    async def usage_of(self, answer: SessionAnswer) -> Shape:
        session = answer.session
        now = time.monotonic()
        kept = self._kept.get(session.id)
        if kept is not None and now - kept[0] < FRESH_SECONDS and kept[1] == session.leases:
            return kept[2]
        found = await self._service.work(
            lambda: self._ledger.session_usage(tenant=session.tenant, session_id=session.id, limit=1)
        )
        shape = usage_json(found[0]) if found else {}
        self._keep(session.id, session.leases, shape, now)
        return shape

    def usages_now(self, tenant: str, answers: Sequence[SessionAnswer]) -> dict[str, Shape]:
        """The usage of all of them; totalled again only if some are not fresh."""
        now = time.monotonic()
        kept = {a.session.id: self._kept.get(a.session.id) for a in answers}
        leases = {a.session.id: a.session.leases for a in answers}
        if all(
            k is not None and now - k[0] < LIST_FRESH_SECONDS and k[1] == leases[session_id]
            for session_id, k in kept.items()
        ):
            return {session_id: k[2] for session_id, k in kept.items() if k is not None}
        for used in self._ledger.session_usage(tenant=tenant):
            self._keep(used.session_id, leases.get(used.session_id, -1), usage_json(used), now)
        return {a.session.id: k[2] for a in answers if (k := self._kept.get(a.session.id)) is not None}

    def _keep(self, session_id: str, leases: int, shape: Shape, now: float) -> None:
        if len(self._kept) >= KEPT:
            self._kept.clear()
        self._kept[session_id] = (now, leases, shape)

    async def offer_of(self, answer: SessionAnswer) -> Shape | None:
        if answer.status is not SessionStatus.OFFERED or answer.lease is None:
            return None
        await self.refresh()
        return self.offer_now(answer)

    async def refresh(self) -> None:
        if time.monotonic() - self._listed_at > FRESH_SECONDS:
            await self._service.work(self._read)

    def _read(self) -> None:
        self._list = PriceList(self._ledger.prices())
        self._classes = {d.id: class_of(d) for d in self._ledger.devices()}
        self._listed_at = time.monotonic()
        if self._listed_at - self._counted_at > ODDS_FRESH_SECONDS:
            self._counted_at = self._listed_at
            self._lately = [a.lease for a in self._ledger.leases(live_only=False, limit=ODDS_LEASES)]

    def offer_now(self, answer: SessionAnswer) -> Shape | None:
        """The smaller slice that is held: its size, price, odds of preemption, and a sentence about it."""
        lease = answer.lease
        if answer.status is not SessionStatus.OFFERED or lease is None:
            return None
        tier = lease.request.tier.value
        prices = [self._list.at(self._classes.get(s.device_id, ""), tier, answer.at) for s in lease.slices]
        known = [price for price in prices if price is not None]
        odds = preempted_ppm(self._lately, lease.request.tier)
        return {
            "vram_bytes": lease.slices[0].vram_bytes,
            "until": lease.offer_until / 1e6,
            "price_per_hour": money(sum(known)) if len(known) == len(prices) else None,
            "preemption_odds": None if odds is None else odds / PPM,
            "sentence": lease.detail,
        }
