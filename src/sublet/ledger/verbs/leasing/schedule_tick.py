"""Running the schedule: load the view, ask `core.scheduling.schedule.tick`, apply each instruction.

Rules of this file:
- The view is a read. Between it and the lock a lease may have been renewed, so every instruction is checked
  again against the locked row and dropped when it no longer holds (L5).
"""

from __future__ import annotations

from sublet.core.leasing import hosts
from sublet.core.leasing.gang import silent
from sublet.core.leasing.lease import HOLDING, EndReason, Holder, LeaseRecord, LeaseState, changed, overdue
from sublet.core.scheduling import admission, schedule
from sublet.core.scheduling.admission import Grant, Offer
from sublet.core.scheduling.schedule import Drop, End, Instruction, Revoke, Withdraw
from sublet.ledger.rows import LEASE_BY_ID, LEASE_COLUMNS, SELECT_LEASE, lease_of, of_table, slices_of
from sublet.ledger.tx import Tx, write_main
from sublet.ledger.verbs.journal.refusals import sum_up_refusals
from sublet.ledger.verbs.leasing import gangs, late_teardown, leases, waitlist
from sublet.ledger.verbs.leasing.devices import load_hosts
from sublet.machine.failpoints import failpoint
from sublet.ports.ledger import HostView, TickResult


def tick(tx: Tx, host: str) -> TickResult:
    sum_up_refusals(tx)
    known = load_hosts(tx)
    _lose(tx, hosts.losses(known, host, tx.pool.policy, tx.now))
    _give_up(tx, hosts.gone(known, host, tx.pool.policy, tx.now))
    _end_broken_gangs(tx, host, known)
    view = waitlist.load_view(tx, with_leases=True)
    failpoint("reaper_after_read")
    decided = schedule.tick(view, tx.now)
    applied: list[Instruction] = [
        step for step in decided if not isinstance(step, Grant | Offer) and _apply(tx, step)
    ]
    if any(not isinstance(step, Revoke) for step in applied):
        # What was just returned is handed out too, from a view that knows of it.
        view = waitlist.load_view(tx, with_leases=False)
        placements = admission.place(view, tx.now)
    else:
        placements = [step for step in decided if isinstance(step, Grant | Offer)]
    applied += [step for step in placements if _apply(tx, step)]
    if applied:
        view = waitlist.load_view(tx, with_leases=True)
    return TickResult(
        at=tx.now, instructions=tuple(applied), next_look_at=schedule.next_look_at(view, tx.now)
    )


def _apply(tx: Tx, step: Instruction) -> bool:
    if isinstance(step, Grant | Offer):
        return waitlist.apply_placement(tx, step) is not None
    row = tx.locked(LEASE_BY_ID, step.lease_id)
    if row is None:
        return False
    lease = lease_of(row)
    failpoint("reaper_before_write")
    if isinstance(step, End):
        reason = overdue(lease, tx.now)
        if lease.epoch != step.epoch or reason is None:
            return False
        # A lease nobody took up, or one held by name only, has no process to tear down.
        leases.finish(tx, row, reason, step.reason, settled=lease.holder.pid == 0, then_hand_out=False)
        return True
    if isinstance(step, Revoke):
        if lease.epoch != step.epoch or lease.state is not LeaseState.ACTIVE or overdue(lease, tx.now):
            return False
        if step.end_reason is EndReason.IDLE and lease.busy:
            return False  # it began to work between the view and the lock
        leases.begin_revoke(tx, row, step.end_reason, step.reason, step.deadline_at, "schedule")
        return True
    if lease.state is not LeaseState.WAITING:
        return False
    if isinstance(step, Withdraw):
        if lease.slices:
            waitlist.withdraw_offer(tx, lease, step.reason)
        return True
    assert isinstance(step, Drop)
    leases.finish(tx, row, step.end_reason, step.reason, settled=True, then_hand_out=False)
    return True


def _lose(tx: Tx, losses: list[hosts.HostLoss]) -> None:
    for loss in losses:
        lost = tx.run(
            "UPDATE device SET state = 'lost', note = ? WHERE host = ? AND state = 'ready'",
            loss.reason,
            loss.host,
        )
        if lost:
            write_main(tx, "host.lost", "", loss.host, {"devices": lost, "reason": loss.reason})


def _give_up(tx: Tx, gone: list[hosts.Host]) -> None:
    by_name = {host.name: host for host in gone}
    if not by_name:
        return
    for lease in map(
        lease_of, tx.rows(f"{SELECT_LEASE} WHERE settled_at = 0 AND state = 'ended' ORDER BY id")
    ):
        for name in gangs.unsettled_hosts(tx, lease):
            host = by_name.get(name)
            why = hosts.given_up(lease, host, tx.pool.policy, tx.now) if host is not None else ""
            if why:
                leases.settle(tx, lease.id, lease.epoch, late_teardown.receipt(why), name)


def _end_broken_gangs(tx: Tx, own: str, known: list[hosts.Host]) -> None:
    """End gangs with a seat on a silent host: nobody can say whether that member works, and the others cannot
    go on without it. The seat stays taken until its own warden has looked."""
    silence_us = hosts.silence_limit_us(tx.pool.policy)
    heard = {host.name: host for host in known}
    for lease_id, name in tx.rows(
        "SELECT l.id, s.host FROM seat s JOIN lease l ON l.id = s.lease_id "
        "WHERE s.settled_at = 0 AND l.state IN ('active', 'revoking') AND s.host <> ? ORDER BY l.id, s.rank",
        own,
    ):
        if not hosts.silent(heard.get(name), silence_us, tx.now):
            continue
        row = tx.locked(LEASE_BY_ID, lease_id)
        if row is not None and (lease := lease_of(row)).state in HOLDING and not overdue(lease, tx.now):
            why = gangs.why_lost(tx, lease, name, silent(silence_us))
            leases.finish(tx, row, EndReason.DEVICE_LOST, why, settled=False)


def host_view(tx: Tx, host: str, now: int) -> HostView:
    """Read without a lock: the warden acts on it only after a barrier, and every act re-checks."""
    found = tx.rows(f"{SELECT_LEASE} WHERE settled_at = 0 AND host = ? AND seats = 0 ORDER BY id", host)
    return HostView(
        at=now, leases=(*map(lease_of, found), *_seats_here(tx, host), *late_teardown.here(tx, host))
    )


def _seats_here(tx: Tx, host: str) -> list[LeaseRecord]:
    """The gangs this host must enforce, each with the host's own member and slices."""
    found = tx.rows(
        f"SELECT {of_table('l', LEASE_COLUMNS)}, s.slices, s.pid, s.pid_started FROM seat s JOIN lease l ON "
        "l.id = s.lease_id "
        "WHERE s.host = ? AND s.settled_at = 0 ORDER BY l.id",
        host,
    )
    return [
        changed(lease_of(r), slices=slices_of(r[-3]), holder=Holder(host=host, pid=r[-2], started=r[-1]))
        for r in found
    ]
