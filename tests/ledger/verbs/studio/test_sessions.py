"""Studio sessions in the ledger, on both engines: opened, bound, answered, resumed, ended; whose they are; and their caps (T1, T2, A1)."""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sublet.core.errors import BadInput, NotFound, QuotaReached, Stale
from sublet.core.leasing.lease import EndReason, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.session import SessionStatus, job_of
from sublet.ledger.ledger import SqlLedger
from sublet.ledger.verbs.studio import sessions as session_verbs
from sublet.machine import failpoints
from sublet.machine.failpoints import FailpointHit
from sublet.ports.bell import session_topic
from sublet.ports.ledger import Answer, SessionAnswer
from sublet.studio.tokens import new_token
from tests.ledger.rig import HERE, MINUTE, SECOND, Rig


def new_id() -> str:
    return f"S{secrets.token_hex(10)}"


def open_one(
    rig: Rig,
    tenant: str = "ada",
    *,
    session_id: str = "",
    vram: int = 10,
    name: str = "",
    checkpoint: str = "",
    warm_us: int = 5 * MINUTE,
    ledger: SqlLedger | None = None,
    **request: Any,
) -> SessionAnswer:
    session_id = session_id or new_id()
    wanted = Request(
        tenant=tenant,
        vram_bytes=vram,
        job=job_of(tenant, session_id, checkpoint),
        **{"ttl_us": 5 * MINUTE, "host": HERE, **request},
    )
    return (ledger or rig.ledger).open_session(
        session_id, tenant, request=wanted, warm_us=warm_us, host=HERE, name=name, checkpoint=checkpoint
    )


def lease_for(rig: Rig, session: SessionAnswer, **ask: Any) -> Answer:
    """What the session host does: bind the next lease, then ask for it."""
    s = session.session
    lease_id = f"L{secrets.token_hex(8)}"
    rig.ledger.bind_session(s.id, number=s.leases + 1, lease_id=lease_id)
    request = s.request
    return rig.ask(
        request.vram_bytes,
        tenant=s.tenant,
        lease_id=lease_id,
        **{"ttl_us": request.ttl_us, "job": request.job, "wants_offers": request.wants_offers, **ask},
    )


def look(rig: Rig, session: SessionAnswer | str, tenant: str = "ada", **how: Any) -> SessionAnswer:
    session_id = session if isinstance(session, str) else session.session.id
    return rig.ledger.look_session(session_id, tenant, **how)


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.device(gb=80)
    rig.tenant("ada")
    rig.tenant("bob")
    return rig


# --- the way of one ------------------------------------------------------------------------------------------


def test_a_session_goes_from_opening_to_ended_and_every_decision_is_in_the_journal(pool: Rig) -> None:
    made = open_one(pool, name="my notebook", checkpoint="model", vram=30)
    assert made.status is SessionStatus.OPENING
    assert (made.session.wanted, made.session.leases, made.session.version) == (1, 0, 1)
    assert (look(pool, made).session, look(pool, made).lease) == (made.session, None)
    first = lease_for(pool, made)
    now = look(pool, made)
    assert now.status is SessionStatus.ACTIVE
    assert now.lease is not None
    assert now.lease.id == first.lease.id == now.session.lease_id
    pool.ledger.revoke(first.lease.id, reason=EndReason.REVOKED, detail="needed", grace_us=MINUTE, actor="op")
    now = look(pool, made)
    assert (now.status, now.why) == (SessionStatus.REVOKING, ("revoked", "needed"))
    pool.release(first)
    now = look(pool, made)
    assert now.status is SessionStatus.SUSPENDED
    assert now.why[0] == "revoked"
    assert "needed" in now.why[1]
    resumed = pool.ledger.resume_session(made.session.id, "ada")
    assert (resumed.status, resumed.session.wanted) == (SessionStatus.OPENING, 2)
    second = lease_for(pool, resumed)
    assert look(pool, made).status is SessionStatus.ACTIVE
    ended = pool.ledger.end_session(made.session.id, "ada", detail="done", actor="ada")
    assert (ended.status, ended.why) == (SessionStatus.ENDED, ("ended", "done"))
    assert [x.session.id for x in pool.ledger.host_sessions(HERE)] == [
        made.session.id
    ]  # its lease still lives
    pool.release(second)
    assert pool.ledger.host_sessions(HERE) == []
    assert pool.kinds(made.session.id) == [
        "session.opened",
        "session.bound",
        "session.resumed",
        "session.bound",
        "session.ended",
    ]
    rows = pool.sql("SELECT tenant, body FROM journal WHERE subject = ? ORDER BY id", made.session.id)
    assert {tenant for tenant, _ in rows} == {"ada"}
    assert json.loads(rows[0][1])["name"] == "my notebook"
    assert json.loads(rows[-1][1])["detail"] == "done"
    assert pool.faults() == []


