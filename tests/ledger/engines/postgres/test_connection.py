"""The short way of the hot verbs: the same answers, the same errors, and nothing left behind by what goes wrong on it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.ledger.engines.postgres.connection import LedgerConnection
from sublet.ledger.engines.postgres.psycopg_import import pg, psycopg
from sublet.testing.postgres import PostgresServer


@pytest.fixture
def connection(postgres_server: PostgresServer) -> Iterator[LedgerConnection]:
    connection = LedgerConnection.connect(postgres_server.url, autocommit=True, prepare_threshold=1)
    yield connection
    connection.close()


MIXED = (
    "SELECT %s::text, %s::bigint, %s::bigint, %s::bigint, %s::text[], %s::bigint[]",
    ("a 'quote', a \\ and ü", -1, 1 << 62, None, ["x", 'say "so"', "{}", "NULL"], [1, 2]),
)


def test_values_come_back_as_a_cursor_gives_them(connection: LedgerConnection) -> None:
    assert connection.call(*MIXED) == connection.execute(*MIXED).fetchall() == [MIXED[1]]
    assert connection.call("SELECT n FROM generate_series(1, 3) n", ()) == [(1,), (2,), (3,)]
    assert connection.call("SELECT 1 WHERE false", ()) == []


@pytest.mark.parametrize(
    ("sql", "params"),
    [
        ("SELECT 1 / %s::bigint", (0,)),
        ("SELECT nothing FROM nowhere", ()),
        ("SELECT %s::bigint", ("no number",)),
        ("SELECT %s::text", ("a\x00b",)),
    ],
)
def test_errors_are_those_of_a_cursor_and_the_connection_goes_on(
    connection: LedgerConnection, sql: str, params: tuple[object, ...]
) -> None:
    with pytest.raises(psycopg.Error) as expected:
        connection.execute(sql, params)
    for _ in range(2):
        with pytest.raises(psycopg.Error) as found:
            connection.call(sql, params)
        assert type(found.value) is type(expected.value)
    assert connection.call("SELECT 7", ()) == [(7,)]


def test_where_its_statements_were_dropped_they_are_prepared_again(connection: LedgerConnection) -> None:
    """psycopg drops every prepared statement after a rollback, also those that are not its own."""
    assert connection.call("SELECT %s::bigint", (1,)) == [(1,)]
    connection.execute("DEALLOCATE ALL")
    assert connection.call("SELECT %s::bigint", (2,)) == [(2,)]


def test_more_than_the_socket_holds_goes_both_ways(connection: LedgerConnection) -> None:
    large = "x" * (20 << 20)
    assert connection.call("SELECT %s::text, length(%s::text)", (large, large)) == [(large, len(large))]


def test_a_server_that_ends_the_connection_is_told(
    connection: LedgerConnection, postgres_server: PostgresServer
) -> None:
    with psycopg.connect(postgres_server.url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
    with pytest.raises(pg.OperationalError):
        for _ in range(20):  # the first may still be sent
            connection.call("SELECT 1", ())
            time.sleep(0.05)
    assert connection.broken or connection.closed


#: Between a client and its server: each answer is passed on at once, but for its last word ("ready for the next").
SLOWLY_READY = """
import os, socket, sys, threading, time
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[2])
listening.listen()
print("ready", flush=True)
client, _ = listening.accept()
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
def upward():
    while data := client.recv(65536):
        server.sendall(data)
    os._exit(0)
threading.Thread(target=upward, daemon=True).start()
while data := server.recv(65536):
    client.sendall(data[:-6])
    time.sleep(0.4)
    client.sendall(data[-6:])
"""


def test_others_go_on_while_an_answer_is_waited_for(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """L6: also when it comes in pieces. A keeper, a warden, a drain are threads of the same process."""
    command = [sys.executable, "-c", SLOWLY_READY]
    places = [str(postgres_server.folder / ".s.PGSQL.5432"), str(tmp_path / ".s.PGSQL.5432")]
    between = subprocess.Popen([*command, *places], stdout=subprocess.PIPE)
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.005):
            ticks.append(time.monotonic())

    try:
        assert between.stdout is not None
        between.stdout.readline()
        connection = LedgerConnection.connect(
            f"postgresql:///postgres?host={tmp_path}&user=sublet", autocommit=True
        )
        threading.Thread(target=tick).start()
        for sql, error in (("SELECT 1", None), ("SELECT 1 / 0", pg.DivisionByZero)):
            begun, ticks[:] = time.monotonic(), []
            with pytest.raises(error) if error else contextlib.nullcontext():
                connection.call(sql, ())
            assert time.monotonic() - begun > 0.4
            gaps = [b - a for a, b in itertools.pairwise([begun, *ticks, time.monotonic()])]
            assert max(gaps) < 0.3, sql
        connection.close()
    finally:
        over.set()
        between.kill()
        between.wait()


def test_an_interrupt_ends_the_wait(connection: LedgerConnection) -> None:
    """And leaves a connection that says so: whoever lends it out drops it."""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        connection.call("SELECT pg_sleep(30)", ())
    assert time.monotonic() - began < 20
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.ACTIVE
