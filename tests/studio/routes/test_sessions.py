"""Sessions over HTTP: what is opened, looked at, waited for, touched and ended, on each engine."""

from __future__ import annotations

import threading
import time

import pytest

from sublet.core.leasing.lease import EndReason
from sublet.core.studio.token import Scope
from tests.homes import wait_until
from tests.ledger.rig import Rig
from tests.studio.running import GIB, Running, add_session, give_lease


def test_a_session_from_open_to_end(studio: Running) -> None:
    token = studio.token("ann")
    made = studio.ask(
        "POST",
        "/v1/sessions",
        token,
        {"vram": "1..2GiB".replace("1..", "1GiB.."), "ttl": "1m", "name": "my work", "checkpoint": "run1"},
    )
    assert made.status == 201, made.body
    session = made.json
    assert made.headers["location"] == f"/v1/sessions/{session['id']}"
    assert (session["status"], session["tenant"], session["name"], session["checkpoint"]) == (
        "opening",
        "ann",
        "my work",
        "run1",
    )
    assert (session["vram_bytes"], session["ttl_seconds"], session["warm_seconds"]) == (2 * GIB, 60.0, 60.0)
    lease = give_lease(studio.ledger, session["id"], "ann")
    active = studio.ask("GET", f"/v1/sessions/{session['id']}", token).json
    assert (active["status"], active["lease_id"], active["devices"]) == ("active", lease, ["node-a-gpu0"])
    assert active["granted_bytes"] == 2 * GIB
    assert 0 < active["seconds_left"] <= 60
    assert active["version"] != session["version"]
    assert [s["id"] for s in studio.ask("GET", "/v1/sessions", token).json["sessions"]] == [session["id"]]
    ended = studio.ask("DELETE", f"/v1/sessions/{session['id']}", token)
    assert (ended.status, ended.json["status"]) == (200, "ended")
    assert (
        studio.ask("DELETE", f"/v1/sessions/{session['id']}", token).json["version"] == ended.json["version"]
    )
    assert studio.ask("GET", "/v1/sessions", token).json["sessions"] == []
    assert studio.ask("GET", "/v1/sessions?open=false", token).json["sessions"][0]["status"] == "ended"


def test_opening_again_with_the_same_id_opens_nothing_twice(studio: Running) -> None:
    token, body = studio.token("ann"), {"vram": "1GB", "id": "S" + "ab" * 10}
    first, second = (studio.ask("POST", "/v1/sessions", token, body) for _ in range(2))
    assert (first.status, second.status) == (201, 201)
    assert first.json["opened_at"] == second.json["opened_at"]
    assert studio.ask("POST", "/v1/sessions", token, {**body, "vram": "2GB"}).status == 422
    # Somebody else cannot find out that the id is taken by whom.
    other = studio.ask("POST", "/v1/sessions", studio.token("bob"), body)
    assert other.status == 422
    assert not {"ann", "ann's"} & set(other.json["message"].split())
    assert studio.ask("POST", "/v1/sessions", token, {"vram": "1GB", "id": "mine"}).status == 422


def test_a_lost_lease_suspends_and_resume_wants_another(studio: Running) -> None:
    token = studio.token("ann")
    session = add_session(studio.ledger, "ann")
    lease = give_lease(studio.ledger, session, "ann")
    assert studio.ask("POST", f"/v1/sessions/{session}/resume", token).status == 409
    studio.ledger.end(
        lease,
        studio.ledger.look(lease).lease.epoch,
        reason=EndReason.HOLDER_LOST,
        detail="the worker is gone",
    )
    found = studio.ask("GET", f"/v1/sessions/{session}", token).json
    assert (found["status"], found["reason"], found["detail"]) == (
        "suspended",
        "holder_lost",
        "the worker is gone",
    )
    assert studio.ask("POST", f"/v1/sessions/{session}/resume", token).json["status"] == "opening"
    assert studio.ask("POST", f"/v1/sessions/{session}/accept", token).status == 409


def test_waiting_tells_the_place_and_why(studio: Running) -> None:
    token = studio.token("ann")
    first = studio.ask("POST", "/v1/sessions", token, {"vram": "80GiB"}).json["id"]
    give_lease(studio.ledger, first, "ann")
    second = studio.ask("POST", "/v1/sessions", token, {"vram": "80GiB"}).json["id"]
    give_lease(studio.ledger, second, "ann")
    found = studio.ask("GET", f"/v1/sessions/{second}", token).json
    assert found["status"] == "waiting"
    assert found["wait"]["position"] == 1
    assert found["wait"]["reason"]
    assert studio.ask("GET", "/v1/waitlist", token).json["waitlist"][0]["position"] == 1


