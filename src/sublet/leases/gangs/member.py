"""A gang from within: the lease of several hosts in the hands of a process that is one of its members.

Rules of this file:
- The lease is the gang's: one epoch, one deadline, renewed by whichever member is first. Only its host's seat
  is a member's own.
- All members sit before any of them works: a gang that is not complete has not begun.
- A member that releases it stands up; the gang goes on without it. One that fails, or dies in its seat, ends
  the gang.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from sublet.core.errors import BadInput, LeaseLost
from sublet.core.leasing.gang import Seat
from sublet.core.leasing.lease import HOLDING, Holder, changed
from sublet.leases.gangs.members import VARIABLE, rank_environment
from sublet.leases.lease import Lease, Opener
from sublet.ports.bell import lease_topic
from sublet.ports.clock import Clock
from sublet.ports.ledger import Answer, LeaseKey, Ledger

LOOK_US = 1_000_000


def key_of(ticket: str) -> LeaseKey:
    lease_id, _, rest = ticket.partition(":")
    epoch, _, secret = rest.partition(":")
    if not lease_id or not epoch.isdigit() or not secret:
        raise BadInput(
            "that is not a gang's ticket",
            remedy=f"hand on what lease.ticket says, as it is, e.g. in the environment as {VARIABLE}",
        )
    return LeaseKey(lease_id, int(epoch), secret)


class Member(Lease):
    """The gang's lease in the hands of one of its members."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        key: LeaseKey,
        answer: Answer,
        sent_at: int,
        *,
        me: Holder,
        seats: Sequence[Seat],
        opener: Opener | None = None,
    ) -> None:
        super().__init__(ledger, clock, key.secret, answer, sent_at, opener=opener)
        self._me = me
        self._failed = ""
        self.rank = next(rank for rank, seat in enumerate(seats) if seat.host == me.host)
        self.world = len(seats)
        self._mine = seats[self.rank].slices
        self.environment = {
            **rank_environment(self.rank, self.world, seats[0].address),
            VARIABLE: key.ticket,
        }

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices on this host; the other members have theirs."""
        return tuple(s.device_id for s in self._mine)

    def report(self, *, busy: bool) -> None:
        if busy:  # one member that rests does not make the gang idle
            super().report(busy=True)

    def _give_up_row(self, patience_us: int) -> None:
        """Leave the seat: this process is done. The gang is given back by the process that asked for it."""
        self._ledger.stand_up(self.key, self._me, failed=self._failed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, SystemExit):
            said = " ".join(str(error).split())
            self._failed = f"it failed with {type(error).__name__}: {said}"[:300]
        self.release()


def join(
    ledger: Ledger,
    clock: Clock,
    key: LeaseKey,
    me: Holder,
    address: str,
    *,
    patience_us: int | None = None,
    opener: Opener | None = None,
) -> Member:
    """Sit down on this host's seat, and wait until everybody sits."""
    bell = ledger.bell()
    give_up = None if patience_us is None else clock.monotonic_us() + patience_us
    try:
        bell.listen(lease_topic(key.lease_id))
        ledger.seat(key, me, address=address)
        while True:
            row = ledger.look(key.lease_id).lease
            if row.state not in HOLDING or row.epoch != key.epoch:
                why = f"{row.reason.value}: {row.detail}" if row.reason else row.state.value
                raise LeaseLost(f"gang {key.lease_id} ended before all of its members sat: {why}")
            # A gang granted on one host has no seats: this process is the only member.
            seats = ledger.seats(key.lease_id) or [
                Seat(host=me.host, slices=row.slices, member=row.holder, address=address)
            ]
            if all(seat.member is not None for seat in seats):
                break
            if give_up is not None and clock.monotonic_us() >= give_up:
                missing = ", ".join(seat.host for seat in seats if seat.member is None)
                ledger.stand_up(key, me)
                raise LeaseLost(
                    f"gang {key.lease_id} has no member on {missing} yet",
                    remedy="start one member on each of its hosts",
                )
            bell.wait(LOOK_US)
        sent_at = clock.monotonic_us()
        answer = ledger.renew(key)
        # The row says when the lease ends; this member's part of it is in the seat.
        answer = Answer(lease=changed(answer.lease, holder=me), at=answer.at)
        return Member(ledger, clock, key, answer, sent_at, me=me, seats=seats, opener=opener)
    finally:
        bell.close()
