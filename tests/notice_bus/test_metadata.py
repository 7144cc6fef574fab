"""Asking a metadata service: bounded in time and size, never by a proxy, never along a redirect."""

from __future__ import annotations

import socket
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from sublet.notice_bus.metadata import (
    ListeningStopped,
    MetadataService,
    NoAnswer,
    PollPauses,
    Reply,
    TookTooLong,
    deadline_of,
    time_in_words,
)
from sublet.testing.clock import VirtualClock
from tests.notice_bus.cloud import CLOCK, Said, serving


def service(base: str) -> MetadataService:
    return MetadataService(base, CLOCK)


def test_an_answer_with_its_headers() -> None:
    with serving(lambda asked: Said(418, b" hello \n", {"X-Odd": "1"})) as cloud:
        reply = service(cloud.base).ask("/a?b=c", headers={"Metadata": "true"})
        assert (reply.status, reply.text, reply.headers["x-odd"]) == (418, "hello", "1")
        assert cloud.asked[0].path == "/a?b=c"
        assert cloud.asked[0].headers["metadata"] == "true"


def test_no_proxy_is_ever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(lambda asked: Said(200, b"proxy")) as proxy,
        serving(lambda asked: Said(200, b"direct")) as cloud,
    ):
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.base)
        assert service(cloud.base).ask("/").text == "direct"
        assert not proxy.asked


def test_a_redirect_is_an_answer_and_not_followed() -> None:
    with serving(lambda asked: Said(200, b"elsewhere")) as elsewhere:
        with serving(lambda asked: Said(302, b"", {"Location": elsewhere.base})) as cloud:
            assert service(cloud.base).ask("/").status == 302
        assert not elsewhere.asked


def test_a_huge_answer_is_cut_off() -> None:
    with (
        serving(lambda asked: Said(200, b"x" * (3 << 20))) as cloud,
        pytest.raises(NoAnswer, match="more than"),
    ):
        service(cloud.base).ask("/")


@pytest.mark.parametrize("raw", [b"", b"\x00\xff\r\n\r\n", b"HTTP/1.1 two hundred\r\n\r\n", b"SSH-2.0-x\r\n"])
def test_garbage_is_no_answer(raw: bytes) -> None:
    with serving(lambda asked: Said(raw=raw)) as cloud, pytest.raises(NoAnswer):
        service(cloud.base).ask("/")


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NoAnswer):
        service(f"http://127.0.0.1:{port}").ask("/")
    with pytest.raises(NoAnswer):
        service("http://no-such-host.invalid").ask("/")


def test_a_service_that_hangs_is_given_up() -> None:
    with serving(lambda asked: Said()) as cloud:
        cloud.answer = cloud.hang
        began = time.monotonic()
        with pytest.raises(TookTooLong):
            service(cloud.base).ask("/", seconds=0.4)
        assert time.monotonic() - began < 30


def test_a_service_that_drips_is_given_up() -> None:
    def drip() -> None:
        taken, _ = server.accept()
        with taken:
            taken.recv(1000)
            taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            try:
                for _ in range(1200):
                    taken.sendall(b"x")
                    time.sleep(0.05)
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        with pytest.raises(TookTooLong):
            service(f"http://127.0.0.1:{server.getsockname()[1]}").ask("/", seconds=0.5)
        assert time.monotonic() - began < 30
        thread.join()


def test_a_wait_ends_when_nobody_listens_any_more() -> None:
    with serving(lambda asked: Said()) as cloud:
        cloud.answer = cloud.hang
        stop = threading.Event()
        threading.Timer(0.1, stop.set).start()
        began = time.monotonic()
        with pytest.raises(ListeningStopped):
            service(cloud.base).ask("/", seconds=60, stop=stop)
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("base", ["", "metadata", "ftp://x", "http://", "file:///etc/passwd"])
def test_an_address_that_is_none(base: str) -> None:
    with pytest.raises(ValueError, match="not an http address"):
        MetadataService(base, CLOCK)


def test_pauses_double_up_to_a_bound_and_begin_again() -> None:
    patience = PollPauses(8.0)
    assert [patience.seconds() for _ in range(6)] == [1, 2, 4, 8, 8, 8]
    patience.answered()
    assert patience.seconds() == 1


# --- time ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2026-01-02T03:04:05", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2026-01-02T04:04:05.25+01:00", datetime(2026, 1, 2, 3, 4, 5, 250_000, tzinfo=UTC)),
        ("Mon, 19 Sep 2016 18:29:47 GMT", datetime(2016, 9, 19, 18, 29, 47, tzinfo=UTC)),
        ("", None),
        ("soon", None),
    ],
)
def test_times_as_clouds_write_them(text: str, found: datetime | None) -> None:
    assert time_in_words(text) == found


def reply(asked_us: int, date: str) -> Reply:
    return Reply(status=200, headers={"date": date} if date else {}, body=b"", asked_us=asked_us)


def test_a_deadline_is_the_services_calendar_against_the_services_own() -> None:
    clock = VirtualClock()
    clock.step_wall(-7 * 86_400 * 1_000_000)  # ours is a week off, and it does not matter
    said = reply(clock.monotonic_us(), "Fri, 02 Jan 2026 03:04:05 GMT")
    end = datetime(2026, 1, 2, 3, 6, 5, tzinfo=UTC)
    # Two minutes, less the second that `Date` does not show.
    assert deadline_of(end, said, clock) - clock.monotonic_us() == 119_000_000


def test_a_deadline_counts_from_before_the_question() -> None:
    clock = VirtualClock()
    asked_us = clock.monotonic_us()
    clock.advance(3_000_000)  # a slow answer
    end = datetime.fromtimestamp(clock.wall_us() / 1e6, UTC) + timedelta(seconds=60)
    assert deadline_of(end, reply(asked_us, "Fri, 02 Jan 2026 03:04:05 GMT"), clock) >= asked_us
    # Without `Date` our own calendar must do, read now.
    assert abs(deadline_of(end, reply(asked_us, ""), clock) - (clock.monotonic_us() + 60_000_000)) <= 1


def test_a_deadline_that_is_over_is_now_and_not_before() -> None:
    clock = VirtualClock()
    end = datetime(2020, 1, 1, tzinfo=UTC)
    assert deadline_of(end, reply(clock.monotonic_us(), ""), clock) == clock.monotonic_us()