def test_each_change_raises_the_version_and_being_used_does_not(pool: Rig) -> None:
    made = open_one(pool)
    lease_for(pool, made)
    before = look(pool, made)
    pool.advance(SECOND)
    pool.ledger.touch_sessions([(made.session.id, "ada")])
    pool.ledger.note_session(made.session.id, calls=2, errors=1, launches=7, checkpoint_bytes=100)
    pool.ledger.note_session(made.session.id, calls=1)
    after = look(pool, made).session
    assert after.active_at >= before.session.active_at + SECOND
    assert (after.calls, after.errors, after.launches, after.checkpoint_bytes) == (3, 1, 7, 100)
    assert after.version == before.session.version == 2


# --- whose it is ---------------------------------------------------------------------------------------------


def test_many_visits_are_looked_up_as_one_by_one_would_be(pool: Rig) -> None:
    """T1: the tenant is the token's, whatever else is asked for in the same statement."""
    mine, theirs = open_one(pool).session.id, open_one(pool, "bob").session.id
    lease_for(pool, look(pool, mine))
    shown = {tenant: new_token() for tenant in ("ada", "bob")}
    for tenant, token in shown.items():
        pool.ledger.add_token(token.id, token.digest, tenant, actor="op")
    over = new_token()
    pool.ledger.add_token(over.id, over.digest, "ada", actor="op")
    pool.ledger.revoke_token(over.id, actor="op")
    named = ["", mine, theirs, new_id(), "S", "a\x00b", "' OR 1 = 1 --"]
    keys = [(t, s) for t in (shown["ada"].id, shown["bob"].id, over.id, new_token().id) for s in named]
    with pool.only_journals():
        visits = pool.ledger.token_and_session(keys)
    for token_id, session_id in keys:
        token = pool.ledger.look_token(token_id)
        if token is None:
            assert (token_id, session_id) not in visits
            continue
        found, session = visits[(token_id, session_id)]
        assert found == token
        owned = {("ada", mine), ("bob", theirs)}
        if (token.tenant, session_id) not in owned:
            assert session is None
            continue
        assert session is not None
        alone = look(pool, session_id, token.tenant)
        assert (session.session, session.lease) == (alone.session, alone.lease)
        assert session.at <= alone.at
    assert visits[(over.id, mine)][0].revoked_at
    assert pool.ledger.token_and_session([]) == {}


def test_another_tenants_session_is_as_absent_as_none(pool: Rig) -> None:
    """T1: for every verb, the same kind and the same words; and nothing is changed or told."""
    theirs, absent = open_one(pool, "bob").session.id, new_id()
    lease_for(pool, look(pool, theirs, "bob"))
    verbs: list[Any] = [
        lambda i: pool.ledger.look_session(i, "ada"),
        lambda i: pool.ledger.look_session(i, "ada", explain=True),
        lambda i: pool.ledger.answer_offer(i, "ada", accept=True),
        lambda i: pool.ledger.resume_session(i, "ada"),
        lambda i: pool.ledger.end_session(i, "ada", detail="mine now", actor="ada"),
    ]
    before = look(pool, theirs, "bob").session
    with pool.only_journals():
        for verb in verbs:
            told = []
            for session_id in (theirs, absent):
                with pytest.raises(NotFound) as refused:
                    verb(session_id)
                error = refused.value
                told.append((type(error), error.message.replace(session_id, "ID"), error.remedy))
            assert told[0] == told[1]
        pool.advance(SECOND)
        pool.ledger.touch_sessions([(theirs, "ada"), (absent, "ada")])
        assert pool.ledger.sessions(tenant="ada", open_only=False) == []
        assert pool.ledger.session_usage(tenant="ada") == []
        assert pool.ledger.session_usage(tenant="ada", session_id=theirs) == []
        for wrong in ("", "S", "a\x00b", theirs + "\n", theirs.lower(), "' OR 1 = 1 --"):
            for verb in verbs:
                with pytest.raises(NotFound, match="of that id"):
                    verb(wrong)
            pool.ledger.touch_sessions([(wrong, "bob")])
    assert look(pool, theirs, "bob").session == before
    assert [x.session.id for x in pool.ledger.sessions(tenant="bob")] == [theirs]
    assert [x.session.id for x in pool.ledger.sessions()] == [theirs]


