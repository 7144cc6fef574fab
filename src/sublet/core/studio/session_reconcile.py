"""What a session host has to do for the sessions of its host.

Rules of this file:
- The actions are the difference between what the ledger wants and what the session host holds. None is
  remembered: the same look gives the same actions, so one that was lost is found again.
- A lease that this session host does not hold belongs to one that died. Its worker ends by itself; nothing is
  taken over.
- Somebody whose lease was never granted, or granted to a waiter that had died and so never taken up, has lost
  nothing but a place: it is asked for again without being told to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from sublet.core.leasing.lease import LeaseRecord
from sublet.core.studio.session import OfferAnswer, StudioSession, was_never_taken_up


class ActionKind(Enum):
    OPEN = "open"  # lease number `number`
    RESUME = "resume"  # never granted, and its waiter is gone: want it again
    ANSWER = "answer"  # the user said what to say to offers
    TOUCH = "touch"  # somebody used it
    CLOSE = "close"  # the session ended, or is not ours any more


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedSession:
    """What the session host holds of a session."""

    number: int  # which of its leases
    active_at: int  # the activity it knows of
    answer: OfferAnswer = OfferAnswer.NONE  # to offers, as it was told; it holds for the whole lease


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAction:
    todo: ActionKind
    session_id: str
    number: int = 0
    reason: str = ""


def session_actions(
    looked: Iterable[tuple[StudioSession, LeaseRecord | None]], held: Mapping[str, HostedSession]
) -> list[SessionAction]:
    found: list[SessionAction] = []
    seen: set[str] = set()
    for session, lease in looked:
        seen.add(session.id)
        action = _of(session, lease, held.get(session.id))
        if action is not None:
            found.append(action)
    found += [
        SessionAction(
            todo=ActionKind.CLOSE, session_id=session_id, reason="the ledger does not know it any more"
        )
        for session_id in sorted(set(held) - seen)
    ]
    return found


def _of(
    session: StudioSession, lease: LeaseRecord | None, held: HostedSession | None
) -> SessionAction | None:
    if session.ended_at:
        if held is None:
            return None
        return SessionAction(
            todo=ActionKind.CLOSE, session_id=session.id, reason=session.detail or "the session ended"
        )
    if session.wanted > session.leases:
        return SessionAction(todo=ActionKind.OPEN, session_id=session.id, number=session.leases + 1)
    if held is None or held.number != session.leases:
        if lease is None and session.leases:
            # Bound, and then whoever bound it died before it asked: the same lease is asked for now.
            return SessionAction(todo=ActionKind.OPEN, session_id=session.id, number=session.leases)
        if lease is not None and was_never_taken_up(lease):
            return SessionAction(todo=ActionKind.RESUME, session_id=session.id)
        return None
    if session.answer is not held.answer:
        return SessionAction(todo=ActionKind.ANSWER, session_id=session.id)
    if session.active_at > held.active_at:
        return SessionAction(todo=ActionKind.TOUCH, session_id=session.id)
    return None
