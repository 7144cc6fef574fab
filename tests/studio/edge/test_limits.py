"""What hostile and slow clients cannot do: with real sockets, against a real server."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.studio.token import Credential, Scope
from sublet.settings import load_settings
from sublet.studio.edge.limits import (
    MIB,
    ConcurrencyLimit,
    EdgeLimits,
    RateBuckets,
    RecentlyOverRate,
    RefusalDelays,
)
from sublet.studio.edge.wire import TooManyNow
from sublet.studio.tokens import new_token
from tests.homes import wait_until
from tests.ledger.rig import Rig
from tests.studio.edge.test_wire import check_shape
from tests.studio.running import WIDE, Running, add_session, running, settings_of


@contextlib.contextmanager
def limited(rig: Rig, tmp_path: Path, **changes: object) -> Iterator[Running]:
    (tmp_path / "home").mkdir(exist_ok=True)
    limits = dataclasses.replace(WIDE, **changes)  # type: ignore[arg-type]
    with running(rig.ledger, settings_of(load_settings(), rig.url, str(tmp_path / "home")), limits) as found:
        yield found


def rest(sock: socket.socket) -> bytes:
    """Until the server ends it."""
    found = b""
    try:
        while piece := sock.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def test_buckets_refill() -> None:
    buckets = RateBuckets(10.0, 2.0)
    assert [buckets.take("a", 0.0) for _ in range(20)] == [0.0] * 20
    over = buckets.take("a", 0.0)
    assert 0 < over <= 0.1
    assert buckets.take("b", 0.0) == 0.0
    assert buckets.take("a", over + 0.001) == 0.0
    assert RateBuckets(0, 2.0).take("a", 0.0) == 0.0


def test_buckets_do_not_grow_without_end() -> None:
    buckets = RateBuckets(10.0, 1.0)
    for i in range(3 * RateBuckets.KEYS_MAX):
        buckets.take(f"k{i}", i / 1000)
    assert len(buckets._levels) <= RateBuckets.KEYS_MAX


def test_a_crowd_is_counted_out_again() -> None:
    crowd = ConcurrencyLimit(2, "things")
    crowd.enter("a")
    crowd.enter("a")
    with pytest.raises(TooManyNow):
        crowd.enter("a")
    crowd.enter("b")
    crowd.leave("a")
    with crowd.counted("a"):
        assert crowd.count("a") == 2
    assert (crowd.count("a"), crowd.count()) == (1, 2)


def test_a_tenant_over_its_rate_is_told_when_to_come_back(sqlite: Rig, tmp_path: Path) -> None:
    with limited(sqlite, tmp_path, tenant_rate=5.0, burst_seconds=1.0) as studio:
        said = [studio.ask("GET", "/v1/me", studio.token("ann")) for _ in range(12)]
        refused = [s for s in said if s.status == 429]
        assert refused
        assert refused[0].code == "too_many"
        assert int(refused[0].headers["retry-after"]) >= 1
        assert studio.ask("GET", "/v1/me", studio.token("bob")).status == 200  # nobody else notices


def test_an_address_over_its_rate_is_refused_before_its_token_is_looked_at(
    sqlite: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with limited(sqlite, tmp_path, address_rate=5.0, burst_seconds=1.0) as studio:
        token = studio.token("ann")
        looked: list[str] = []
        real = sqlite.ledger.look_token
        monkeypatch.setattr(sqlite.ledger, "look_token", lambda t: (looked.append(t), real(t))[1])
        said = [studio.ask("GET", "/v1/me", token).status for _ in range(12)]
        assert 429 in said
        assert len(looked) == said.count(200)


def test_refusals_come_later_each_time_and_never_together() -> None:
    penalties = RefusalDelays(0.25, 2.0)
    told = [penalties.next("a", 0.0) for _ in range(200)]
    assert 0.18 < told[0] < 0.32
    assert all(1.5 <= seconds <= 2.5 for seconds in told[-20:])
    assert len(set(told)) == len(told)
    assert penalties.next("b", 0.0) < 0.32  # everybody has an own count
    assert penalties.next("a", 3600.0) < 0.32  # and it is forgotten
    assert RefusalDelays(0.0, 2.0).next("a", 0.0) == 0.0


def test_a_flood_is_refused_without_a_look_into_the_ledger(
    sqlite: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with limited(sqlite, tmp_path, tenant_rate=0.2, burst_seconds=10.0) as studio:
        ann, bob = studio.token("ann"), studio.token("bob")
        second = new_token()
        studio.ledger.add_token(second.id, second.digest, "ann", actor="test")
        looked: list[str] = []
        real = sqlite.ledger.look_token
        monkeypatch.setattr(sqlite.ledger, "look_token", lambda t: (looked.append(t), real(t))[1])
        said = [studio.ask("GET", "/v1/me", ann) for _ in range(8)]
        assert [s.status for s in said] == [200, 200] + [429] * 6
        assert len(looked) == 3  # two that passed, and the first that did not
        refused = said[-1]
        assert (refused.code, refused.json) == (
            "too_many",
            said[2].json | {"id": refused.headers["x-request-id"]},
        )
        assert int(refused.headers["retry-after"]) >= 1
        assert studio.ask("POST", "/v1/sessions", ann, raw=b"x" * MIB).status == 429  # none of it was read
        assert studio.ask("GET", "/v1/me", bob).status == 200
        # Only what was let in is known: another token of the tenant and a wrong secret are looked up.
        assert studio.ask("GET", "/v1/me", second.text).status == 429
        assert studio.ask("GET", "/v1/me", ann[:-1] + ("0" if ann[-1] != "0" else "1")).status == 401
        assert len(looked) == 6
        assert '"status":429' in studio.log()


def test_what_a_flood_showed_is_looked_up_again_soon() -> None:
    flooding = RecentlyOverRate()
    assert not flooding
    who = Credential(tenant="ann", scope=Scope.USER, token_id="0" * 16)
    flooding.add("shown", who, 100.0)
    assert flooding
    assert flooding.find("shown", 104.9) == who
    assert flooding.find("other", 104.9) is None
    assert flooding.find("shown", 105.1) is None
    assert not flooding


@pytest.mark.parametrize("how", ["length", "chunked"])
def test_a_body_that_is_too_large_is_refused(sqlite: Rig, tmp_path: Path, how: str) -> None:
    with limited(sqlite, tmp_path, json_bytes=10_000, call_bytes=50_000) as studio:
        token = studio.token("ann")
        session = add_session(studio.ledger, "ann")
        places = [("/v1/sessions", 10_000), (f"/v1/sessions/{session}/calls?call=c", 50_000)]
        for path, most in places if how == "length" else places[:1]:  # a call is passed on while it is read
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
            with studio.connect() as sock:
                if how == "length":
                    sock.sendall(f"{head}Content-Length: {10**15}\r\n\r\n".encode())
                else:
                    sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
                    with contextlib.suppress(OSError):
                        for _ in range(most // 1000 + 20):
                            sock.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
                answer = rest(sock)
            assert answer.startswith(b"HTTP/1.1 413 "), answer[:100]
            assert b"connection: close" in answer
        assert studio.ask("GET", "/healthz").status == 200


@pytest.mark.parametrize("how", ["length", "chunked"])
@pytest.mark.parametrize("what", ["run", "nowhere", "no token", "get"])
def test_who_sends_everything_before_it_reads_is_told_why_not(
    sqlite: Rig, tmp_path: Path, how: str, what: str
) -> None:
    """The refusal was sent long before: a connection that ends while its client still sends takes it
    along."""
    pieces = 40 if what == "run" else 8
    with limited(sqlite, tmp_path) as studio:
        token = studio.token("ann")
        session = add_session(studio.ledger, "ann")
        if what == "no token":
            token = "none"
        path = "/v1/nowhere" if what == "nowhere" else f"/v1/sessions/{session}/run"
        line = f"GET /v1/sessions/{session}" if what == "get" else f"POST {path}"
        head = f"{line} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        with studio.connect() as sock:
            if how == "length":
                sock.sendall(f"{head}Content-Length: {pieces * MIB}\r\n\r\n".encode())
                for _ in range(pieces):
                    sock.sendall(b" " * MIB)
            else:
                sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
                for _ in range(pieces):
                    sock.sendall(b"100000\r\n" + b" " * MIB + b"\r\n")
                sock.sendall(b"0\r\n\r\n")
            answer = rest(sock)
        begin, _, body = answer.partition(b"\r\n\r\n")
        headers = {
            name.lower(): value
            for name, _, value in (h.partition(": ") for h in begin.decode().split("\r\n"))
        }
        status = {"run": b"413", "get": b"413", "nowhere": b"404", "no token": b"401"}[what]
        assert answer[9:12] == status, answer[:100]
        check_shape(body, headers)
        wait_until(lambda: not studio.server.server_state.connections)


def test_who_never_stops_sending_is_cut_off(sqlite: Rig, tmp_path: Path) -> None:
    with limited(sqlite, tmp_path, unread_bytes=8 * MIB) as studio:
        head = f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {studio.token('ann')}\r\n"
        with studio.connect() as sock:
            sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            sent = 0
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                while True:
                    sock.sendall(b"100000\r\n" + b" " * MIB + b"\r\n")
                    sent += MIB
        wait_until(lambda: not studio.server.server_state.connections)
        assert sent < 40 * MIB  # what was taken, and what the kernel holds of both sides
        assert studio.ask("GET", "/v1/me", studio.token("ann")).status == 200


@pytest.mark.parametrize("how", ["silent", "drips"])
def test_who_sends_the_rest_slowly_is_cut_off(sqlite: Rig, tmp_path: Path, how: str) -> None:
    with limited(sqlite, tmp_path, unread_seconds=1.0, unread_silent_seconds=0.3) as studio:
        head = f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {studio.token('ann')}\r\n"
        with studio.connect() as sock:
            sock.sendall(f"{head}Content-Length: {100 * MIB}\r\n\r\n".encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 413 ")
            if how == "drips":
                with pytest.raises((ConnectionResetError, BrokenPipeError)):
                    while True:
                        sock.sendall(b" ")
                        time.sleep(0.02)
            wait_until(lambda: not studio.server.server_state.connections)
        assert studio.service.unread.count("ann") == 0


def test_so_many_are_let_finish_and_the_next_is_cut_at_once(sqlite: Rig, tmp_path: Path) -> None:
    with limited(sqlite, tmp_path, unread_connections=2) as studio:
        head = f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {studio.token('ann')}\r\n"

        def refused() -> socket.socket:
            sock = studio.connect()
            sock.sendall(f"{head}Content-Length: {100 * MIB}\r\n\r\n".encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 413 ")
            return sock

        with refused(), refused():
            wait_until(lambda: studio.service.unread.count("ann") == 2)
            with refused() as third:
                wait_until(lambda: len(studio.server.server_state.connections) == 2)
                with pytest.raises((ConnectionResetError, BrokenPipeError)):
                    while True:
                        third.sendall(b" " * MIB)
        wait_until(lambda: studio.service.unread.count("ann") == 0)


def test_a_get_reads_no_body(sqlite: Rig, tmp_path: Path) -> None:
    with limited(sqlite, tmp_path) as studio:
        said = studio.ask("DELETE", "/v1/prices?device_class=x", studio.operator, raw=b"x" * (2 << 20))
        assert said.status == 413


def test_headers_that_never_end_are_cut(sqlite: Rig, tmp_path: Path) -> None:
    with limited(sqlite, tmp_path, header_seconds=0.5) as studio:
        with studio.connect() as silent, studio.connect() as slow:
            slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
            began = time.monotonic()
            stop = threading.Event()

            def drip() -> None:
                with contextlib.suppress(OSError):
                    while not stop.wait(0.05):
                        slow.sendall(b"X-A: b\r\n")

            dripping = threading.Thread(target=drip)
            dripping.start()
            try:
                assert rest(silent).startswith(b"HTTP/1.1 408 ")
                assert b" 408 " in rest(slow)[:20]
            finally:
                stop.set()
                dripping.join()
        assert time.monotonic() - began < 60


def test_headers_that_are_too_large_are_cut(sqlite: Rig, tmp_path: Path) -> None:
    with limited(sqlite, tmp_path, header_bytes=8192) as studio:
        for sent in (b"X-A: " + b"b" * 300_000, b"".join(b"X-%d: b\r\n" % i for i in range(500))):
            with studio.connect() as sock:
                with contextlib.suppress(OSError):
                    sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + sent + b"\r\n\r\n")
                assert rest(sock)[9:12] in (b"431", b"400", b"")
        assert studio.ask("GET", "/healthz").status == 200


def test_a_body_that_comes_too_slowly_is_cut(sqlite: Rig, tmp_path: Path) -> None:
    with limited(sqlite, tmp_path, body_seconds=0.5, body_grace_seconds=0.5, body_floor=10_000) as studio:
        head = (
            f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {studio.token('ann')}\r\n"
            "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
        ).encode()
        with studio.connect() as silent:
            silent.sendall(head)
            assert rest(silent).startswith(b"HTTP/1.1 408 ")
        with studio.connect() as dripping:
            dripping.sendall(head)
            began = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() - began < 60:
                    dripping.sendall(b" ")
                    time.sleep(0.05)
            assert time.monotonic() - began < 50
        wait_until(lambda: not studio.service.requests.count())


def test_more_connections_than_it_holds_are_turned_away(sqlite: Rig, tmp_path: Path) -> None:
    with limited(sqlite, tmp_path, connections=5) as studio:
        held = [studio.connect() for _ in range(5)]
        for sock in held:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in sock.recv(4096)
        with studio.connect() as one_more:
            assert rest(one_more).startswith(b"HTTP/1.1 503 ")
        for sock in held:
            sock.close()
        wait_until(lambda: studio.ask("GET", "/healthz").status == 200)


def test_so_many_streams_and_no_more(sqlite: Rig, tmp_path: Path) -> None:
    with limited(sqlite, tmp_path, tenant_streams=3) as studio:
        token = studio.token("ann")
        held = [listening(studio, token) for _ in range(3)]
        wait_until(lambda: studio.service.streams.count("ann") == 3)
        said = studio.ask("GET", "/v1/events", token)
        assert (said.status, said.code) == (429, "too_many")
        other = listening(studio, studio.token("bob"))
        other.close()
        for sock in held:
            sock.close()
        wait_until(lambda: studio.service.streams.count() == 0)
        wait_until(lambda: studio.service.live.listeners == 0)


def listening(studio: Running, token: str) -> socket.socket:
    sock = studio.connect()
    sock.sendall(f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    assert b" 200 " in sock.recv(4096)
    return sock


def test_a_reader_that_takes_nothing_is_cut_and_the_others_hear_everything(
    sqlite: Rig, tmp_path: Path
) -> None:
    with limited(sqlite, tmp_path, stream_events=50, send_seconds=1.0) as studio:
        token = studio.token("ann")
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", studio.port))
        stuck.sendall(f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        wait_until(lambda: studio.service.live.listeners == 1)
        good = listening(studio, token)
        heard: list[bytes] = []
        hearing = threading.Thread(target=lambda: heard.append(rest(good)), daemon=True)
        hearing.start()
        # More than the socket's buffers and the list hold together.
        for _ in range(1500):
            add_session(studio.ledger, "ann", name="n" * 80)
        wait_until(lambda: studio.service.live.listeners <= 1, 60)
        wait_until(lambda: studio.service.streams.count() <= 1, 30)
        good.shutdown(socket.SHUT_RDWR)
        hearing.join(60)
        assert heard[0].count(b"event: session") + heard[0].count(b"event: gap") > 0
        stuck.close()


def test_defaults_bound_everything() -> None:
    for field in dataclasses.fields(EdgeLimits):
        assert getattr(EdgeLimits(), field.name) > 0


@pytest.mark.parametrize("shape", ["one long", "many"])
def test_headers_are_counted_before_they_are_parsed(sqlite: Rig, tmp_path: Path, shape: str) -> None:
    """A request whose headers came whole, in one piece, was never counted."""
    lines = (
        b"X-A: " + b"b" * 20_000
        if shape == "one long"
        else b"\r\n".join(b"X-%d: b" % i + b"c" * 300 for i in range(60))
    )
    with limited(sqlite, tmp_path, header_bytes=8192) as studio:
        for _ in range(5):  # the kernel may cut what is sent anywhere
            with studio.connect() as sock:
                sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n\r\n")
                assert rest(sock)[9:12] == b"431"
        said = studio.ask("GET", "/healthz", headers={"X-A": "b" * 7000})
        assert said.status == 200


def test_a_large_body_is_no_large_header(sqlite: Rig, tmp_path: Path) -> None:
    with limited(sqlite, tmp_path, header_bytes=8192) as studio, studio.connect() as sock:
        body = b'{"vram":"1GB","ttl":"' + b"x" * 30_000 + b'"}'
        head = b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        sock.sendall(head % len(body) + body)
        assert sock.recv(64)[9:12] == b"401"
