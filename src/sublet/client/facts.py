"""The studio's answers about sessions and leases, as the records the rest of sublet reads.

Rules of this file:
- Times come as seconds and become whole microseconds; a field that is missing is empty, one of the wrong kind
  is an error.
- Nothing is guessed: a field of a row that the studio leaves out keeps the row's default.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sublet.client.errors import error_from
from sublet.core.errors import BadInput, LeaseLost, SubletError, WaitTimedOut, error_tree
from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, LeaseState, Request, parse_tier
from sublet.core.scheduling.admission import Wait
from sublet.core.scheduling.device import Slice, parse_exclusivity
from sublet.ports.ledger import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StudioOffer:
    """A smaller slice, held for a moment while somebody decides."""

    vram_bytes: int
    until: float  # seconds since 1970, by the studio's clock
    price_per_hour: str = ""
    preemption_odds: float | None = None
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One session, as of one answer."""

    id: str
    tenant: str
    status: str
    version: int
    name: str = ""
    reason: str = ""
    detail: str = ""
    lease_id: str = ""
    epoch: int = 0
    devices: tuple[str, ...] = ()
    host: str = ""
    checkpoint: str = ""
    asked_bytes: int = 0
    granted_bytes: int = 0
    count: int = 1
    tier: str = "interactive"
    ttl_us: int = 0
    warm_us: int = 0
    granted_at: int = 0  # microseconds
    expires_at: float = 0.0
    seconds_left: float = 0.0
    wait: Wait | None = None
    offer: StudioOffer | None = None
    usage: Mapping[str, Any]
    said: Mapping[str, Any]  # the whole answer, as it came

    @property
    def why(self) -> str:
        return ": ".join(filter(None, (self.reason, self.detail))) or self.status


def read_facts(said: Any) -> Facts:
    fields = _mapping(said, "a session")
    wait, offer = fields.get("wait"), fields.get("offer")
    return Facts(
        id=_text(fields, "id"),
        tenant=_text(fields, "tenant"),
        status=_text(fields, "status"),
        version=_int(fields, "version"),
        name=_text(fields, "name"),
        reason=_text(fields, "reason"),
        detail=_text(fields, "detail"),
        lease_id=_text(fields, "lease_id"),
        epoch=_int(fields, "epoch"),
        devices=_names(fields.get("devices")),
        host=_text(fields, "host"),
        checkpoint=_text(fields, "checkpoint"),
        asked_bytes=_int(fields, "vram_bytes"),
        granted_bytes=_int(fields, "granted_bytes"),
        count=_int(fields, "count") or 1,
        tier=_text(fields, "tier") or "interactive",
        ttl_us=_us(fields, "ttl_seconds"),
        warm_us=_us(fields, "warm_seconds"),
        granted_at=_at(fields, "granted_at"),
        expires_at=_number(fields, "expires_at"),
        seconds_left=_number(fields, "seconds_left"),
        wait=None if wait is None else _wait(_mapping(wait, "a wait")),
        offer=None if offer is None else _offer(_mapping(offer, "an offer")),
        usage=_mapping(fields.get("usage") or {}, "usage"),
        said=fields,
    )


def _wait(fields: Mapping[str, Any]) -> Wait:
    eta = fields.get("eta_seconds")
    return Wait(
        position=_int(fields, "position"),
        eta_us=None if eta is None else _us(fields, "eta_seconds"),
        reason=_text(fields, "reason"),
    )


def _offer(fields: Mapping[str, Any]) -> StudioOffer:
    odds = fields.get("preemption_odds")
    price = fields.get("price_per_hour")
    return StudioOffer(
        vram_bytes=_int(fields, "vram_bytes"),
        until=_number(fields, "until"),
        price_per_hour="" if price is None else str(price)[:40],
        preemption_odds=float(odds) if isinstance(odds, int | float) else None,
        sentence=_text(fields, "sentence"),
    )


