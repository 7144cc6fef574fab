"""The session host's actions: the same look gives the same actions, and doing them leaves none."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, LeaseState, Request
from sublet.core.studio.session import OfferAnswer, StudioSession
from sublet.core.studio.session_reconcile import ActionKind, HostedSession, SessionAction, session_actions

REQUEST = Request(tenant="a", vram_bytes=1 << 30, ttl_us=60_000_000, job="studio/a/x")


def _session(**changes: object) -> StudioSession:
    session = StudioSession(
        id="S" + "0" * 20, tenant="a", request=REQUEST, host="h", warm_us=60_000_000, opened_at=1, active_at=1
    )
    return replace(session, **changes)


def _lease(state: LeaseState, **changes: object) -> LeaseRecord:
    lease = LeaseRecord(id="L1", request=REQUEST, holder=Holder(host="h", pid=1, started=1), state=state)
    return replace(lease, **changes)


def _todo(
    session: StudioSession, lease: LeaseRecord | None, held: HostedSession | None
) -> list[SessionAction]:
    return session_actions([(session, lease)], {session.id: held} if held is not None else {})


def test_a_wanted_lease_is_opened() -> None:
    assert _todo(_session(), None, None) == [
        SessionAction(todo=ActionKind.OPEN, session_id=_session().id, number=1)
    ]
    again = _session(leases=1, wanted=2, lease_id="L1")
    over = _lease(LeaseState.ENDED, granted_at=1, reason=EndReason.REVOKED)
    assert _todo(again, over, HostedSession(number=1, active_at=1))[0].number == 2


def test_one_bound_and_never_asked_for_is_asked_for_now() -> None:
    bound = _session(leases=1, lease_id="L1")
    assert _todo(bound, None, None) == [SessionAction(todo=ActionKind.OPEN, session_id=bound.id, number=1)]
    assert _todo(bound, None, HostedSession(number=1, active_at=1)) == []  # it is being asked for


def test_who_waited_under_a_session_host_that_died_waits_again() -> None:
    waited = _session(leases=1, lease_id="L1")
    gone = _lease(LeaseState.ENDED, reason=EndReason.HOLDER_LOST)
    assert [e.todo for e in _todo(waited, gone, None)] == [ActionKind.RESUME]
    granted_to_the_dead = replace(gone, granted_at=5, claimed=False)
    assert [e.todo for e in _todo(waited, granted_to_the_dead, None)] == [ActionKind.RESUME]
    had_it = replace(gone, granted_at=5, claimed=True)
    assert _todo(waited, had_it, None) == []  # suspended: its user decides


def test_a_live_lease_of_a_session_host_that_died_is_left_to_the_warden() -> None:
    for state in (LeaseState.ACTIVE, LeaseState.REVOKING, LeaseState.WAITING):
        assert _todo(_session(leases=1, lease_id="L1"), _lease(state), None) == []


def test_an_ended_session_is_closed_once() -> None:
    ended = _session(leases=1, lease_id="L1", ended_at=9, detail="its user ended it")
    lease = _lease(LeaseState.ACTIVE, granted_at=1)
    assert [(e.todo, e.reason) for e in _todo(ended, lease, HostedSession(number=1, active_at=1))] == [
        (ActionKind.CLOSE, "its user ended it")
    ]
    assert _todo(ended, lease, None) == []


def test_one_the_ledger_forgot_is_closed() -> None:
    assert [e.todo for e in session_actions([], {"S1": HostedSession(number=1, active_at=1)})] == [
        ActionKind.CLOSE
    ]


def test_an_answer_is_passed_on_once() -> None:
    said = _session(leases=1, lease_id="L1", answer=OfferAnswer.DECLINE)
    held = HostedSession(number=1, active_at=1)
    assert [e.todo for e in _todo(said, _lease(LeaseState.WAITING), held)] == [ActionKind.ANSWER]
    assert _todo(said, _lease(LeaseState.WAITING), replace(held, answer=OfferAnswer.DECLINE)) == []


def test_use_is_passed_on() -> None:
    used = _session(leases=1, lease_id="L1", active_at=50)
    active = _lease(LeaseState.ACTIVE, granted_at=1)
    assert [e.todo for e in _todo(used, active, HostedSession(number=1, active_at=1))] == [ActionKind.TOUCH]
    assert _todo(used, active, HostedSession(number=1, active_at=50)) == []


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_at_most_one_action_each_and_never_for_what_is_done(
    leases: int, more: int, number: int, ended: bool
) -> None:
    session = _session(
        leases=leases, wanted=leases + more, lease_id="L1" if leases else "", ended_at=int(ended)
    )
    found = _todo(
        session,
        _lease(LeaseState.ACTIVE, granted_at=1) if leases else None,
        HostedSession(number=number, active_at=1),
    )
    assert len(found) <= 1
    if found and found[0].todo is ActionKind.OPEN:
        assert not ended
        assert found[0].number == leases + (more > 0)