def test_an_id_that_is_taken_tells_nothing_of_whose_it_is(pool: Rig) -> None:
    mine, theirs = open_one(pool), open_one(pool, "bob")
    told = set()
    with pool.only_journals():
        for taken in (mine, theirs):
            with pytest.raises(BadInput) as refused:
                open_one(pool, session_id=taken.session.id, name="another wish")
            told.add((refused.value.message, refused.value.remedy))
        assert open_one(pool, session_id=mine.session.id).session == mine.session  # asked again for the same
    assert len(told) == 1


def test_what_a_session_may_not_be_is_refused_before_anything_is_written(pool: Rig) -> None:
    token = "sublet_" + "0" * 16 + "_" + "1" * 64
    good = new_id()
    bad: list[dict[str, Any]] = [
        {"session_id": "S123"},
        {"session_id": good.upper()},
        {"name": "two\nlines"},
        {"name": "x" * 81},
        {"name": f"my token {token}"},
        {"checkpoint": "../bob"},
        {"checkpoint": "bob/model"},
        {"warm_us": 0},
        {"warm_us": 400 * 86_400 * SECOND},
    ]
    with pool.only_journals():
        for wrong in bad:
            with pytest.raises(BadInput):
                open_one(pool, **wrong)
        for tenant, job in (("bob", job_of("ada", good)), ("ada", job_of("bob", good)), ("ada", "train")):
            wish = Request(tenant=tenant, vram_bytes=1, ttl_us=MINUTE, job=job)
            with pytest.raises(BadInput):
                pool.ledger.open_session(good, "ada", request=wish, warm_us=MINUTE, host=HERE)
        with pytest.raises(NotFound):
            open_one(pool, "nobody")
        with pytest.raises(BadInput):
            pool.ledger.note_session(good, calls=-1)
        with pytest.raises(BadInput):
            pool.ledger.end_session(good, "ada", detail=token, actor="ada")


# --- caps ----------------------------------------------------------------------------------------------------


def test_the_cap_holds_when_many_open_at_once(pool: Rig) -> None:
    """T2. Ending one makes room for another one; a refusal is in the journal."""
    pool.ledger.set_tenant("ada", max_sessions=3, actor="op")
    outcomes: list[str] = []
    ready = threading.Barrier(8)

    def enter() -> None:
        ledger = pool.open()
        ready.wait()
        for _ in range(3):
            try:
                outcomes.append(open_one(pool, ledger=ledger).session.id)
            except QuotaReached:
                outcomes.append("")

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    made = [session_id for session_id in outcomes if session_id]
    assert (len(made), len(outcomes)) == (3, 24)
    assert {x.session.id for x in pool.ledger.sessions(tenant="ada")} == set(made)
    alone = len(pool.sql("SELECT 1 FROM journal WHERE kind = 'session.refused'"))
    assert pool.sql("SELECT counted, more FROM refusal_tally") == [(alone, 21 - alone)]
    open_one(pool, "bob")  # a cap is one tenant's
    pool.ledger.end_session(made[0], "ada", detail="", actor="ada")
    open_one(pool)
    with pytest.raises(QuotaReached, match="3 of 3 sessions"):
        open_one(pool)
    assert pool.faults() == []


# --- offers, resuming, binding -------------------------------------------------------------------------------


