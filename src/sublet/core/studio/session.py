"""A tenant's stay in the studio: what it asked for, what it is now, and what may be done with it.

Rules of this file:
- A session outlives its leases: it is open or ended, and what it is at the moment follows from its own row
  and the row of its current lease. Nothing else is stored, so nothing can disagree with the lease.
- `wanted` counts the leases somebody wanted, `leases` those that were begun. The next one is begun when there
  are fewer than wanted.
- Every rule answers with an error to raise, or with the session as it is afterwards; the same object when
  nothing changes.
- `version` rises with every change of what the session is, not when it was merely used: whoever watches it is
  not woken by that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from sublet.core.errors import BadInput, QuotaReached, Stale, SubletError
from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState, Request, overdue
from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.token import check_no_token
from sublet.core.values import MAX_DURATION_US, SECOND_US, check_job, check_name, format_duration

ID_BYTES = 10
NAME_CHARACTERS = 80
DETAIL_CHARACTERS = 500

_ID = re.compile(rf"S[0-9a-f]{{{2 * ID_BYTES}}}")


class SessionStatus(Enum):
    OPENING = "opening"  # a lease is wanted and not asked for yet
    WAITING = "waiting"
    OFFERED = "offered"  # a smaller slice is held until somebody says yes or no
    ACTIVE = "active"
    REVOKING = "revoking"
    SUSPENDED = "suspended"  # its lease is over; a resume gives it another one
    ENDED = "ended"


class OfferAnswer(Enum):
    """What was said to the offer of the current lease."""

    NONE = ""
    ACCEPT = "accept"
    DECLINE = "decline"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudioSession:
    id: str
    tenant: str
    request: Request  # of every lease it gets
    host: str  # whose session host holds its leases
    warm_us: int  # unused for so long, its lease is given back
    name: str = ""
    checkpoint: str = ""
    lease_id: str = ""  # the current or the last one
    leases: int = 0  # how many it had
    wanted: int = 1  # how many were wanted
    answer: OfferAnswer = OfferAnswer.NONE
    opened_at: int = 0
    active_at: int = 0  # last used
    ended_at: int = 0  # 0: it is open
    detail: str = ""  # why it ended
    calls: int = 0
    errors: int = 0
    launches: int = 0
    checkpoint_bytes: int = 0
    version: int = 1


def was_never_taken_up(lease: LeaseRecord) -> bool:
    """Whether the request is over before it began: refused, timed out, or granted to a dead waiter."""
    return lease.state is LeaseState.ENDED and not (lease.granted_at and lease.claimed)


def status(session: StudioSession, lease: LeaseRecord | None, now: int) -> SessionStatus:
    """`lease` is the row of the session's current lease, None while there is none. When its request is over
    before it began, the session host ends the session a moment later, or asks again: it is opening until
    then."""
    if session.ended_at:
        return SessionStatus.ENDED
    if session.wanted > session.leases or lease is None or was_never_taken_up(lease):
        return SessionStatus.OPENING
    if lease.state is LeaseState.WAITING:
        return SessionStatus.OFFERED if lease.slices and now < lease.offer_until else SessionStatus.WAITING
    if lease.state is LeaseState.ENDED or overdue(lease, now) is not None:
        return SessionStatus.SUSPENDED  # over by its clock is over, whoever has noticed (L3)
    return SessionStatus.ACTIVE if lease.state is LeaseState.ACTIVE else SessionStatus.REVOKING


def why(session: StudioSession, lease: LeaseRecord | None, now: int) -> tuple[str, str]:
    """The reason and detail why a session is or soon will be inactive, or ('', '')."""
    now_is = status(session, lease, now)
    if now_is is SessionStatus.ENDED:
        return "ended", session.detail
    if lease is None or now_is not in (SessionStatus.SUSPENDED, SessionStatus.REVOKING):
        return "", ""
    late = overdue(lease, now) if lease.state is LeaseState.ACTIVE else None
    if late is not None:
        return late.value, "its ttl ran out"
    if lease.reason is EndReason.RELEASED:
        # A session that goes on gives its lease back for one reason only.
        return EndReason.IDLE.value, f"nobody used it for {format_duration(session.warm_us)}"
    return lease.reason.value if lease.reason else "", lease.detail


# --- what is accepted ---


def is_id(text: str) -> bool:
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def check_id(text: str) -> str:
    if not is_id(text):
        raise BadInput(f"that is not a session's id: S and {2 * ID_BYTES} hexadecimal digits")
    return text


def check_detail(text: str) -> str:
    if not isinstance(text, str) or len(text) > DETAIL_CHARACTERS or not text.isprintable():
        raise BadInput(f"a reason is one line of at most {DETAIL_CHARACTERS} printable characters")
    return check_no_token(text, what="a reason")


def job_of(tenant: str, session_id: str, checkpoint: str = "") -> str:
    """What a session saves under. A tenant's name has no slash, so those of two tenants never meet (T1)."""
    return f"studio/{tenant}/{checkpoint or session_id}"


