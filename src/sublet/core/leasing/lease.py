"""The lease: its states, who may move it, and when a write under it still counts.

Rules of this file:
- The state machine is a table. A transition that is not in it raises and changes nothing.
- Time decides liveness, the epoch decides safety: `fence` asks both, and every durable write asks `fence`.
- An ended lease never lives again (L3), and only `renew` moves an expiry (L4).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from sublet.core.errors import BadInput, InvariantBroken
from sublet.core.replace import copier
from sublet.core.scheduling.device import Exclusivity, Shape, Slice
from sublet.core.scheduling.spread import Spread
from sublet.core.values import DAY_US, MAX_DURATION_US, SECOND_US, format_duration


class LeaseState(Enum):
    WAITING = "waiting"
    ACTIVE = "active"
    REVOKING = "revoking"
    ENDED = "ended"


class LeaseEvent(Enum):
    GRANT = "grant"
    RENEW = "renew"
    REVOKE = "revoke"
    END = "end"


TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.WAITING, LeaseEvent.GRANT): LeaseState.ACTIVE,
    (LeaseState.WAITING, LeaseEvent.END): LeaseState.ENDED,
    (LeaseState.ACTIVE, LeaseEvent.RENEW): LeaseState.ACTIVE,
    (LeaseState.ACTIVE, LeaseEvent.REVOKE): LeaseState.REVOKING,
    (LeaseState.ACTIVE, LeaseEvent.END): LeaseState.ENDED,
    (LeaseState.REVOKING, LeaseEvent.REVOKE): LeaseState.REVOKING,  # a nearer deadline replaces a later one
    (LeaseState.REVOKING, LeaseEvent.END): LeaseState.ENDED,
}

#: States in which a lease owns its slices.
HOLDING = (LeaseState.ACTIVE, LeaseState.REVOKING)


def after(state: LeaseState, event: LeaseEvent) -> LeaseState:
    try:
        return TRANSITIONS[(state, event)]
    except KeyError:
        raise InvariantBroken(f"a lease that is {state.value} cannot {event.value}") from None


class EndReason(Enum):
    """Why a lease ended, in one word; `LeaseRecord.detail` says it in a sentence."""

    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"
    PREEMPTED = "preempted"
    HOLD_CAP = "hold_cap"
    IDLE = "idle"
    QUOTA = "quota"  # the tenant's GPU time of the day is used up
    DEVICE_LOST = "device_lost"
    HOLDER_LOST = "holder_lost"
    REFUSED = "refused"


#: Reasons an operator or the schedule may give when taking a lease back.
REVOCABLE_FOR = (
    EndReason.REVOKED,
    EndReason.PREEMPTED,
    EndReason.HOLD_CAP,
    EndReason.IDLE,
    EndReason.QUOTA,
    EndReason.DEVICE_LOST,
)
#: Ends that are not the doing of whoever works under the lease: taken back, or run out.
TAKEN = (EndReason.EXPIRED, *REVOCABLE_FOR)


class Tier(Enum):
    """Priority class. Rank 0 is served first and preempts the others."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    SPOT = "spot"

    @property
    def rank(self) -> int:
        return _TIER_RANK[self]


_TIER_RANK = {Tier.INTERACTIVE: 0, Tier.BATCH: 1, Tier.SPOT: 2}


