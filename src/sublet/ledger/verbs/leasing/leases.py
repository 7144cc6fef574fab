"""Holding a lease and taking it back: renew, release, revoke, end, settle.

Rules of this file:
- The pool is locked first, the lease row after it, and the clock is read after both.
- Rules live in `core`. What is here loads records, asks, and writes what the answer says.
- A verb returns an error instead of raising it when the refusal itself must be committed to the journal.
- Slices are kept past the end of a lease until its teardown is settled: nobody gets memory that may still be
  in use.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from sublet.core.billing import meter
from sublet.core.errors import BadInput, LeaseLost, LeaseNotActive, NotFound, SubletError
from sublet.core.journal.chain import StrandEnd, lease_strand
from sublet.core.leasing.lease import (
    HOLDING,
    REVOCABLE_FOR,
    EndReason,
    Holder,
    LeaseEvent,
    LeaseRecord,
    LeaseState,
    Renewed,
    after,
    changed,
    last_active,
    overdue,
)
from sublet.core.leasing.lease import renew as decide_renew
from sublet.core.leasing.lease import seat as decide_seat
from sublet.core.scheduling.device import Slice
from sublet.core.values import format_duration
from sublet.ledger.rows import LEASE_BY_ID, SELECT_LEASE, lease_of, strand_end_of
from sublet.ledger.tx import Row, Tx, write_main, write_strand
from sublet.ledger.verbs.leasing import allowances, gangs, late_teardown, receipts
from sublet.ledger.verbs.leasing import slices as slicing
from sublet.ledger.verbs.leasing.credentials import not_opened, opened, proves, secret_hash
from sublet.ledger.verbs.leasing.waitlist import hand_out
from sublet.ports.bell import SCHEDULE_TOPIC, host_topic
from sublet.ports.ledger import Answer, LeaseKey
from sublet.ports.processes import Receipt


def renew(tx: Tx, key: LeaseKey, busy: bool) -> Answer | SubletError:
    pool = tx.pool
    row = tx.locked(LEASE_BY_ID, key.lease_id)
    now = tx.now
    if row is None or not proves(row, key.secret):
        return not_opened(key.lease_id)
    lease = lease_of(row)
    renewal_budget = allowances.renewal_budget(tx, lease)
    decision = decide_renew(
        lease,
        key.epoch,
        now,
        capped=pool.waiting > 0 or pool.policy.strict_hold,
        payable_us=renewal_budget.payable_us(now) if renewal_budget is not None else None,
    )
    if not isinstance(decision, Renewed):
        write_main(
            tx,
            "lease.renew_refused",
            lease.tenant,
            lease.id,
            {"epoch": key.epoch, "reason": decision.reason},
        )
        error = LeaseLost if lease.state is not LeaseState.REVOKING else LeaseNotActive
        return error(f"lease {lease.id} was not renewed: {decision.reason}")
    if renewal_budget is not None:
        allowances.pay_renewal(tx, renewal_budget, decision.expires_at - lease.expires_at)
    end = write_strand(
        tx,
        lease_strand(lease.id),
        strand_end_of(row),
        "lease.renewed",
        lease.tenant,
        lease.id,
        {"epoch": lease.epoch, "expires_at": decision.expires_at},
    )
    active_at = last_active(lease, busy, now)
    tx.run(
        "UPDATE lease SET expires_at = ?, busy = ?, active_at = ?, claimed = 1, strand_seq = ?, "
        "strand_hash = ? "
        "WHERE id = ? AND epoch = ?",
        decision.expires_at,
        int(busy),
        active_at,
        end.seq,
        end.hash,
        lease.id,
        lease.epoch,
    )
    renewed = changed(lease, expires_at=decision.expires_at, busy=busy, active_at=active_at, claimed=True)
    return Answer(lease=renewed, at=now)


def mark(tx: Tx, key: LeaseKey, busy: bool) -> None:
    changed = tx.run(
        "UPDATE lease SET busy = ?, active_at = ? WHERE id = ? AND epoch = ? AND secret_hash = ? AND state "
        "= 'active'",
        int(busy),
        tx.now,
        key.lease_id,
        key.epoch,
        secret_hash(key.secret),
    )
    if changed and not busy:
        tx.rings.add(SCHEDULE_TOPIC)


def seat(tx: Tx, key: LeaseKey, holder: Holder, address: str = "") -> Answer | SubletError:
    """The pool is locked, because an expiry that settles a lease nobody has seated must not happen at the
    same time."""
    _ = tx.pool
    row = tx.locked(LEASE_BY_ID, key.lease_id)
    if row is None or not proves(row, key.secret):
        return not_opened(key.lease_id)
    lease = lease_of(row)
    if lease.seats:
        return gangs.sit(tx, lease, key.epoch, holder, address)
    marks = ",".join("?" * len(lease.slices))
    found = tx.rows(
        f"SELECT DISTINCT host FROM device WHERE id IN ({marks or 'NULL'})",
        *(s.device_id for s in lease.slices),
    )
    refusal = decide_seat(lease, key.epoch, tx.now, holder, [host for (host,) in found])
    if refusal:
        return LeaseLost(
            f"lease {lease.id} has no place for process {holder.pid} on {holder.host}: {refusal}"
        )
    if lease.holder == holder:
        return Answer(lease=lease, at=tx.now)  # seated before, and the answer was lost
    tx.run(
        "UPDATE lease SET host = ?, pid = ?, pid_started = ? WHERE id = ? AND epoch = ?",
        holder.host,
        holder.pid,
        holder.started,
        lease.id,
        lease.epoch,
    )
    write_main(
        tx,
        "lease.seated",
        lease.tenant,
        lease.id,
        {"epoch": lease.epoch, "host": holder.host, "pid": holder.pid},
    )
    tx.rings.update((host_topic(lease.holder.host), host_topic(holder.host)))
    return Answer(lease=changed(lease, holder=holder), at=tx.now)


def stand_up(tx: Tx, key: LeaseKey, member: Holder, failed: str = "") -> bool | SubletError:
    _ = tx.pool
    row = tx.locked(LEASE_BY_ID, key.lease_id)
    if row is None or not proves(row, key.secret):
        return not_opened(key.lease_id)
    lease = lease_of(row)
    if lease.epoch != key.epoch or lease.state not in HOLDING:
        return False
    if lease.seats:
        stood = gangs.stand_up(tx, lease, member)
    else:
        stood = lease.holder == member
        if stood:  # held by name again, as it was before it was seated
            tx.run("UPDATE lease SET pid = 0, pid_started = 0 WHERE id = ?", lease.id)
            gangs.said(tx, "seat.left", lease, member.host, {"pid": member.pid})
    if stood and failed and overdue(lease, tx.now) is None:
        why = gangs.why_lost(tx, lease, member.host, failed) if lease.seats else failed
        finish(tx, row, EndReason.HOLDER_LOST, why, settled=True)
    return stood


def release(tx: Tx, lease_id: str, secret: str, torn_down: bool = True) -> bool | SubletError:
    _ = tx.pool
    row = opened(tx, lease_id, secret)
    if isinstance(row, NotFound):
        return row
    lease = lease_of(row)
    if lease.state is LeaseState.ENDED:
        return False
    if lease.state is LeaseState.WAITING:
        why, detail = EndReason.RELEASED, "left the waitlist"
    elif (late := overdue(lease, tx.now)) is not None:
        why, detail = late, f"released after it was over{': ' if lease.detail else ''}{lease.detail}"
    elif lease.state is LeaseState.REVOKING:
        why, detail = lease.reason or EndReason.REVOKED, f"drained in time: {lease.detail}"
    else:
        why, detail = EndReason.RELEASED, "released by its holder"
    _close(tx, lease, strand_end_of(row), why, detail, settled=torn_down)
    return True


def finish(
    tx: Tx, row: Row, reason: EndReason, detail: str, *, settled: bool, then_hand_out: bool = True
) -> LeaseRecord:
    """End a lease or leave the waitlist, close its meter, and free its slices if nothing is left to tear
    down. A caller that ends several from one read hands out once, afterwards: a grant in between would make
    that read stale."""
    lease = lease_of(row)
    ended_at, settled_at = _close(
        tx, lease, strand_end_of(row), reason, detail, settled=settled, then_hand_out=then_hand_out
    )
    return replace(
        lease,
        state=LeaseState.ENDED,
        reason=reason,
        detail=detail,
        ended_at=ended_at,
        settled_at=settled_at,
        busy=False,
    )


def _close(
    tx: Tx,
    lease: LeaseRecord,
    strand: StrandEnd,
    reason: EndReason,
    detail: str,
    *,
    settled: bool,
    then_hand_out: bool = True,
) -> tuple[int, int]:
    """Returns when it ended, and when its slices were freed (0: not yet)."""
    now = tx.now
    waiting = lease.state is LeaseState.WAITING
    state = after(lease.state, LeaseEvent.END)
    if lease.seats:  # whoever says so speaks for itself; each member is seen gone by its own host's warden
        settled = gangs.nobody_sits(tx, lease)
    usage = meter.close(lease, reason, now) if lease.granted_at else None
    ended_at = usage.to_at if usage else now
    settled_at = now if settled or waiting else 0
    body: dict[str, object] = {
        "reason": reason.value,
        "detail": detail,
        "epoch": lease.epoch,
        "settled": bool(settled_at),
    }
    if usage is not None:
        body |= {"gpu_us": usage.gpu_us, "strand_seq": strand.seq, "strand_hash": strand.hash}
    write_main(tx, "lease.ended", lease.tenant, lease.id, body)
    tx.run(
        "UPDATE lease SET state = ?, reason = ?, detail = ?, ended_at = ?, settled_at = ?, busy = 0, "
        "offer_until = 0 "
        "WHERE id = ?",
        state.value,
        reason.value,
        detail,
        ended_at,
        settled_at,
        lease.id,
    )
    if usage is not None:
        allowances.settle(tx, lease, ended_at)
    if reason is EndReason.HOLD_CAP:
        tx.run(
            "UPDATE tenant SET cooldown_until = ? WHERE name = ?",
            now + tx.pool.policy.cooldown_us,
            lease.tenant,
        )
    if waiting:
        tx.pool.waiting -= 1
        tx.pool.dirty = True
    if lease.seats:
        gangs.settle_empty(tx, lease, all_of_it=bool(settled_at))
    elif settled_at:
        slicing.vacate(tx, lease, left_waitlist=waiting)
    if (settled_at or lease.seats) and then_hand_out:
        hand_out(tx)
    gangs.ring(tx, lease)
    return ended_at, settled_at


# --- taking back --------------------------------------------------------------------------------------------


def revoke(
    tx: Tx, lease_id: str, reason: EndReason, detail: str, grace_us: int, actor: str
) -> Answer | SubletError:
    if reason not in REVOCABLE_FOR:
        return BadInput(f"a lease cannot be revoked as {reason.value}")
    _ = tx.pool
    row = tx.locked(LEASE_BY_ID, lease_id)
    if row is None:
        return NotFound(f"there is no lease {lease_id[:40]}")
    lease = lease_of(row)
    if lease.state is LeaseState.WAITING:
        ended = finish(tx, row, EndReason.REVOKED, detail, settled=True)
        return Answer(lease=ended, at=tx.now)
    if lease.state is LeaseState.ENDED:
        return LeaseLost(
            f"lease {lease_id} already ended ({lease.reason.value if lease.reason else 'unknown'})",
            remedy="nothing to do",
        )
    late = overdue(lease, tx.now)
    if late is not None:
        # A deadline in the future would let a lease that is over write again (L3).
        ended = finish(tx, row, late, lease.detail or "it was over already", settled=lease.holder.pid == 0)
        return Answer(lease=ended, at=tx.now)
    if tx.again and lease.state is LeaseState.REVOKING and lease.deadline_at <= tx.now + grace_us:
        # The try before this one did it, or a nearer deadline stands: either way a second row would tell of
        # nothing (A1).
        return Answer(lease=lease, at=tx.now)
    return Answer(lease=begin_revoke(tx, row, reason, detail, tx.now + grace_us, actor), at=tx.now)


def begin_revoke(
    tx: Tx, row: Row, reason: EndReason, detail: str, deadline_at: int, actor: str
) -> LeaseRecord:
    lease = lease_of(row)
    state = after(lease.state, LeaseEvent.REVOKE)
    if lease.state is LeaseState.REVOKING and lease.deadline_at <= deadline_at:
        # The nearer deadline stands, and with it the reason the holder has read.
        deadline_at, detail, reason = lease.deadline_at, lease.detail, lease.reason or reason
    tx.run(
        "UPDATE lease SET state = ?, deadline_at = ?, reason = ?, detail = ? WHERE id = ?",
        state.value,
        deadline_at,
        reason.value,
        detail,
        lease.id,
    )
    write_main(
        tx,
        "lease.revoked",
        lease.tenant,
        lease.id,
        {
            "epoch": lease.epoch,
            "reason": reason.value,
            "detail": detail,
            "deadline_at": deadline_at,
            "grace": format_duration(max(0, deadline_at - tx.now)),
            "by": actor,
        },
    )
    gangs.ring(tx, lease)
    return replace(lease, state=state, deadline_at=deadline_at, reason=reason, detail=detail)


def end(tx: Tx, lease_id: str, epoch: int, reason: EndReason, detail: str, host: str = "") -> bool:
    """A warden saw the holder end, or a gang's member on its `host`. A waiter leaves the waitlist."""
    _ = tx.pool
    row = tx.locked(LEASE_BY_ID, lease_id)
    if row is None:
        return False
    lease = lease_of(row)
    if lease.epoch != epoch or (lease.state not in HOLDING and lease.state is not LeaseState.WAITING):
        return False
    late = overdue(lease, tx.now)
    if lease.seats and reason is EndReason.HOLDER_LOST:
        if not gangs.sits(tx, lease, host):
            return False  # it had stood up before it ended
        detail = gangs.why_lost(tx, lease, host, detail)
    elif host and reason is EndReason.HOLDER_LOST and lease.state in HOLDING and not lease.holder.pid:
        return False  # so had this one: it is held by name
    if late is not None:  # it was over anyway: that is why the holder is gone
        reason, detail = late, lease.detail if late is not EndReason.EXPIRED else "its ttl ran out"
    finish(tx, row, reason, detail, settled=False)
    return True