def test_an_offer_is_answered_for_the_session_host_to_act_on(pool: Rig) -> None:
    pool.ask(60)
    made = open_one(pool, "bob", vram=40, wants_offers=True)
    with pytest.raises(Stale):
        pool.ledger.answer_offer(made.session.id, "bob", accept=True)
    offered = lease_for(pool, made)
    assert look(pool, made, "bob").status is SessionStatus.OFFERED
    said = pool.ledger.answer_offer(made.session.id, "bob", accept=False)
    assert said.session.answer.value == "decline"
    said = pool.ledger.answer_offer(made.session.id, "bob", accept=True)  # nobody acted on it yet
    with pool.only_journals():
        assert pool.ledger.answer_offer(made.session.id, "bob", accept=True).session == said.session
    assert (said.session.answer.value, said.status) == ("accept", SessionStatus.OFFERED)
    pool.ledger.accept(offered.lease.id, pool.secret(offered))
    with pool.only_journals():
        assert pool.ledger.answer_offer(made.session.id, "bob", accept=True).status is SessionStatus.ACTIVE
        with pytest.raises(Stale):
            pool.ledger.answer_offer(made.session.id, "bob", accept=False)
    pool.release(offered)
    with pool.only_journals(), pytest.raises(Stale):
        pool.ledger.answer_offer(made.session.id, "bob", accept=True)
    assert pool.ledger.resume_session(made.session.id, "bob").session.answer.value == ""


def test_an_offer_that_lapsed_is_no_offer(pool: Rig) -> None:
    pool.ask(60)
    made = open_one(pool, "bob", vram=40, wants_offers=True)
    lease_for(pool, made)
    pool.advance(pool.ledger.policy().offer_hold_us)
    assert look(pool, made, "bob").status is SessionStatus.WAITING
    with pool.only_journals(), pytest.raises(Stale):
        pool.ledger.answer_offer(made.session.id, "bob", accept=True)


def test_only_what_is_suspended_is_resumed_and_once(pool: Rig) -> None:
    made = open_one(pool)
    with pool.only_journals():
        assert (
            pool.ledger.resume_session(made.session.id, "ada").session.wanted == 1
        )  # it is about to get one
    lease = lease_for(pool, made)
    with pool.only_journals(), pytest.raises(Stale, match="active"):
        pool.ledger.resume_session(made.session.id, "ada")
    pool.release(lease)
    first = pool.ledger.resume_session(made.session.id, "ada")
    with pool.only_journals():
        assert pool.ledger.resume_session(made.session.id, "ada").session == first.session
    assert first.session.wanted == 2
    pool.ledger.end_session(made.session.id, "ada", detail="enough", actor="ada")
    with pool.only_journals():
        with pytest.raises(Stale, match="enough"):
            pool.ledger.resume_session(made.session.id, "ada")
        again = pool.ledger.end_session(made.session.id, "ada", detail="later", actor="ada")
    assert again.session.detail == "enough"


def test_a_lease_that_ran_out_unseen_is_over(pool: Rig) -> None:
    """Nobody has reaped it, and nobody may renew it: the session says so."""
    made = open_one(pool)
    lease_for(pool, made)
    pool.advance(6 * MINUTE)
    now = look(pool, made)
    assert (now.status, now.why) == (SessionStatus.SUSPENDED, ("expired", "its ttl ran out"))
    assert pool.ledger.resume_session(made.session.id, "ada").status is SessionStatus.OPENING


def test_only_the_next_wanted_lease_is_bound(pool: Rig) -> None:
    made, other = open_one(pool), open_one(pool)
    session_id = made.session.id
    with pool.only_journals():
        for number in (0, 2):
            with pytest.raises(Stale):
                pool.ledger.bind_session(session_id, number=number, lease_id="L1")
        with pytest.raises(NotFound):
            pool.ledger.bind_session(new_id(), number=1, lease_id="L1")
        with pytest.raises(BadInput):
            pool.ledger.bind_session(session_id, number=1, lease_id="not a name")
    bound = pool.ledger.bind_session(session_id, number=1, lease_id="L1")
    assert (bound.status, bound.session.lease_id, bound.session.leases) == (SessionStatus.OPENING, "L1", 1)
    with pool.only_journals():
        assert pool.ledger.bind_session(session_id, number=1, lease_id="L1").session == bound.session
        for number, lease_id in ((1, "L2"), (2, "L2")):
            with pytest.raises(Stale):
                pool.ledger.bind_session(session_id, number=number, lease_id=lease_id)
        with pytest.raises(Stale, match="belongs to a session already"):
            pool.ledger.bind_session(other.session.id, number=1, lease_id="L1")
    pool.ledger.end_session(other.session.id, "ada", detail="", actor="ada")
    with pool.only_journals(), pytest.raises(Stale):
        pool.ledger.bind_session(other.session.id, number=1, lease_id="L3")