def parse_tier(text: str) -> Tier:
    try:
        return Tier(text)
    except ValueError:
        raise BadInput(f"tier {str(text)[:40]!r} is unknown: use interactive, batch or spot") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that owns a lease. `pid` 0 is a lease held by name only, enforced by expiry alone."""

    host: str
    pid: int = 0
    started: int = 0  # the kernel's start tick, so a recycled pid is never mistaken for the holder


MIN_TTL_US = SECOND_US // 10
MAX_TTL_US = 7 * DAY_US
MAX_COUNT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What somebody asks for. Checked here, so every surface refuses the same things with the same words."""

    tenant: str
    vram_bytes: int
    ttl_us: int
    count: int = 1
    least_bytes: int = 0  # a smaller slice, down to this, is taken at once instead of waiting
    wants_offers: bool = False  # a smaller slice is held for a moment while somebody decides
    exclusivity: Exclusivity = Exclusivity.SHARED
    tier: Tier = Tier.INTERACTIVE
    wait_us: int | None = None  # None: as long as it takes; 0: now or never
    hold_cap_us: int | None = None  # None: the policy's cap for the tier; 0: no cap
    host: str = ""  # only devices of this host
    job: str = ""
    spread: Spread = Spread.NO

    def __post_init__(self) -> None:
        if not MIN_TTL_US <= self.ttl_us <= MAX_TTL_US:
            raise BadInput(
                f"ttl {format_duration(self.ttl_us)} is out of range: use "
                f"{format_duration(MIN_TTL_US)} to {format_duration(MAX_TTL_US)}; "
                "a lease is renewed while it works, so 5m is enough"
            )
        if not 1 <= self.count <= MAX_COUNT:
            raise BadInput(f"count {self.count} is out of range: use 1 to {MAX_COUNT}")
        if self.vram_bytes <= 0:
            raise BadInput("vram must be positive: write a size such as 8GB")
        if not 0 <= self.least_bytes <= self.vram_bytes:
            raise BadInput("least must not exceed vram: write the smaller size there")
        if self.wait_us is not None and not 0 <= self.wait_us <= MAX_DURATION_US:
            raise BadInput("wait must be between 0 and a year")
        if self.hold_cap_us is not None and not 0 <= self.hold_cap_us <= MAX_DURATION_US:
            raise BadInput("hold_cap must be between 0 (none) and a year")
        if not isinstance(self.exclusivity, Exclusivity) or not isinstance(self.tier, Tier):
            raise BadInput("exclusivity and tier must be ones this version knows")
        if not isinstance(self.spread, Spread):
            raise BadInput("spread must be one this version knows: no or ok")
        if self.spread is Spread.OK and self.host:
            raise BadInput(f"devices of {self.host} alone are not spread: leave out one of the two")

    def shape(self, vram_bytes: int | None = None) -> Shape:
        return Shape(
            tenant=self.tenant,
            vram_bytes=self.vram_bytes if vram_bytes is None else vram_bytes,
            count=self.count,
            exclusivity=self.exclusivity,
            host=self.host,
            spread=self.spread,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """One row of truth: who holds what until when."""

    id: str
    request: Request
    holder: Holder
    state: LeaseState
    epoch: int = 0
    vram_bytes: int = 0  # per device, as granted; may be less than asked
    slices: tuple[Slice, ...] = ()
    joined_at: int = 0
    granted_at: int = 0
    expires_at: int = 0
    deadline_at: int = 0  # while revoking: when it is fenced and torn down
    ended_at: int = 0
    settled_at: int = 0  # when its slices went back; an ended lease keeps them until then
    reason: EndReason | None = None
    detail: str = ""
    busy: bool = False
    active_at: int = 0  # last moment work was seen
    committed_at: int = 0
    preemptions: int = 0  # how often this job was preempted lately
    claimed: bool = True
    seen_at: int = 0  # last sign of life of a waiter
    wait_until: int = 0
    offer_until: int = 0
    hold_cap_us: int = 0
    seats: int = 0  # of a gang, how many hosts its slices are on; 0: one host

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def holds_slices(self) -> bool:
        return bool(self.slices) and not self.settled_at

    @property
    def ends_at(self) -> int:
        """When the holder loses it unless something changes."""
        if self.state is LeaseState.REVOKING:
            return self.deadline_at
        return self.ended_at if self.state is LeaseState.ENDED else self.expires_at


#: `dataclasses.replace`: renewing must not cost more than deciding to.
changed = copier(LeaseRecord)


def fence(lease: LeaseRecord, epoch: int, now: int) -> str:
    """'' when a write of this epoch counts now, else why it does not (S2)."""
    if lease.epoch != epoch or epoch <= 0:
        return f"epoch {epoch} is not the lease's epoch {lease.epoch}"
    if lease.state is LeaseState.ACTIVE:
        return "" if now < lease.expires_at else "the lease expired"
    if lease.state is LeaseState.REVOKING:
        return "" if now < lease.deadline_at else "the lease was revoked and its grace is over"
    if lease.state is LeaseState.ENDED:
        return f"the lease ended ({lease.reason.value if lease.reason else 'unknown'})"
    return "the lease is not granted yet"


def seat(lease: LeaseRecord, epoch: int, now: int, holder: Holder, hosts: Collection[str]) -> str:
    """'' when the process may take the lease over from the name that asked for it, else why not. `hosts` are
    those of its slices: a holder lives where its devices are, because the warden there is the only one who
    can prove that it is gone."""
    refusal = fence(lease, epoch, now)
    if refusal:
        return refusal
    if lease.holder.pid and lease.holder != holder:
        return f"process {lease.holder.pid} on {lease.holder.host} holds it"
    if holder.pid <= 0:
        return "only a process can be seated"
    if set(hosts) != {holder.host}:
        return f"its devices are on {', '.join(sorted(hosts))}, not on {holder.host}"
    return ""


@dataclass(frozen=True, slots=True)
class Renewed:
    expires_at: int


@dataclass(frozen=True, slots=True)
class NotRenewed:
    reason: str


def renew(
    lease: LeaseRecord, epoch: int, now: int, *, capped: bool, payable_us: int | None = None
) -> Renewed | NotRenewed:
    """L3 and L4. `capped` says whether the hold cap applies now: somebody waits, or the operator is strict.
    `payable_us` is how much further its tenant can pay for it; with nothing left it is not refused, since it
    is paid for until it expires."""
    refusal = fence(lease, epoch, now)
    if refusal:
        return NotRenewed(refusal)
    if lease.state is not LeaseState.ACTIVE:
        return NotRenewed("the lease is being revoked; commit and release before its deadline")
    wanted = now + lease.request.ttl_us
    if capped and lease.hold_cap_us:
        cap = lease.granted_at + lease.hold_cap_us
        if now >= cap:
            return NotRenewed(
                f"it was held for {format_duration(lease.hold_cap_us)}, the most while others wait"
            )
        wanted = min(wanted, cap)
    if payable_us is not None:
        wanted = min(wanted, lease.expires_at + payable_us)
    # A cap that begins to apply never shortens what was already promised.
    return Renewed(max(lease.expires_at, wanted))


def last_active(lease: LeaseRecord, busy: bool, now: int) -> int:
    """Being kept is not being used: a lease that is renewed as idle has been idle since it last worked."""
    return now if busy or lease.busy else lease.active_at


def overdue(lease: LeaseRecord, now: int) -> EndReason | None:
    """What a reaper holding the row's lock may end it for; None means leave it alone (L5)."""
    if lease.state is LeaseState.ACTIVE and now >= lease.expires_at:
        return EndReason.EXPIRED
    if lease.state is LeaseState.REVOKING and now >= lease.deadline_at:
        return lease.reason or EndReason.REVOKED
    return None
