"""A gang: one lease whose slices are on several hosts. One epoch, one deadline, one fence; on each host a
seat.

Rules of this file:
- A seat is one host's part of the lease: its slices, and the member process that uses them there. Only the
  warden of that host can prove that the member is gone, so each seat is settled by itself; the lease is
  settled when all of them are.
- All or none holds to the end: where one seat is lost the others cannot go on, and the whole lease is ended.
  The reason names the seat.
- A seat nobody has taken has nothing to tear down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sublet.core.leasing.lease import Holder, LeaseRecord, fence
from sublet.core.scheduling.device import Slice
from sublet.core.values import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    host: str
    slices: tuple[Slice, ...]
    member: Holder | None = None  # None: nobody sits there
    address: str = ""  # host:port at which the member says it can be met
    settled_at: int = 0


def seats_of(slices: Sequence[Slice], hosts: Mapping[str, str]) -> tuple[Seat, ...]:
    """The seats of a grant in the order of ranks: that of the first slice on each host. `hosts` are those of
    the devices."""
    parts: dict[str, list[Slice]] = {}
    for s in slices:
        parts.setdefault(hosts[s.device_id], []).append(s)
    return tuple(Seat(host=host, slices=tuple(part)) for host, part in parts.items())


def take_seat(lease: LeaseRecord, seats: Iterable[Seat], epoch: int, now: int, member: Holder) -> str:
    """'' when the process may sit down on its host's seat, else why not."""
    refusal = fence(lease, epoch, now)
    if refusal:
        return refusal
    if member.pid <= 0:
        return "only a process can be seated"
    known = list(seats)
    mine = next((s for s in known if s.host == member.host), None)
    if mine is None:
        return f"its devices are on {', '.join(s.host for s in known)}, not on {member.host}"
    if mine.member is not None and mine.member != member:
        return f"process {mine.member.pid} sits there already"
    return ""


def at_once(seats: Iterable[Seat]) -> tuple[Seat, ...]:
    """Seats whose slices go back at the moment the lease ends."""
    return tuple(s for s in seats if s.member is None and not s.settled_at)


def still_held(seats: Iterable[Seat]) -> tuple[Slice, ...]:
    """The slices that are not back yet."""
    return tuple(part for s in seats if not s.settled_at for part in s.slices)


def seat_lost(host: str, rank: int, seats: int, what: str) -> str:
    """Why the whole gang ends, in the words of every end for such a reason."""
    return f"its member on {host} (rank {rank} of {seats}) is lost: {what}"


def silent(silence_us: int) -> str:
    return f"the warden there has said nothing for {format_duration(silence_us)}"
