"""Wake-ups through PostgreSQL: NOTIFY after the commit, LISTEN on a connection of its own.

Rules of this file:
- No transaction waits for a NOTIFY: it is sent from a thread of its own, many topics in one statement.
- One channel; a listener drops what is not for it. A lost notification only costs its polling interval.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from sublet.ledger.postgres_driver import psycopg
from sublet.ledger.tx import Row

CHANNEL = "sublet"
#: Rings within it go out together: a NOTIFY costs the server about as much as a renewal.
DEBOUNCE_SECONDS = 0.003
Connect = Callable[[], "psycopg.Connection[Row]"]


class Notifier:
    """Sends NOTIFY after the commit, many topics in one statement."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._topics: queue.SimpleQueue[set[str] | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="sublet-ledger-notifier", daemon=True).start()

    def ring(self, topics: set[str]) -> None:
        self._topics.put(topics)

    def stop(self) -> None:
        self._topics.put(None)

    def _loop(self) -> None:
        connection: psycopg.Connection[Row] | None = None
        while True:
            wanted = self._topics.get()
            if wanted is None:
                break
            time.sleep(DEBOUNCE_SECONDS)
            topics = set(wanted)
            with contextlib.suppress(queue.Empty):
                while len(topics) < 64:
                    more = self._topics.get_nowait()
                    if more is None:
                        return
                    topics |= more
            try:
                if connection is None or connection.closed:
                    connection = self._connect()
                connection.execute(
                    "SELECT pg_notify(%s, t) FROM unnest(%s::text[]) t", (CHANNEL, sorted(topics))
                )
            except psycopg.Error:
                # A hint was lost; everybody also polls.
                if connection is not None:
                    with contextlib.suppress(Exception):
                        connection.close()
                connection = None
        if connection is not None:
            connection.close()


class PostgresBell:
    """Implements `ports.bell.Bell`: one connection that listens, topics filtered here."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._topics: set[str] = set()
        self._connection: psycopg.Connection[Row] | None = None
        self._closed = False

    def listen(self, topic: str) -> None:
        self._topics.add(topic)

    def unlisten(self, topic: str) -> None:
        self._topics.discard(topic)

    def wait(self, timeout_us: int) -> bool:
        deadline = time.monotonic() + max(0, timeout_us) / 1e6
        while not self._closed:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                if self._connection is None:
                    self._connection = self._connect()
                    self._connection.execute(f"LISTEN {CHANNEL}")
                    return True  # something may have rung while nobody listened
                for notify in self._connection.notifies(timeout=left, stop_after=1):
                    if notify.payload in self._topics:
                        return True
            except psycopg.Error:
                self._let_go()
                time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
        return False

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def close(self) -> None:
        self._closed = True
        self._let_go()