def ending_of(facts: Facts) -> SubletError:
    """Why a session has no GPU any more, as the exception that would be raised without a studio."""
    if facts.status == "ended":
        code, colon, message = facts.detail.partition(": ")
        if colon and any(known.code == code for known in error_tree()):
            return error_from({"code": code, "message": message})
        return LeaseLost(f"session {facts.id} has ended: {facts.detail or 'no reason was given'}")
    if facts.reason == EndReason.REFUSED.value:
        return WaitTimedOut(f"no GPU became free in time: {facts.detail}")
    return LeaseLost(f"session {facts.id} has no GPU any more ({facts.why})")


# --- rows
# ----------------------------------------------------------------------------------------------------


def offer_as_answer(facts: Facts) -> Answer:
    """What `on_offer` is called with everywhere: the waiting lease, with the slices that are held for it."""
    assert facts.offer is not None
    at = _micro(_number(facts.said, "at") or time.time())
    row = LeaseRecord(
        id=facts.lease_id,
        request=_request(facts.said, facts.tenant, facts.asked_bytes, facts.ttl_us),
        holder=Holder(host=facts.host),
        state=LeaseState.WAITING,
        slices=tuple(
            Slice(device_id=device, vram_bytes=facts.offer.vram_bytes)
            for device in facts.devices or ("",) * facts.count
        ),
        offer_until=_micro(facts.offer.until),
    )
    return Answer(lease=row, at=at, wait=facts.wait)


def read_lease(said: Any) -> Answer:
    """The row of GET /v1/leases/{id}."""
    fields = _mapping(said, "a lease")
    granted_bytes = _int(fields, "vram_bytes") or _int(fields, "granted_bytes")
    reason = None
    if fields.get("reason"):
        with contextlib.suppress(ValueError):
            reason = EndReason(_text(fields, "reason"))
    try:
        state = LeaseState(_text(fields, "state"))
    except ValueError:
        raise BadInput("the studio names a state of a lease that this version does not know") from None
    row = LeaseRecord(
        id=_text(fields, "id"),
        request=_request(
            fields,
            _text(fields, "tenant"),
            _int(fields, "asked_bytes") or granted_bytes,
            _us(fields, "ttl_seconds"),
        ),
        holder=Holder(host=_text(fields, "host")),
        state=state,
        epoch=_int(fields, "epoch"),
        vram_bytes=granted_bytes,
        slices=tuple(
            Slice(device_id=device, vram_bytes=granted_bytes) for device in _names(fields.get("devices"))
        ),
        joined_at=_at(fields, "joined_at"),
        granted_at=_at(fields, "granted_at"),
        expires_at=_at(fields, "expires_at"),
        ended_at=_at(fields, "ended_at"),
        reason=reason,
        detail=_text(fields, "detail"),
    )
    return Answer(lease=row, at=_at(fields, "at"))


def _request(fields: Mapping[str, Any], tenant: str, vram_bytes: int, ttl_us: int) -> Request:
    return Request(
        tenant=tenant,
        vram_bytes=max(1, vram_bytes),
        ttl_us=ttl_us or 300_000_000,
        count=_int(fields, "count") or 1,
        tier=parse_tier(_text(fields, "tier") or "interactive"),
        exclusivity=parse_exclusivity(_text(fields, "exclusivity") or "shared"),
        job=_text(fields, "job"),
    )


# --- fields
# --------------------------------------------------------------------------------------------------


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(what)
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong(name)
    return value


def _int(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name)
    return value


def _number(fields: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(name)
    return float(value)


def _us(fields: Mapping[str, Any], name: str) -> int:
    return _micro(_number(fields, name))


def _at(fields: Mapping[str, Any], name: str) -> int:
    """To the microsecond: a float holds seconds since 1970 finer than that."""
    return _micro(_number(fields, name))


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong("devices")
    return tuple(str(item.get("id", "") if isinstance(item, dict) else item) for item in value)


def _wrong(what: str) -> BadInput:
    return BadInput(
        f"the studio's answer cannot be read: {what} is not what it should be",
        remedy="use one version of sublet on both sides",
    )
