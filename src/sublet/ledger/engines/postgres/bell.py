"""Wake-ups through PostgreSQL: NOTIFY after the commit, LISTEN on one connection for all bells of a process.

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

from sublet.ledger.engines.postgres.connection import LedgerConnection
from sublet.ledger.engines.postgres.psycopg_import import psycopg

CHANNEL = "sublet"
#: Rings within this time go out together: a NOTIFY costs the server about as much as a renewal.
DEBOUNCE_SECONDS = 0.003
#: A process that rings all the time notifies this often: whoever wakes up looks at everything there is.
APART_SECONDS = 0.05
#: How often the listener looks whether it is still wanted, and how long it waits after a lost connection.
LOOK_SECONDS = 1.0
AGAIN_SECONDS = 0.2
Connect = Callable[[], LedgerConnection]


class Notifier:
    """Sends NOTIFY after the commit, many topics in one statement."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._topics: queue.SimpleQueue[set[str] | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="sublet-ledger-notifier", daemon=True).start()

    def ring(self, topics: set[str]) -> None:
        self._topics.put(topics)

    def stop(self) -> None:
        """Let its thread send what has been rung, close the connection and end."""
        self._topics.put(None)

    def _loop(self) -> None:
        connection: LedgerConnection | None = None
        sent_at = float("-inf")
        rung: list[set[str] | None] = []
        while None not in rung:
            rung = [self._topics.get()]
            if None not in rung:
                time.sleep(max(DEBOUNCE_SECONDS, sent_at + APART_SECONDS - time.monotonic()))
            rung += [self._topics.get() for _ in range(self._topics.qsize())]
            topics = sorted(set().union(*(some for some in rung if some is not None)))
            if topics:
                connection = self._send(topics, connection)
                sent_at = time.monotonic()
        if connection is not None:
            connection.close()

    def _send(self, topics: list[str], connection: LedgerConnection | None) -> LedgerConnection | None:
        try:
            if connection is None or connection.closed:
                connection = self._connect()
            connection.call("SELECT pg_notify(%s, t)::text FROM unnest(%s::text[]) t", (CHANNEL, topics))
            return connection
        except psycopg.Error:
            # A hint was lost; everybody also polls.
            if connection is not None:
                with contextlib.suppress(Exception):
                    connection.close()
            return None


class NotifyListener:
    """The process's one connection that listens, for all its bells."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._bells: dict[str, set[PostgresBell]] = {}
        self._lock = threading.Lock()
        self._started = False
        self._stopped = False

    def add(self, bell: PostgresBell, topic: str) -> None:
        with self._lock:
            self._bells.setdefault(topic, set()).add(bell)
            if not self._started:
                self._started = True
                threading.Thread(target=self._loop, name="sublet-ledger-listens", daemon=True).start()

    def remove(self, bell: PostgresBell, topic: str) -> None:
        with self._lock:
            bells = self._bells.get(topic, set())
            bells.discard(bell)
            if not bells:
                self._bells.pop(topic, None)

    def stop(self) -> None:
        """Let its thread close the connection the next time it looks."""
        self._stopped = True

    def _loop(self) -> None:
        while not self._stopped:
            connection: LedgerConnection | None = None
            try:
                connection = self._connect()
                connection.execute(f"LISTEN {CHANNEL}")
                self._ring_all()  # something may have rung while nobody listened
                while not self._stopped:
                    for notify in connection.notifies(timeout=LOOK_SECONDS):
                        self._ring(notify.payload)
            except psycopg.Error:
                time.sleep(AGAIN_SECONDS)
            finally:
                if connection is not None:
                    with contextlib.suppress(Exception):
                        connection.close()

    def _ring(self, topic: str) -> None:
        with self._lock:
            bells = list(self._bells.get(topic, ()))
        for bell in bells:
            bell.ring()

    def _ring_all(self) -> None:
        with self._lock:
            bells = {bell for found in self._bells.values() for bell in found}
        for bell in bells:
            bell.ring()


class PostgresBell:
    """Implements `ports.bell.Bell`."""

    def __init__(self, listener: NotifyListener) -> None:
        self._listener = listener
        self._topics: set[str] = set()
        self._rang = threading.Event()
        self._closed = False

    def listen(self, topic: str) -> None:
        self._topics.add(topic)
        self._listener.add(self, topic)

    def unlisten(self, topic: str) -> None:
        self._topics.discard(topic)
        self._listener.remove(self, topic)

    def ring(self) -> None:
        self._rang.set()

    def wait(self, timeout_us: int) -> bool:
        if self._closed:
            return False
        rang = self._rang.wait(max(0, timeout_us) / 1e6)
        self._rang.clear()
        return rang and not self._closed

    def close(self) -> None:
        self._closed = True
        for topic in list(self._topics):
            self.unlisten(topic)
        self._rang.set()  # so that a waiting thread returns
