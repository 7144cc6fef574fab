"""Asking a metadata service, and turning what it says about time into a deadline here.

Rules of this file:
- No proxy is used and no redirect followed: a metadata address means this machine and nobody else.
- Every wait has an end, every answer has a largest size, and a wait is given up when `stop` is set.
- A service's calendar is compared with the service's own `Date`, not with ours: the two machines need not
  agree. What is left is counted from before the question was sent, so the deadline is early rather than late.
"""

from __future__ import annotations

import http.client
import select
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from sublet.core.values import SECOND_US
from sublet.ports.clock import Clock

MOST_BYTES = 1 << 20
QUICK_SECONDS = 2.0
_LOOK_SECONDS = 0.2
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


class NoAnswer(Exception):
    """The service could not be asked, or what came back is not an answer."""


class TookTooLong(NoAnswer):
    """Nothing came in the time given."""


class ListeningStopped(Exception):
    """The watcher was told to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    asked_us: int  # monotonic, before the question was sent

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace").strip()


class MetadataService:
    """One address to ask."""

    def __init__(self, base: str, clock: Clock, *, trust: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base[:60]!r} is not an http address")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._clock = clock
        self.trust = trust

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        seconds: float = QUICK_SECONDS,
        stop: threading.Event | None = None,
    ) -> Reply:
        """Ask one question on one connection. Raises `NoAnswer`, or `ListeningStopped` when `stop` was set
        meanwhile."""
        deadline = time.monotonic() + seconds
        connect_seconds = min(seconds, QUICK_SECONDS)
        connection: http.client.HTTPConnection
        if self._secure:
            trust = self.trust or ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=connect_seconds, context=trust
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=connect_seconds)
        asked_us = self._clock.monotonic_us()
        try:
            connection.request(method, self._prefix + path, body=body, headers=dict(headers or {}))
            self._await_answer(connection, deadline, stop)
            answer = connection.getresponse()
            found = self._read(connection, answer, deadline, stop)
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(status=answer.status, headers=names, body=found, asked_us=asked_us)
        except TimeoutError as e:
            raise TookTooLong(f"{self._host} did not answer") from e
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise NoAnswer(f"{self._host}: {type(e).__name__}: {e}") from e
        finally:
            connection.close()

    @staticmethod
    def _await_answer(
        connection: http.client.HTTPConnection, deadline: float, stop: threading.Event | None
    ) -> None:
        """Wait for the first byte, which is where a service that answers only on a change keeps us."""
        poll = select.poll()
        poll.register(connection.sock.fileno(), select.POLLIN)
        while not poll.poll(_LOOK_SECONDS * 1000):
            _give_up_if(stop, deadline)

    @staticmethod
    def _read(
        connection: http.client.HTTPConnection,
        answer: http.client.HTTPResponse,
        deadline: float,
        stop: threading.Event | None,
    ) -> bytes:
        found = bytearray()
        while True:
            piece = answer.read1(65536)
            if not piece:
                return bytes(found)
            found += piece
            if len(found) > MOST_BYTES:
                raise NoAnswer(f"{connection.host} sent more than {MOST_BYTES} bytes")
            _give_up_if(stop, deadline)


def _give_up_if(stop: threading.Event | None, deadline: float) -> None:
    if stop is not None and stop.is_set():
        raise ListeningStopped
    if time.monotonic() >= deadline:
        raise TimeoutError


class PollPauses:
    """How long to wait before asking again: doubling while there is no answer, up to a minute."""

    def __init__(self, longest_seconds: float = LONGEST_PAUSE_SECONDS) -> None:
        self._next = FIRST_PAUSE_SECONDS
        self._longest = longest_seconds

    def answered(self) -> None:
        self._next = FIRST_PAUSE_SECONDS

    def seconds(self) -> float:
        found, self._next = self._next, min(self._longest, self._next * 2)
        return found


def time_in_words(text: str) -> datetime | None:
    """Parse RFC 3339 ('2026-01-02T03:04:05Z') or RFC 1123 ('Mon, 19 Sep 2016 18:29:47 GMT'); None when it is
    neither."""
    text = text.strip()
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            found = parsedate_to_datetime(text)
        except (ValueError, TypeError):
            return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def deadline_of(end: datetime, reply: Reply, clock: Clock) -> int:
    """Convert `end`, a time of the service's calendar, to our monotonic clock."""
    date = time_in_words(reply.headers.get("date", ""))
    end_us = round(end.timestamp() * SECOND_US)
    if date is None:
        left = end_us - clock.wall_us() + clock.monotonic_us() - reply.asked_us
    else:
        # `Date` has whole seconds and may be up to one behind.
        left = end_us - round(date.timestamp() * SECOND_US) - SECOND_US
    return reply.asked_us + max(0, left)