def test_a_long_poll_answers_when_something_changes(studio: Running) -> None:
    token = studio.token("ann")
    session = add_session(studio.ledger, "ann")
    seen = studio.ask("GET", f"/v1/sessions/{session}", token).json
    began = time.monotonic()
    same = studio.ask("GET", f"/v1/sessions/{session}?wait=0.5&version={seen['version']}", token).json
    assert time.monotonic() - began >= 0.5
    assert same["version"] == seen["version"]
    answers: list[dict[str, object]] = []
    waiting = threading.Thread(
        target=lambda: answers.append(
            studio.ask("GET", f"/v1/sessions/{session}?wait=30&version={seen['version']}", token).json
        )
    )
    waiting.start()
    wait_until(lambda: studio.service.streams.count("ann") == 1)
    lease = give_lease(studio.ledger, session, "ann")
    waiting.join(20)
    assert answers[0]["version"] != seen["version"]
    wait_until(lambda: studio.service.streams.count("ann") == 0)
    # What is other than the client knows is told at once.
    now = studio.ask("GET", f"/v1/sessions/{session}?wait=30&version={seen['version']}", token).json
    assert (now["status"], now["lease_id"]) == ("active", lease)


@pytest.mark.parametrize(
    "query", ["wait=-1", "wait=1e9", "wait=", "version=x&wait=1", "surprise=1", "wait=%00"]
)
def test_a_long_poll_of_nonsense_is_refused(studio_here: Running, query: str) -> None:
    session = add_session(studio_here.ledger, _ann(studio_here))
    assert studio_here.ask("GET", f"/v1/sessions/{session}?{query}", studio_here.token("ann")).status == 422


def _ann(studio: Running) -> str:
    studio.token("ann")
    return "ann"


def test_touches_are_written_together(
    studio_here: Running, sqlite: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = studio_here.token("ann")
    sessions = [add_session(studio_here.ledger, "ann") for _ in range(5)]
    written: list[int] = []
    real = studio_here.ledger.touch_sessions
    monkeypatch.setattr(
        studio_here.ledger, "touch_sessions", lambda keys: (written.append(len(keys)), real(keys))[1]
    )
    sqlite.advance(10_000_000)
    for _ in range(10):
        for session in sessions:
            assert studio_here.ask("POST", f"/v1/sessions/{session}/touch", token).status == 200
    wait_until(
        lambda: sqlite.sql("SELECT count(*) FROM studio_session WHERE active_at > opened_at") == [(5,)]
    )
    assert len(written) < 40
    assert sqlite.sql("SELECT count(*) FROM journal WHERE kind LIKE 'session.touch%'") == [(0,)]
    ended = sessions[0]
    studio_here.ledger.end_session(ended, "ann", detail="over", actor="test")
    assert studio_here.ask("POST", f"/v1/sessions/{ended}/touch", token).json["status"] == "ended"


def test_operators_list_all_and_one_tenants(studio_here: Running) -> None:
    mine = add_session(studio_here.ledger, _ann(studio_here))
    studio_here.token("bob")
    other = add_session(studio_here.ledger, "bob")
    operator = studio_here.token("root", Scope.OPERATOR)
    assert {s["id"] for s in studio_here.ask("GET", "/v1/sessions", operator).json["sessions"]} == {
        mine,
        other,
    }
    assert [
        s["id"] for s in studio_here.ask("GET", "/v1/sessions?tenant=bob", operator).json["sessions"]
    ] == [other]


def test_the_dashboard_says_what_is_so(studio: Running) -> None:
    token = studio.token("ann")
    studio.ask("PUT", "/v1/prices", studio.operator, {"device_class": "host", "per_gpu_hour": "3.60"})
    session = add_session(studio.ledger, "ann", name="mine")
    lease = give_lease(studio.ledger, session, "ann")
    dashboard = studio.ask("GET", "/v1/dashboard", token).json
    assert set(dashboard) == {
        "at", "id", "me", "devices", "leases", "sessions", "waitlist", "timeline", "tenants", "jobs", "queues", "quarantine", "receipts",
    }  # fmt: skip
    assert dashboard["me"] == {"tenant": "ann", "scope": "user"}
    assert [x["id"] for x in dashboard["leases"]] == [lease]
    assert dashboard["leases"][0]["session_id"] == session
    assert dashboard["sessions"][0]["usage"]["leases"] == 1
    assert dashboard["timeline"][0]["lease_id"] == lease
    assert dashboard["devices"][0]["leases"][0]["id"] == lease
    assert [t["name"] for t in dashboard["tenants"]] == ["ann"]
    assert "host" not in dashboard["devices"][0]
    full = studio.ask("GET", "/v1/dashboard", studio.operator).json
    assert {t["name"] for t in full["tenants"]} >= {"ann", "operator"}
    assert full["devices"][0]["host"] == "node-a"
    csv = studio.ask("GET", "/v1/usage?by=session&format=csv", token)
    assert csv.headers["content-type"].startswith("text/csv")
    assert csv.body.decode().splitlines()[1].startswith(session)
    assert studio.ask("GET", "/v1/usage?by=tenant", token).json["rows"][0]["key"] == "ann"
    assert studio.ask("GET", "/v1/usage?by=colour", token).status == 422
    assert studio.ask("GET", "/v1/me", token).json["sessions"] == 1


def test_a_formula_is_no_formula_in_a_spreadsheet() -> None:
    from sublet.studio.views.dashboard import _cell

    assert _cell("=1+1") == "'=1+1"
    assert _cell("@x") == "'@x"
    assert (_cell("-"), _cell(3), _cell(None), _cell("ann")) == ("-", 3, "", "ann")
