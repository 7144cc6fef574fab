"""Sessions: what one is follows from its row and its lease's, and each rule changes what it says and nothing
else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.errors import BadInput, Stale, SubletError
from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, LeaseState, Request, fence
from sublet.core.scheduling.device import Slice
from sublet.core.studio import session as rules
from sublet.core.studio.session import OfferAnswer, SessionStatus, StudioSession, status, why

NOW = 1_000
REQUEST = Request(tenant="ada", vram_bytes=8, ttl_us=1_000_000, job="studio/ada/x")
instants = st.sampled_from([0, NOW - 1, NOW, NOW + 1, 2 * NOW])


@st.composite
def sessions(draw: st.DrawFn) -> StudioSession:
    wanted = draw(st.integers(1, 4))
    leases = draw(st.integers(max(0, wanted - 1), wanted))
    return StudioSession(
        id="S" + "0" * 20,
        tenant="ada",
        request=REQUEST,
        host="h",
        warm_us=1,
        wanted=wanted,
        leases=leases,
        lease_id=f"L{leases}" if leases else "",
        answer=draw(st.sampled_from(OfferAnswer)),
        ended_at=draw(st.sampled_from([0, 0, 0, NOW // 2])),
        active_at=draw(instants),
        version=draw(st.integers(1, 9)),
    )


@st.composite
def leases(draw: st.DrawFn) -> LeaseRecord | None:
    if draw(st.booleans()) and draw(st.booleans()):
        return None
    state = draw(st.sampled_from(LeaseState))
    begun = state not in (LeaseState.WAITING, LeaseState.ENDED) or draw(st.booleans())
    return LeaseRecord(
        id="L1",
        request=REQUEST,
        holder=Holder(host="h"),
        state=state,
        epoch=7,
        slices=draw(st.sampled_from([(), (Slice("d", 4),)])),
        granted_at=1 if begun else draw(st.sampled_from([0, 1])),
        claimed=begun,
        expires_at=draw(instants),
        deadline_at=draw(instants),
        offer_until=draw(instants),
        ended_at=NOW // 3 if state is LeaseState.ENDED else 0,
        reason=EndReason.PREEMPTED if state in (LeaseState.ENDED, LeaseState.REVOKING) else None,
        detail="told",
    )


@given(sessions(), leases())
def test_the_status_is_what_the_rows_say(session: StudioSession, lease: LeaseRecord | None) -> None:
    now_is = status(session, lease, NOW)
    assert (now_is is SessionStatus.ENDED) == bool(session.ended_at)
    if session.ended_at:
        return
    over_unserved = lease is not None and lease.state is LeaseState.ENDED and not lease.claimed
    wanted = session.wanted > session.leases
    assert (now_is is SessionStatus.OPENING) == (wanted or lease is None or over_unserved)
    if now_is is SessionStatus.OPENING or lease is None:
        return
    # Active or revoking exactly as long as a write under the lease counts: what a user may compute is what it
    # may save.
    may_write = not fence(lease, lease.epoch, NOW)
    assert (now_is in (SessionStatus.ACTIVE, SessionStatus.REVOKING)) == may_write
    assert (now_is is SessionStatus.REVOKING) == (may_write and lease.state is LeaseState.REVOKING)
    waits = lease.state is LeaseState.WAITING
    assert (now_is in (SessionStatus.WAITING, SessionStatus.OFFERED)) == waits
    assert (now_is is SessionStatus.OFFERED) == (waits and bool(lease.slices) and lease.offer_until > NOW)
    assert (now_is is SessionStatus.SUSPENDED) == (not waits and not may_write)


@given(sessions(), leases(), st.integers(0, 100))
def test_what_is_over_stays_over_as_time_goes_by(
    session: StudioSession, lease: LeaseRecord | None, later: int
) -> None:
    """L3: with unchanged rows a session goes only towards its end."""
    toward = [SessionStatus.ACTIVE, SessionStatus.REVOKING, SessionStatus.SUSPENDED]
    before, after = status(session, lease, NOW), status(session, lease, NOW + later)
    if before in toward:
        assert after in (before, SessionStatus.SUSPENDED)
    elif before is SessionStatus.OFFERED:
        assert after in (before, SessionStatus.WAITING)
    else:
        assert after is before


@given(sessions(), leases())
def test_why_is_told_of_what_is_over_or_about_to_be(
    session: StudioSession, lease: LeaseRecord | None
) -> None:
    reason, detail = why(session, lease, NOW)
    told = status(session, lease, NOW) in (
        SessionStatus.ENDED,
        SessionStatus.SUSPENDED,
        SessionStatus.REVOKING,
    )
    assert bool(reason) == told
    if told and not session.ended_at and lease is not None and lease.reason is EndReason.RELEASED:
        assert reason == "idle"  # it would have ended otherwise
        assert detail.startswith("nobody used it for ")
    if told and not session.ended_at and lease is not None and lease.state is LeaseState.ACTIVE:
        assert (reason, detail) == ("expired", "its ttl ran out")


def test_an_offer_ends_with_its_moment_and_so_does_a_lease() -> None:
    session = StudioSession(
        id="S" + "0" * 20,
        tenant="ada",
        request=REQUEST,
        host="h",
        warm_us=1,
        wanted=1,
        leases=1,
        lease_id="L1",
    )
    waits = LeaseRecord(
        id="L1", request=REQUEST, holder=Holder(host="h"), state=LeaseState.WAITING, slices=(Slice("d", 4),)
    )
    held = replace(waits, state=LeaseState.ACTIVE, epoch=1, granted_at=1)
    leaving = replace(held, state=LeaseState.REVOKING, expires_at=2 * NOW)
    for at, offer, active, revoking in (
        (NOW - 1, SessionStatus.OFFERED, SessionStatus.ACTIVE, SessionStatus.REVOKING),
        (NOW, SessionStatus.WAITING, SessionStatus.SUSPENDED, SessionStatus.SUSPENDED),
    ):
        assert status(session, replace(waits, offer_until=NOW), at) is offer
        assert status(session, replace(waits, offer_until=NOW, slices=()), at) is SessionStatus.WAITING
        assert status(session, replace(held, expires_at=NOW), at) is active
        assert status(session, replace(leaving, deadline_at=NOW), at) is revoking


def _unchanged_but(before: StudioSession, after: StudioSession, *names: str) -> None:
    same = replace(before, **{name: getattr(after, name) for name in (*names, "version")})
    assert after == same
    assert after.version == before.version + (after is not before)


@given(sessions(), leases())
def test_a_resume_wants_one_more_only_of_what_is_suspended(
    session: StudioSession, lease: LeaseRecord | None
) -> None:
    found = rules.resumed(session, lease, NOW)
    now_is = status(session, lease, NOW)
    unserved = now_is is SessionStatus.OPENING and session.wanted == session.leases and lease is not None
    if now_is is SessionStatus.SUSPENDED or unserved:
        assert isinstance(found, StudioSession)
        assert (found.wanted, found.answer) == (session.wanted + 1, OfferAnswer.NONE)
        assert status(found, lease, NOW) is SessionStatus.OPENING
        _unchanged_but(session, found, "wanted", "answer", "active_at")
    elif session.wanted > session.leases and not session.ended_at:
        assert found is session
    else:
        assert isinstance(found, Stale)


@given(sessions(), leases(), st.booleans())
def test_an_answer_is_taken_while_something_is_offered(
    session: StudioSession, lease: LeaseRecord | None, accept: bool
) -> None:
    found = rules.answered(session, lease, accept, NOW)
    if isinstance(found, SubletError):
        assert isinstance(found, Stale)
        assert status(session, lease, NOW) is not SessionStatus.OFFERED
        return
    assert found.answer is (OfferAnswer.ACCEPT if accept else OfferAnswer.DECLINE)
    assert found.active_at >= session.active_at
    _unchanged_but(session, found, "answer", "active_at")
    if found is not session:
        assert status(session, lease, NOW) is SessionStatus.OFFERED


@given(sessions(), st.integers(0, 6), st.sampled_from(["L1", "L2", "L9"]))
def test_the_next_wanted_lease_is_bound_and_no_other(
    session: StudioSession, number: int, lease_id: str
) -> None:
    found = rules.bound(session, number, lease_id)
    if isinstance(found, SubletError):
        assert session.ended_at or number != session.leases + 1 or number > session.wanted
        return
    assert (found.leases, found.lease_id) == (number, lease_id)
    assert found.leases <= found.wanted
    _unchanged_but(session, found, "leases", "lease_id", "answer")
    assert found is session or found.answer is OfferAnswer.NONE


@given(sessions(), leases())
def test_an_end_stands_and_a_restore_leaves_nothing_about_to_begin(
    session: StudioSession, lease: LeaseRecord | None
) -> None:
    over = rules.ended(session, "why", NOW)
    assert status(over, lease, NOW) is SessionStatus.ENDED
    assert rules.ended(over, "again", NOW + 1) is over
    after = rules.restored(session, lease, NOW)
    assert status(after, lease, NOW) is not SessionStatus.OPENING
    assert after.leases == session.leases


def test_what_a_session_saves_under_is_its_tenants() -> None:
    assert rules.job_of("ada", "S1") == "studio/ada/S1"
    assert rules.job_of("ada", "S1", "model") == "studio/ada/model"
    session_id = "S" + "a" * 20

    def opened(**over: object) -> StudioSession:
        wish = {
            "request": replace(REQUEST, job=rules.job_of("ada", session_id)),
            "warm_us": 60_000_000,
            "name": "",
            "checkpoint": "",
            "host": "h",
        }
        return rules.opened(session_id, "ada", **{**wish, **over})  # type: ignore[arg-type]

    assert opened().wanted == 1
    long = "m" * 63
    for wrong in (
        {"request": replace(REQUEST, job="studio/bob/x")},
        {"checkpoint": "model"},  # the job does not say so
        {"checkpoint": "a/b", "request": replace(REQUEST, job="studio/ada/a/b")},
        {"host": "two words"},
        {"name": "\x7f"},
    ):
        with pytest.raises(BadInput):
            opened(**wrong)
    with pytest.raises(BadInput):
        rules.opened(
            session_id,
            long,
            request=replace(REQUEST, tenant=long, job=rules.job_of(long, session_id, long)),
            warm_us=60_000_000,
            name="",
            checkpoint=long,
            host="h",
        )


def test_a_request_that_is_over_unserved_is_not_an_idle_session() -> None:
    """Its session host gave the place in the waitlist back, and says why a moment later."""
    waited = LeaseRecord(
        id="L1",
        request=REQUEST,
        holder=Holder(host="h"),
        state=LeaseState.ENDED,
        ended_at=NOW,
        reason=EndReason.RELEASED,
        claimed=False,
    )
    session = StudioSession(
        id="S" + "0" * 20, tenant="ada", request=REQUEST, host="h", warm_us=1, leases=1, lease_id="L1"
    )
    assert status(session, waited, NOW) is SessionStatus.OPENING
    assert why(session, waited, NOW) == ("", "")
    taken_up = replace(waited, granted_at=1, claimed=True)
    assert why(session, taken_up, NOW)[0] == "idle"