def settle(tx: Tx, lease_id: str, epoch: int, receipt: Receipt, host: str = "") -> bool:
    _ = tx.pool
    row = tx.locked(LEASE_BY_ID, lease_id)
    if row is None:
        return False
    lease = lease_of(row)
    if lease.epoch != epoch or lease.state is not LeaseState.ENDED:
        return False
    left = late_teardown.record_examination(tx, lease, receipt, host or lease.holder.host)
    if left is None:
        left = _settle(tx, lease, receipt, host)
    if left is None:
        return False
    for s in left:
        withhold(
            tx,
            s,
            receipts.withheld_for(lease.id, receipt.detail),
            seen=receipt.ladder != late_teardown.NOBODY_SAW,
        )
    hand_out(tx)
    return True


def _settle(tx: Tx, lease: LeaseRecord, receipt: Receipt, host: str) -> tuple[Slice, ...] | None:
    """Returns the slices that must be withheld; None when it was settled before."""
    if lease.settled_at:
        return None
    slices = lease.slices
    if lease.seats:
        settled = gangs.settle(tx, lease, host, receipt)
        if settled is None:
            return None
        slices = settled[0].slices
    else:
        body: dict[str, object] = asdict(receipt)
        write_main(tx, "lease.settled", lease.tenant, lease.id, body)
        receipts.keep(tx, lease, receipt)
        tx.run("UPDATE lease SET settled_at = ? WHERE id = ?", tx.now, lease.id)
        slicing.vacate(tx, lease)
    return () if receipt.proven else slices


def withhold(tx: Tx, s: Slice, note: str, *, seen: bool) -> None:
    """Withhold the device. A note by somebody who looked (`seen`) replaces an earlier one; another does
    not."""
    beside = "" if seen else " AND state <> 'quarantined'"
    if tx.run(f"UPDATE device SET state = 'quarantined', note = ? WHERE id = ?{beside}", note, s.device_id):
        write_main(tx, "device.quarantined", "", s.device_id, {"reason": note})


def list_leases(tx: Tx, *, live_only: bool, tenant: str, limit: int) -> list[LeaseRecord]:
    where, params = ["1 = 1"], []
    if live_only:
        where.append("settled_at = 0")
    if tenant:
        where.append("tenant = ?")
        params.append(tenant)
    found = tx.rows(
        f"{SELECT_LEASE} WHERE {' AND '.join(where)} ORDER BY joined_at DESC, id LIMIT ?", *params, limit
    )
    return [lease_of(r) for r in found]
