"""Calls through the service: with a real session host and real workers; and with one that is wrong in ways a
real one is not."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.errors import BadInput, LeaseLost, SubletError, WorkerLost
from sublet.core.studio import frames
from sublet.settings import load_settings
from sublet.studio import service as studio_service
from sublet.studio.edge import relay as relays
from sublet.studio.edge.relay import AnswerEnd, FrameFollower, SessionHostRelay, failure
from sublet.studio.holder import finding
from tests.homes import wait_until
from tests.ledger.rig import Rig
from tests.studio.conftest import HostedSessions
from tests.studio.running import WIDE, Running, Unattended, add_session, running, settings_of

FRAMES = {"Content-Type": "application/x-sublet-frames"}


@pytest.fixture
def house(hosted_here: HostedSessions) -> Iterator[Running]:
    """A service in front of a real session host."""
    settings = hosted_here.settings
    with running(hosted_here.ledger, settings, WIDE, relay=SessionHostRelay(settings)) as found:
        yield found


def active(house: Running, token: str, **wish: Any) -> str:
    made = house.ask("POST", "/v1/sessions", token, {"vram": "1GiB", "ttl": "1m", **wish})
    assert made.status == 201, made.body
    session = str(made.json["id"])
    wait_until(lambda: house.ask("GET", f"/v1/sessions/{session}", token).json["status"] == "active", 30)
    return session


def lines(said: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line != b'{"kind":"beat"}']


def test_code_runs_and_says_what_it_says(house: Running) -> None:
    token = house.token("ann")
    session = active(house, token)
    run = f"/v1/sessions/{session}/run"
    said = house.ask(
        "POST",
        run,
        token,
        {"code": "import sys\nprint('hello')\nprint('there', file=sys.stderr)\nx = 40\nx + 2"},
    )
    assert said.status == 200
    assert said.headers["content-type"] == "application/x-ndjson"
    found = lines(said.body)
    assert {"kind": "text", "stream": "stdout", "text": "hello\n"} in found
    assert {"kind": "text", "stream": "stderr", "text": "there\n"} in found
    results = [x for x in found if x["kind"] == "result"]
    assert results[0]["data"]["text/plain"] == "42"
    assert found[-1]["kind"] == "done"
    assert found[-1]["ok"] is True
    # What it left is there for the next.
    assert "40" in house.ask("POST", run, token, {"code": "print(x)"}).body.decode()
    wrong = lines(house.ask("POST", run, token, {"code": "1/0"}).body)
    errors = [x for x in wrong if x["kind"] == "error"]
    assert errors[0]["name"] == "ZeroDivisionError"
    assert "ZeroDivisionError" in errors[0]["traceback"]
    assert (wrong[-1]["kind"], wrong[-1]["ok"]) == ("done", False)
    wait_until(lambda: house.ask("GET", f"/v1/sessions/{session}", token).json["usage"]["calls"] == 3)
    assert house.service.streams.count() == 0


def test_a_call_is_followed_again_and_run_once(house: Running, tmp_path: Path) -> None:
    token = house.token("ann")
    session = active(house, token)
    code = "import time\nprint('begun', flush=True)\ntime.sleep(1.5)\nprint('over')"
    body = frames.head_frame(frames.HEAD, {"target": "code", "parts": 1}) + frames.frame(
        frames.PART, json.dumps({"code": code, "name": "x"}).encode()
    )
    with house.connect() as sock:
        head = f"POST /v1/sessions/{session}/calls?call=c1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        seen = b""
        while b"begun" not in seen:
            seen += sock.recv(65536)
    # Its client is gone; the call goes on, and whoever asks with the same id hears the whole of it.
    said = house.ask("POST", f"/v1/sessions/{session}/calls?call=c1", token, raw=b"", headers=FRAMES)
    heard = frames.FrameReader(frames.ANSWER_KINDS).feed(said.body)
    assert b"".join(p for k, p in heard if k == frames.OUT) == b"begun\nover\n"
    assert [k for k, _ in heard if k == frames.DONE] == [frames.DONE]
    after = len(frames.frame(frames.OUT, b"begun\n"))
    rest = house.ask(
        "POST", f"/v1/sessions/{session}/calls?call=c1&after={after}", token, raw=b"", headers=FRAMES
    )
    assert said.body.endswith(rest.body)
    wait_until(lambda: house.ask("GET", f"/v1/sessions/{session}", token).json["usage"]["calls"] == 1)


def test_interrupt_stops_what_runs_and_the_session_stays(house: Running) -> None:
    token = house.token("ann")
    session = active(house, token)
    said: list[bytes] = []
    code = {
        "code": "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.05)",
        "call": "forever",
    }
    running_one = threading.Thread(
        target=lambda: said.append(house.ask("POST", f"/v1/sessions/{session}/run", token, code).body)
    )
    running_one.start()
    path = f"/v1/sessions/{session}/interrupt"
    wait_until(lambda: house.ask("POST", path, token, {"call": "forever"}).status == 200)
    running_one.join(20)
    assert [x["name"] for x in lines(said[0]) if x["kind"] == "error"] == ["KeyboardInterrupt"]
    assert house.ask("POST", path, token).status == 409
    assert b"3" in house.ask("POST", f"/v1/sessions/{session}/run", token, {"code": "1+2"}).body


def test_bodies_that_wait_have_a_room_for_each_tenant_and_leave_it(
    house: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio_service, "BODIES_MOST_BYTES", 16 << 20)
    token = house.token("ann")
    path = f"/v1/sessions/{active(house, token)}/calls?call="
    large = frames.frame(frames.PART, b"x" * (30 << 20))
    for number in range(2):
        refused = house.ask("POST", f"{path}c{number}", token, raw=large, headers=FRAMES)
        assert (refused.status, refused.code) == (413, "too_large")
        assert "16MiB waiting" in refused.body.decode()
    gc.collect()
    fits = frames.frame(frames.PART, b"x" * (10 << 20))
    said = house.ask("POST", f"{path}fits", token, raw=fits, headers=FRAMES)
    assert said.status == 200  # read and passed on: what it says is the call's
    assert house.service.room_of("ann").used == 0


def test_states_are_saved_and_loaded_as_they_came(house: Running) -> None:
    token, other = house.token("ann"), house.token("bob")
    session = active(house, token, checkpoint="run1")
    state = f"/v1/sessions/{session}/state"
    assert house.ask("GET", state, token).status == 404
    data = os.urandom(300_000)
    saved = house.ask("PUT", state, token, raw=data, headers={"Content-Type": "application/octet-stream"})
    assert saved.status == 200, saved.body
    assert saved.json["version"] == 1
    assert house.ask("GET", state, token).body == data
    house.ask("PUT", state, token, raw=b"second", headers={"Content-Type": "application/octet-stream"})
    assert house.ask("GET", f"{state}?version=1", token).body == data
    listed = house.ask("GET", "/v1/checkpoints", token).json["checkpoints"]
    assert [(c["name"], c["version"]) for c in listed] == [("run1", 2)]
    assert house.ask("GET", "/v1/checkpoints/run1", token).body == b"second"
    for name in ("run1", "..%2fann%2frun1", "nothing", "%00"):
        assert house.ask("GET", f"/v1/checkpoints/{name}", other).status == 404
    assert house.ask("GET", "/v1/checkpoints", other).json == {"checkpoints": []}


def test_a_session_that_lost_its_gpu_says_so(house: Running) -> None:
    token = house.token("ann")
    session = active(house, token)
    lease = house.ask("GET", f"/v1/sessions/{session}", token).json["lease_id"]
    house.ask("POST", f"/v1/leases/{lease}/revoke", house.operator, {"reason": "noon", "grace": "0s"})
    wait_until(lambda: house.ask("GET", f"/v1/sessions/{session}", token).json["status"] == "suspended", 30)
    said = house.ask("POST", f"/v1/sessions/{session}/run", token, {"code": "1"})
    assert (said.status, said.code) == (410, "lease_lost")
    assert "noon" in said.json["message"] + house.ask("GET", f"/v1/sessions/{session}", token).json["detail"]


def test_a_session_of_another_host_is_elsewhere(studio_here: Running) -> None:
    studio_here.token("ann")
    session = add_session(studio_here.ledger, "ann", host="node-b")
    said = studio_here.ask("POST", f"/v1/sessions/{session}/run", studio_here.token("ann"), {"code": "1"})
    assert (said.status, said.code) == (421, "elsewhere")
    assert "node-b" in said.json["message"]
    assert studio_here.ask("GET", f"/v1/sessions/{session}", studio_here.token("ann")).status == 200


# --- frames that are wrong ---


@pytest.mark.parametrize(
    "body",
    [
        b"x" * 40,
        frames.frame(frames.PART, b"abc")[:-1],
        frames.head_frame(frames.HEAD, {"parts": 2}) + frames.frame(frames.PART, b"one"),
        frames.head_frame(frames.HEAD, {"parts": 0}) + frames.frame(frames.PART, b"one"),
        frames.HEADER.pack(frames.PART, 1 << 63),
        frames.HEADER.pack(frames.HEAD, 1 << 40),
        frames.frame(frames.HEAD, b"[1]"),
        frames.frame(frames.HEAD, b"\xff"),
        frames.head_frame(frames.HEAD, {"target": 7}),
        frames.frame(frames.OUT, b"hi"),
    ],
)
def test_frames_that_are_wrong_begin_nothing(house: Running, body: bytes) -> None:
    token = house.token("ann")
    session = house.ask("POST", "/v1/sessions", token, {"vram": "1GiB"}).json["id"]
    said = house.ask("POST", f"/v1/sessions/{session}/calls?call=c1", token, raw=body, headers=FRAMES)
    assert said.status in (400, 404, 410, 413, 422), said.body
    assert house.ask("GET", f"/v1/sessions/{session}", token).json["usage"]["calls"] == 0


def test_a_head_cannot_name_another_session_or_tenant(house: Running) -> None:
    ann, bob = house.token("ann"), house.token("bob")
    theirs, mine = active(house, ann), active(house, bob)
    head = {"op": "interrupt", "session": theirs, "tenant": "ann", "call": "x", "target": "code", "parts": 1}
    body = frames.head_frame(frames.HEAD, head) + frames.frame(
        frames.PART, b'{"code":"print(\'here\')","name":"x"}'
    )
    said = house.ask("POST", f"/v1/sessions/{mine}/calls?call=c1", bob, raw=body, headers=FRAMES)
    assert said.status == 200
    wait_until(lambda: house.ask("GET", f"/v1/sessions/{mine}", bob).json["usage"]["calls"] == 1)
    assert house.ask("GET", f"/v1/sessions/{theirs}", ann).json["usage"]["calls"] == 0


@given(
    st.lists(st.tuples(st.sampled_from([frames.OUT, frames.SHOW, frames.BEAT]), st.binary(max_size=50))),
    st.integers(0, 3),
    st.data(),
)
def test_the_end_is_seen_however_the_bytes_are_cut(
    before: list[tuple[int, bytes]], parts: int, data: st.DataObject
) -> None:
    stream = b"".join(frames.frame(k, b"" if k == frames.BEAT else p) for k, p in before)
    stream += b"".join(
        bytes(x) for x in frames.message(frames.DONE, {"ok": True}, [b"x" * i for i in range(parts)])
    )
    ending, at = AnswerEnd(), 0
    while at < len(stream):
        assert not ending.over
        step = data.draw(st.integers(1, max(1, len(stream) // 3)))
        ending.watch(stream[at : at + step])
        at += step
    assert ending.over


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frames_are_refused_or_unfinished(noise: bytes) -> None:
    passing = FrameFollower((frames.PART,))
    with contextlib.suppress(BadInput):
        list(passing.watch(noise))


def test_failures_come_back_as_what_they_were() -> None:
    assert type(failure({"code": "lease_lost", "message": "m", "remedy": "r"})) is LeaseLost
    assert type(failure({"code": "worker_lost", "message": "m", "remedy": "r"})) is WorkerLost
    assert type(failure({"code": "who knows", "message": "m"})) is SubletError


# --- a session host that is wrong ---


class Wrong:
    """Listens where the session host would, and does what the test says."""

    def __init__(self, home: Path, name: str, act: Callable[[socket.socket], None]) -> None:
        (home / "run").mkdir(parents=True, exist_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(home / "run" / name))
        self._socket.listen()
        self._act = act
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._socket.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(0.3)
                    with contextlib.suppress(TimeoutError):
                        while sock.recv(65536):  # all of it: what is left unread takes the answer with it
                            pass
                    self._act(sock)

    def close(self) -> None:
        self._socket.close()


def through(rig: Rig, act: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(relays, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr("sublet.studio.routes.calls.SILENCE_SECONDS", 1.0)
    with tempfile.TemporaryDirectory(prefix="sw", dir="/tmp") as home:  # a socket's path must be short
        settings = settings_of(load_settings(), rig.url, home)
        wrong = Wrong(Path(home), finding.socket_name(settings), act)
        try:
            with running(rig.ledger, settings, relay=Unattended(settings)) as studio:
                studio.token("ann")
                session = add_session(rig.ledger, "ann")
                said = studio.ask("POST", f"/v1/sessions/{session}/run", studio.token("ann"), {"code": "1"})
                wait_until(lambda: studio.service.streams.count() == 0)
        finally:
            wrong.close()
    return said


def test_a_session_host_that_dies_in_a_call(sqlite: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    said = through(sqlite, lambda sock: sock.sendall(frames.frame(frames.OUT, b"hello")), monkeypatch)
    found = lines(said.body)
    assert found[0] == {"kind": "text", "stream": "stdout", "text": "hello"}
    assert found[-1]["kind"] == "failed"
    assert found[-1]["error"]["code"] == "disconnected"


def test_a_session_host_that_falls_silent(sqlite: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(sock: socket.socket) -> None:
        sock.sendall(frames.frame(frames.BEAT))
        time.sleep(4)

    assert lines(through(sqlite, silent, monkeypatch).body)[-1]["kind"] == "failed"


def test_a_session_host_that_speaks_nonsense(sqlite: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is cut, so that nobody takes it for whole."""
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        through(sqlite, lambda sock: sock.sendall(frames.frame(frames.OUT, b"x") + b"\xee" * 64), monkeypatch)


def test_a_session_host_that_refuses(sqlite: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"code": "lease_lost", "message": "gone: /tmp\x1b[2J", "remedy": "resume"}
    said = through(sqlite, lambda sock: sock.sendall(frames.head_frame(frames.FAIL, told)), monkeypatch)
    assert (said.status, said.code) == (410, "lease_lost")
    assert b"\\u001b" not in said.body


def test_no_session_host_at_all(studio_here: Running) -> None:
    studio_here.token("ann")
    session = add_session(studio_here.ledger, "ann")
    said = studio_here.ask("POST", f"/v1/sessions/{session}/run", studio_here.token("ann"), {"code": "1"})
    assert (said.status, said.code) == (503, "disconnected")