def test_two_session_hosts_bind_one_lease(pool: Rig) -> None:
    made = open_one(pool)
    outcomes: list[str] = []
    ready = threading.Barrier(4)

    def bind(n: int) -> None:
        ledger = pool.open()
        ready.wait()
        try:
            ledger.bind_session(made.session.id, number=1, lease_id=f"L{n}")
            outcomes.append("bound")
        except Stale:
            outcomes.append("stale")

    threads = [threading.Thread(target=bind, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["bound", "stale", "stale", "stale"]
    assert len(pool.sql("SELECT 1 FROM session_lease")) == 1


def test_where_a_waiting_session_stands_is_told_when_asked(pool: Rig) -> None:
    pool.ask(70)
    made = open_one(pool, "bob", vram=40)
    lease_for(pool, made)
    assert look(pool, made, "bob").wait is None
    explained = look(pool, made, "bob", explain=True)
    assert explained.wait is not None
    assert (explained.status, explained.wait.position) == (SessionStatus.WAITING, 1)
    [listed] = pool.ledger.sessions(tenant="bob")
    assert listed.wait is not None
    assert listed.wait.reason == explained.wait.reason


# --- who hears of it -----------------------------------------------------------------------------------------


def test_every_change_rings_for_the_session_host_of_its_host_and_for_the_stream(pool: Rig) -> None:
    pool.ask(60)
    bells = {topic: pool.ledger.bell() for topic in (session_topic(HERE), "journal", session_topic("node-b"))}
    for topic, bell in bells.items():
        bell.listen(topic)
    for bell in bells.values():
        bell.wait(300_000)  # one that begins to listen may ring once

    def rung() -> list[bool]:
        return [
            bell.wait(1_000_000 if topic != session_topic("node-b") else 0) for topic, bell in bells.items()
        ]

    try:
        made = open_one(pool, vram=40, wants_offers=True)
        assert rung() == [True, True, False]
        lease = lease_for(pool, made)
        assert rung() == [True, True, False]
        pool.ledger.answer_offer(made.session.id, "ada", accept=True)
        assert rung() == [True, True, False]
        pool.release(lease)
        pool.ledger.resume_session(made.session.id, "ada")
        assert rung() == [True, True, False]
        pool.ledger.end_session(made.session.id, "ada", detail="", actor="ada")
        assert rung() == [True, True, False]
    finally:
        for bell in bells.values():
            bell.close()


def test_a_host_sees_its_own_sessions(pool: Rig) -> None:
    here = [open_one(pool).session.id, open_one(pool, "bob").session.id]
    wish = Request(tenant="ada", vram_bytes=1, ttl_us=MINUTE, job=job_of("ada", (elsewhere := new_id())))
    pool.ledger.open_session(elsewhere, "ada", request=wish, warm_us=MINUTE, host="node-b")
    assert {x.session.id for x in pool.ledger.host_sessions(HERE)} == set(here)
    assert [x.session.id for x in pool.ledger.host_sessions("node-b")] == [elsewhere]


# --- being used, and forgotten -------------------------------------------------------------------------------


def test_touching_many_is_one_transaction_and_no_decision(pool: Rig) -> None:
    made = [open_one(pool).session for _ in range(5)]
    pool.ledger.end_session(made[0].id, "ada", detail="", actor="ada")
    over = look(pool, made[0].id).session
    rows = pool.sql("SELECT count(*) FROM journal")
    writes: list[int] = []
    write = pool.ledger.engine.write
    pool.ledger.engine.write = lambda work, **how: writes.append(1) or write(work, **how)  # type: ignore[method-assign,func-returns-value]
    pool.advance(SECOND)
    pool.ledger.touch_sessions([(s.id, "ada") for s in made] * 2)
    pool.ledger.touch_sessions([])
    del pool.ledger.engine.write
    assert writes == [1]
    assert look(pool, made[0].id).session == over
    for session in made[1:]:
        assert look(pool, session.id).session.active_at >= session.active_at + SECOND
    assert pool.sql("SELECT count(*) FROM journal") == rows


def test_what_may_have_been_counted_is_not_counted_twice(pool: Rig) -> None:
    made = open_one(pool)

    def again(tx: Any) -> None:
        tx.again = True
        session_verbs.note(tx, made.session.id, 1, 1, 1, 1)

    pool.ledger.engine.write(again, durable=False)
    assert look(pool, made).session.calls == 0


def test_ended_sessions_are_forgotten_and_their_leases_are_not(pool: Rig) -> None:
    old, live, held = open_one(pool), open_one(pool), open_one(pool)
    lease, other = lease_for(pool, old), lease_for(pool, held)
    for session in (old, held):
        pool.ledger.end_session(session.session.id, "ada", detail="", actor="ada")
    pool.release(lease)
    before = pool.ledger.now()
    assert pool.ledger.drop_sessions(before - 3600 * SECOND) == 0
    pool.advance(SECOND)
    assert pool.ledger.drop_sessions(pool.ledger.now()) == 1  # one is open, one still holds a GPU
    with pytest.raises(NotFound):
        look(pool, old)
    assert {x.session.id for x in pool.ledger.sessions(open_only=False)} == {live.session.id, held.session.id}
    pool.release(other)
    assert pool.ledger.drop_sessions(pool.ledger.now()) == 1
    assert len(pool.ledger.usage(tenant="ada")) == 2
    assert pool.sql("SELECT count(*) FROM session_lease") == [(0,)]
    assert pool.faults() == []


def test_a_tenant_goes_only_without_open_sessions_and_its_successor_sees_none(pool: Rig) -> None:
    made = open_one(pool, "bob")
    with pool.only_journals(), pytest.raises(BadInput, match="session"):
        pool.ledger.remove_tenant("bob", actor="op")
    pool.ledger.end_session(made.session.id, "bob", detail="", actor="op")
    pool.ledger.remove_tenant("bob", actor="op")
    pool.ledger.add_tenant(Tenant(name="bob"), actor="op", returning=True)
    assert pool.ledger.sessions(tenant="bob", open_only=False) == []
    with pytest.raises(NotFound):
        look(pool, made, "bob")


def test_a_restored_ledger_has_its_sessions_suspended(pool: Rig) -> None:
    """Their leases are over; nobody gets a GPU for a wish that is older than the backup."""
    active, resumed, never, bound = (open_one(pool) for _ in range(4))
    lease_for(pool, active)
    pool.release(lease_for(pool, resumed))
    pool.ledger.resume_session(resumed.session.id, "ada")
    pool.ledger.bind_session(bound.session.id, number=1, lease_id="L-bound")
    pool.ledger.mark_restored(actor="op")
    for session in (active, resumed):
        assert look(pool, session).status is SessionStatus.SUSPENDED
    for session in (never, bound):
        assert "backup" in look(pool, session).session.detail
        assert look(pool, session).status is SessionStatus.ENDED
    again = pool.ledger.resume_session(resumed.session.id, "ada")
    assert (again.session.wanted, again.session.leases) == (2, 1)
    assert pool.kinds(resumed.session.id)[-2:] == ["session.suspended", "session.resumed"]
    assert pool.faults() == []


# --- what they used ------------------------------------------------------------------------------------------


def test_a_session_used_what_its_leases_used_at_the_price_of_their_grant(pool: Rig) -> None:
    made = open_one(pool, vram=40, checkpoint="model")
    assert pool.ledger.session_usage(tenant="ada")[0].cost_micro is None
    pool.ledger.set_price("host", 3_600_000, actor="op")  # a millionth a millisecond
    pool.advance(SECOND)
    first = lease_for(pool, made)
    pool.advance(SECOND)
    pool.ledger.set_price("host", 7_200_000, actor="op")
    pool.advance(9 * SECOND)
    pool.release(first)
    resumed = pool.ledger.resume_session(made.session.id, "ada")
    second = pool.look(lease_for(pool, resumed))
    pool.advance(10 * SECOND)
    pool.ledger.note_session(made.session.id, launches=3)
    [used] = pool.ledger.session_usage(session_id=made.session.id, tenant="ada")
    over = pool.look(first)
    spans = [over.ended_at - over.granted_at, used.gpu_us - (over.ended_at - over.granted_at)]
    assert spans[0] >= 10 * SECOND
    assert 10 * SECOND <= spans[1] <= pool.ledger.now() - second.granted_at
    assert (used.leases, used.launches, used.refund_us) == (2, 3, 0)
    assert used.vram_byte_s == sum(40 * span // SECOND for span in spans)
    # The first ran at the old price although the list had changed when it ended.
    assert used.cost_micro == spans[0] // 1000 + spans[1] // 500
    [later] = pool.ledger.session_usage(session_id=made.session.id, tenant="ada", since=second.granted_at)
    assert 10 * SECOND <= later.gpu_us < used.gpu_us - 9 * SECOND
    pool.ledger.remove_price("host", actor="op")
    assert pool.ledger.session_usage(tenant="ada")[0].cost_micro >= used.cost_micro


def test_what_was_taken_back_since_the_last_save_is_refunded(pool: Rig) -> None:
    pool.ledger.set_price("*", 3_600_000, actor="op")
    made = open_one(pool, checkpoint="model")
    job = made.session.request.job
    lease = lease_for(pool, made)
    pool.advance(4 * SECOND)
    pool.commit(lease, 1, job=job)
    pool.advance(6 * SECOND)
    pool.ledger.revoke(lease.lease.id, reason=EndReason.PREEMPTED, detail="x", grace_us=0, actor="op")
    pool.ledger.tick()
    [used] = pool.ledger.session_usage(tenant="ada")
    assert 10 * SECOND <= used.gpu_us < 11 * SECOND
    assert 6 * SECOND <= used.refund_us < 7 * SECOND
    assert used.cost_micro is not None
    assert abs(used.cost_micro - (used.gpu_us - used.refund_us) // 1000) <= 1


# --- faults --------------------------------------------------------------------------------------------------

Verb = Callable[[SqlLedger, str], Any]

VERBS: dict[str, Verb] = {
    "bind": lambda ledger, i: ledger.bind_session(i, number=2, lease_id="L-next"),
    "resume": lambda ledger, i: ledger.resume_session(i, "ada"),
    "end": lambda ledger, i: ledger.end_session(i, "ada", detail="done", actor="ada"),
}
KINDS = {"bind": "session.bound", "resume": "session.resumed", "end": "session.ended"}


def suspended(pool: Rig) -> str:
    made = open_one(pool)
    pool.release(lease_for(pool, made))
    return made.session.id


def happened(pool: Rig, session_id: str, verb: str) -> int:
    """A1: as often in the journal as in the row."""
    told = pool.kinds(session_id).count(KINDS[verb]) - (verb == "bind")
    session = look(pool, session_id).session
    shown = {"bind": session.leases - 1, "resume": session.wanted - 1, "end": int(session.ended_at > 0)}[verb]
    assert told == shown
    if verb == "bind":
        assert len(pool.sql("SELECT 1 FROM session_lease WHERE session_id = ?", session_id)) == session.leases
    return shown


@pytest.mark.parametrize("place", ["before_begin", "before_commit", "after_commit_before_reply"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("way", ["raise", "kill"])
def test_a_verb_happened_once_or_not_at_all(pool: Rig, verb: str, place: str, way: str) -> None:
    session_id = suspended(pool)
    if verb == "bind":
        pool.ledger.resume_session(session_id, "ada")
    if way == "raise":
        failpoints.arm(place, "raise", nth=1)
        with pytest.raises(FailpointHit):
            VERBS[verb](pool.ledger, session_id)
        failpoints.disarm()
    else:
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                failpoints.arm(place, "kill")
                VERBS[verb](pool.ledger, session_id)
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    ledger = pool.open()
    done = int(place == "after_commit_before_reply")
    assert happened(pool, session_id, verb) == done
    for _ in range(2):
        VERBS[verb](ledger, session_id)
    assert happened(pool, session_id, verb) == 1
    assert pool.faults() == []


@pytest.mark.parametrize("place", ["before_commit", "after_commit_before_reply"])
@pytest.mark.parametrize("verb", [*VERBS, "open", "price"])
def test_a_cut_connection_is_not_a_second_change(postgres: Rig, verb: str, place: str) -> None:
    postgres.device(gb=80)
    postgres.tenant("ada", max_sessions=2)
    session_id, opened = suspended(postgres), new_id()
    if verb == "bind":
        postgres.ledger.resume_session(session_id, "ada")
    failpoints.arm(place, "drop", nth=1)
    if verb == "open":
        assert open_one(postgres, session_id=opened).session.id == opened  # the last that the cap allows
        assert postgres.kinds(opened) == ["session.opened"]
    elif verb == "price":
        postgres.ledger.set_price("host", 5, actor="op")
        failpoints.arm(place, "drop", nth=1)
        postgres.ledger.remove_price("host", actor="op")
        assert postgres.kinds("host") == ["price.set", "price.removed"]
    else:
        VERBS[verb](postgres.ledger, session_id)
        failpoints.disarm()
        assert happened(postgres, session_id, verb) == 1
    failpoints.disarm()
    assert postgres.faults() == []
