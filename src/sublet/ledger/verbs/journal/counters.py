"""Reading what counters are made of: journal rows after a row, with what each needs of its lease.

Rules of this file:
- A page is one snapshot. The last page says who holds what in that same snapshot, so that a lease is in its
  rows as ended or in that list as held, never in both and never in neither.
- Rows of the main strand are written under the pool's lock: their numbers are in the order of their
  transactions, and a reader who has seen one has seen all before it. Commits have strands of their own. On
  PostgreSQL one may appear below a number that was read already, so those up to there are told again from an
  older row on (`late_after`), and the reader leaves out what it knows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from sublet.core.billing import meter
from sublet.core.billing.price import PriceList
from sublet.core.journal.counters import (
    Declined,
    Granted,
    Happened,
    JobStarted,
    LeaseEnded,
    LiveLease,
    Repeated,
    StepsCommitted,
    TornDown,
    WaiterLeft,
    Withheld,
    Worked,
    WriteRefused,
)
from sublet.core.journal.refusals import SUMMED
from sublet.core.scheduling.device import Slice
from sublet.ledger.rows import LEASE_COLUMNS, SELECT_LEASE, lease_of, slices_of
from sublet.ledger.tx import Row, Tx
from sublet.ledger.verbs.billing import prices
from sublet.ledger.verbs.billing.goodput import compute_us
from sublet.ledger.verbs.studio import sessions
from sublet.ports.ledger import LeaseHistory, MeterPage

_REPEATED = {"step.duplicate": "step", "effect.duplicate": "effect"}
_STOPPED = {"step.refused": "commit", "effect.refused": "reserve", "lease.renew_refused": "renew"}
_KINDS = (
    "lease.granted",
    "lease.ended",
    *_REPEATED,
    *_STOPPED,
    "lease.settled",
    "lease.refused",
    "job.started",
    "session.ended",
    "device.quarantined",
    SUMMED,
)
_MANY = 1_000_000
_TRAINS = "EXISTS (SELECT 1 FROM head WHERE head.job = lease.job)"
#: A whole lease costs four times as much to read, and a service that starts reads every one there ever was.
_LEASE = "tier, job, joined_at, granted_at, ended_at, committed_at, reason, slices"
_MAIN = (
    f"SELECT journal.id, at, kind, journal.tenant, body, subject, {_LEASE}, {_TRAINS} "
    "FROM journal LEFT JOIN lease ON lease.id = journal.subject AND kind IN ('lease.granted', 'lease.ended') "
    f"WHERE journal.id > ? AND strand = 'main' AND kind IN ({', '.join(repr(k) for k in _KINDS)}) "
    f"AND (kind <> '{SUMMED}' OR journal.subject = 'lease.refused') ORDER BY "
    "journal.id LIMIT ?"
)
_COMMITS = (
    "SELECT journal.id, at, journal.tenant, body, effect.outcome, effect.version FROM journal "
    "LEFT JOIN effect ON effect.key = journal.subject AND effect.completed = 1 "
    "WHERE journal.id > ? AND journal.id <= ? AND kind = 'step.committed' ORDER BY journal.id LIMIT ?"
)
_STORED = "SELECT tenant, sum(stored_bytes) FROM head GROUP BY tenant ORDER BY tenant"
_HELD = f"SELECT {LEASE_COLUMNS}, {_TRAINS} FROM lease WHERE settled_at = 0"


def page(tx: Tx, after: int, late_after: int, limit: int) -> MeterPage:
    newest = tx.row("SELECT coalesce(max(id), 0) FROM journal")
    end = max(after, newest[0] if newest else 0)
    main = tx.rows(_MAIN, after, limit)
    commits = tx.rows(_COMMITS, after, end, limit)
    full = [rows[-1][0] for rows in (main, commits) if len(rows) == limit]
    upto: int = min(full) if full else end
    late = tx.rows(_COMMITS, late_after, after, _MANY)
    costs = _Costs(tx)
    happened: list[tuple[int, int, Happened]] = [(row[0], row[1], _of_commit(row)) for row in late]
    happened += [(row[0], row[1], _of_main(row, costs)) for row in main if row[0] <= upto]
    happened += [(row[0], row[1], _of_commit(row)) for row in commits if row[0] <= upto]
    happened.sort(key=lambda found: found[0])
    found = MeterPage(at=tx.now, upto=upto, more=bool(full), happened=tuple(happened))
    if full:
        return found
    stale = tx.row("SELECT coalesce(sum(stale), 0) FROM consumer")
    return replace(
        found,
        held=tuple(_held(r, costs, tx.now) for r in tx.rows(_HELD)),
        stored=tuple((r[0], int(r[1])) for r in tx.rows(_STORED)),
        sessions=tuple(sessions.list_sessions(tx, "", True, _MANY)),
        stale_acks=int(stale[0]) if stale else 0,
    )


class _Costs:
    """What leases cost by the price list, before refunds."""

    def __init__(self, tx: Tx) -> None:
        self._listed = PriceList(prices.list_prices(tx))
        self._classes = prices.classes(tx) if self._listed else {}

    def of(self, slices: Sequence[Slice], tier: str, granted_at: int, gpu_us: int) -> int:
        tariff = self._listed.of(slices, tier, granted_at, self._classes) if self._listed else None
        return tariff.cost(gpu_us) if tariff is not None else 0


def _held(row: Row, costs: _Costs, now: int) -> LiveLease:
    lease = lease_of(row)
    if not lease.granted_at:
        return LiveLease(lease=lease, trains=False)
    cost = costs.of(lease.slices, lease.request.tier.value, lease.granted_at, meter.so_far(lease, now).gpu_us)
    return LiveLease(lease=lease, trains=bool(row[-1]), cost_micro=cost)


def lease_history(tx: Tx, since: int) -> LeaseHistory:
    found = tx.rows(f"{SELECT_LEASE} WHERE state <> 'ended' OR ended_at >= ? ORDER BY joined_at, id", since)
    done = tx.rows(
        "SELECT tenant, sum(calls), sum(errors), sum(launches), sum(checkpoint_bytes) FROM studio_session "
        "WHERE ended_at = 0 OR ended_at >= ? GROUP BY tenant ORDER BY tenant",
        since,
    )
    work = [
        Worked(tenant=r[0], calls=int(r[1]), errors=int(r[2]), launches=int(r[3]), checkpoint_bytes=int(r[4]))
        for r in done
    ]
    return LeaseHistory(at=tx.now, leases=tuple(lease_of(row) for row in found), work=tuple(work))


def _of_main(row: Row, costs: _Costs) -> Happened:
    _, _, kind, tenant, body, subject = row[:6]
    if kind == "lease.granted":
        return _granted(row)
    if kind == "lease.ended":
        return _ended(row, costs)
    if kind == "job.started":
        return JobStarted(job=subject)
    if kind == "device.quarantined":
        return Withheld()
    if kind in _REPEATED:
        return Repeated(what=_REPEATED[kind])
    told = json.loads(body)
    if kind in _STOPPED:
        return WriteRefused(verb=_STOPPED[kind], code=told.get("code", "lease_lost"))
    if kind == "session.ended":
        return Worked(tenant=tenant, **told.get("work", {}))
    if kind == "lease.settled":
        return TornDown(proven=told["proven"], duration_us=told["duration_us"])
    if kind == SUMMED:
        return Declined(code=told["code"], count=told["count"])
    return Declined(code=told["code"])


def _granted(row: Row) -> Granted:
    tenant, lease_id, (tier, _, joined_at, granted_at, _, _, _, slices) = row[3], row[5], row[6:14]
    return Granted(
        lease=lease_id,
        tenant=tenant,
        tier=tier,
        waited_us=max(0, granted_at - joined_at),
        at=granted_at,
        devices=len(slices_of(slices)),
    )


def _ended(row: Row, costs: _Costs) -> LeaseEnded | WaiterLeft:
    tenant, lease_id = row[3], row[5]
    tier, job, _, granted_at, ended_at, committed_at, reason, text, trains = row[6:]
    if not granted_at:
        return WaiterLeft(tier=tier, reason=reason)
    slices = slices_of(text)
    gpu_us, vram_byte_s = meter.amount(ended_at - granted_at, slices)
    usage = meter.Usage(
        lease_id=lease_id,
        tenant=tenant,
        tier=tier,
        job=job,
        from_at=granted_at,
        to_at=ended_at,
        gpu_us=gpu_us,
        vram_byte_s=vram_byte_s,
        reason=reason,
    )
    return LeaseEnded(
        usage=usage,
        devices=len(slices),
        committed_at=committed_at,
        trains=bool(trains),
        cost_micro=costs.of(slices, tier, granted_at, gpu_us),
    )


def _of_commit(row: Row) -> StepsCommitted:
    _, at, tenant, body, outcome, version = row
    told = json.loads(body)
    return StepsCommitted(
        lease=told["lease"],
        tenant=tenant,
        at=at,
        steps=told["step"] - told["first"] + 1,
        compute_us=compute_us(outcome) if version == told["version"] else 0,
    )