def opened(
    session_id: str,
    tenant: str,
    *,
    request: Request,
    warm_us: int,
    name: str,
    checkpoint: str,
    host: str,
) -> StudioSession:
    """The session as it begins, its times not yet set, or `BadInput`."""
    check_id(session_id)
    check_name(tenant, what="tenant")
    check_name(host, what="host")
    if request.host:
        check_name(request.host, what="host")
    if checkpoint:
        check_name(checkpoint, what="checkpoint")
    if not isinstance(name, str) or len(name) > NAME_CHARACTERS or not name.isprintable():
        raise BadInput(f"a session's name is one line of at most {NAME_CHARACTERS} printable characters")
    check_no_token(name, what="a session's name")
    if not SECOND_US <= warm_us <= MAX_DURATION_US:
        raise BadInput("warm is how long an unused session keeps its GPU: write 1s to a year, 5m is usual")
    check_job(request.job)
    if request.tenant != tenant or request.job != job_of(tenant, session_id, checkpoint):
        raise BadInput("a session leases for its own tenant and saves under its own name")
    return StudioSession(
        id=session_id,
        tenant=tenant,
        request=request,
        host=host,
        warm_us=warm_us,
        name=name,
        checkpoint=checkpoint,
    )


def same_wish(known: StudioSession, asked: StudioSession) -> bool:
    """Whether the caller asks again for the one it opened before."""

    def wish(s: StudioSession) -> tuple[object, ...]:
        return (s.id, s.tenant, s.request, s.host, s.warm_us, s.name, s.checkpoint)

    return wish(known) == wish(asked)


def over_sessions(tenant: Tenant, open_sessions: int) -> QuotaReached | None:
    if not tenant.max_sessions or open_sessions < tenant.max_sessions:
        return None
    return QuotaReached(
        f"tenant {tenant.name} has {open_sessions} of {tenant.max_sessions} sessions open",
        remedy="end one that is not needed, or ask the operator for a larger quota",
    )


# --- rules ---


def _is_over(session: StudioSession) -> Stale:
    return Stale(
        f"session {session.id} has ended{': ' if session.detail else ''}{session.detail}",
        remedy="open a new one; what it saved under its checkpoint name is still there",
    )


def answered(
    session: StudioSession, lease: LeaseRecord | None, accept: bool, now: int
) -> StudioSession | SubletError:
    said = OfferAnswer.ACCEPT if accept else OfferAnswer.DECLINE
    if session.ended_at:
        return _is_over(session)
    now_is = status(session, lease, now)
    if session.answer is said and now_is not in (SessionStatus.OPENING, SessionStatus.SUSPENDED):
        return session  # said before, and the answer to it was lost
    if now_is is not SessionStatus.OFFERED:
        return Stale(
            f"nothing is offered to session {session.id}: it keeps its place if it still waits",
            remedy="look at its status; a new offer may come",
        )
    return _changed(session, now, answer=said)


def resumed(session: StudioSession, lease: LeaseRecord | None, now: int) -> StudioSession | SubletError:
    if session.ended_at:
        return _is_over(session)
    if session.wanted > session.leases:
        return session  # wanted already
    now_is = status(session, lease, now)
    if now_is is not SessionStatus.SUSPENDED and not (lease and was_never_taken_up(lease)):
        return Stale(
            f"session {session.id} is {now_is.value}: there is nothing to resume",
            remedy="use it, or wait for it",
        )
    return _changed(session, now, wanted=session.wanted + 1, answer=OfferAnswer.NONE)


def ended(session: StudioSession, detail: str, now: int) -> StudioSession:
    if session.ended_at:
        return session
    return replace(session, ended_at=now, detail=detail, version=session.version + 1)


def restored(session: StudioSession, lease: LeaseRecord | None, now: int) -> StudioSession:
    """The session after a backup was restored: nobody waits for its next lease any more, and one that had no
    lease is over."""
    if status(session, lease, now) is not SessionStatus.OPENING:
        return session
    if lease is None:
        return ended(session, "the ledger was restored from a backup before it had a GPU", now)
    return replace(session, wanted=session.leases, version=session.version + 1)


def bound(session: StudioSession, number: int, lease_id: str) -> StudioSession | SubletError:
    """The session host is about to ask for this lease."""
    if (session.leases, session.lease_id) == (number, lease_id):
        return session  # bound before, and the answer was lost
    if session.ended_at:
        return _is_over(session)
    if not (number == session.leases + 1 <= session.wanted):
        return Stale(
            f"lease {number} is not the next one of session {session.id}: it had {session.leases} of "
            f"{session.wanted} wanted",
            remedy="look at the session again: somebody else holds its lease, or nobody wants another one",
        )
    return replace(
        session,
        leases=number,
        lease_id=lease_id,
        answer=OfferAnswer.NONE,
        version=session.version + 1,
    )


def _changed(session: StudioSession, now: int, **changes: object) -> StudioSession:
    """Somebody did something with it: it is used as of now."""
    active_at = max(now, session.active_at)
    version = session.version + 1
    return replace(session, active_at=active_at, version=version, **changes)  # type: ignore[arg-type]
