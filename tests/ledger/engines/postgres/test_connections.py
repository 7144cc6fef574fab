"""How many connections a process opens, and what it says when there are none left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from sublet.core.errors import BadInput, Disconnected
from sublet.ledger.engines.connection_pool import ConnectionPool, PoolExhausted
from sublet.ledger.engines.postgres.engine import open_ledger
from sublet.processes.clock import HostClock
from sublet.testing.postgres import PostgresServer
from tests.ledger.rig import Rig, a_step

FEW = 4


class Lent:
    """What stands for a connection in a test of the lending alone."""


def test_never_more_are_lent_than_there_may_be() -> None:
    most_at_once, now, lock = [0], [0], threading.Lock()
    made: list[Lent] = []

    def make() -> Lent:
        made.append(Lent())
        return made[-1]

    lending = ConnectionPool(make, lambda lent: None, most=3)

    def work(number: int) -> None:
        for turn in range(200):
            lent = lending.take()
            with lock:
                now[0] += 1
                most_at_once[0] = max(most_at_once[0], now[0])
            if turn % 7 == number % 7:
                time.sleep(0)
            with lock:
                now[0] -= 1
            if (turn + number) % 50 == 0:
                lending.drop(lent)
            else:
                lending.give_back(lent)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for one that came back"
    assert 1 <= most_at_once[0] <= 3
    assert len(lending.all) <= 3


def test_who_waits_too_long_is_told_and_takes_no_place() -> None:
    lending = ConnectionPool(Lent, lambda lent: None, most=1)
    first = lending.take()
    with pytest.raises(PoolExhausted):
        lending.take(time.monotonic() + 0.01)
    lending.give_back(first)
    assert lending.take(time.monotonic()) is first


def test_one_that_could_not_be_made_takes_no_place() -> None:
    tries = iter([OSError("no"), None])

    def make() -> Lent:
        problem = next(tries)
        if problem is not None:
            raise problem
        return Lent()

    lending = ConnectionPool(make, lambda lent: None, most=1)
    with pytest.raises(OSError, match="no"):
        lending.take()
    assert lending.take(time.monotonic() + 5)


@pytest.fixture
def few(postgres: Rig) -> Iterator[Rig]:
    """A ledger that may open few connections."""
    postgres.tenant()
    postgres.device(gb=1000)
    ledger = open_ledger(f"{postgres.url}&sublet_connections={FEW}", HostClock())
    postgres.ledger.close()
    postgres.ledger = ledger
    yield postgres
    ledger.close()


def _backends(rig: Rig) -> int:
    [(count,)] = rig.sql(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sublet' AND backend_start >= ?",
        rig.schema._taken_at,
    )
    return int(count)


def test_many_threads_share_few_connections(few: Rig) -> None:
    failed: list[BaseException] = []
    seen: list[int] = []
    over = threading.Event()

    def work(number: int) -> None:
        try:
            held = few.ask(1, lease_id=f"of-{number}")
            for step in (1, 2):
                few.commit(held, step, job=f"job-{number}")
            few.ledger.renew(few.key(held))
            few.release(held)
        except BaseException as e:
            failed.append(e)

    def look() -> None:
        while not over.is_set():
            seen.append(_backends(few))

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    over.set()
    looker.join(60)
    assert failed == []
    assert few.sql("SELECT count(*) FROM head WHERE version = 2") == [(30,)]
    assert max(seen) <= FEW + 2, "more than it may, and two for wake-ups"
    assert few.faults() == []


def test_when_all_are_in_use_it_says_so(few: Rig) -> None:
    held = few.ask(1)
    few.commit(held, 1)
    lock = few.schema.connect()
    lock.execute("BEGIN")
    lock.execute("SELECT 1 FROM lease FOR UPDATE")
    waiting = [threading.Thread(target=lambda: few.commit(held, 2), daemon=True) for _ in range(FEW // 2)]
    for thread in waiting:
        thread.start()
    while len([c for c in few.ledger.engine._lending[True].all if c.info.transaction_status]) < FEW // 2:
        time.sleep(0.01)
    few.ledger.engine.patience_us = 100_000
    with pytest.raises(Disconnected, match="in use") as told:
        few.commit(held, 2)
    assert "sublet_connections" in told.value.remedy
    few.ledger.engine.patience_us = 10_000_000
    lock.execute("ROLLBACK")
    lock.close()
    for thread in waiting:
        thread.join(20)
    assert few.ledger.head("train").version == 2


def test_a_child_has_connections_of_its_own(few: Rig) -> None:
    held = few.ask(1)
    few.commit(held, 1)
    mine = {c.info.backend_pid for x in few.ledger.engine._lending.values() for c in x.all}
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            few.ledger.commit(few.key(held), a_step(2))
            theirs = {c.info.backend_pid for x in few.ledger.engine._lending.values() for c in x.all}
            os.write(into, b"apart" if theirs and not theirs & mine else b"shared")
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as said:
        assert said.read() == b"apart"
    os.waitpid(child, 0)
    few.commit(held, 3)
    assert few.ledger.head("train").version == 3


@pytest.fixture
def small_server(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    server = PostgresServer()
    with (server.data / "postgresql.conf").open("a") as conf:
        conf.write("max_connections = 8\nsuperuser_reserved_connections = 0\n")
    server.start()
    yield server
    server.stop()


def test_a_server_that_is_full_says_what_to_do(small_server: PostgresServer) -> None:
    open_ledger(small_server.url, HostClock()).close()
    others: list[Any] = []
    with pytest.raises(psycopg.OperationalError, match="too many"):
        while True:
            others.append(psycopg.connect(small_server.url))
    ledger = open_ledger_later(small_server.url)
    with pytest.raises(Disconnected, match="no connection left") as told:
        ledger.tenants()
    assert "max_connections" in told.value.remedy
    assert "sublet_connections" in told.value.remedy
    ledger.engine.patience_us = 20_000_000
    threading.Timer(0.3, lambda: [other.close() for other in others]).start()
    assert ledger.tenants() == []  # as soon as there is room, within its patience
    ledger.close()


def open_ledger_later(url: str) -> Any:
    """Without looking at the schema first: the server has no room for that."""
    from sublet.ledger.engines.postgres.engine import PostgresEngine
    from sublet.ledger.engines.postgres.hot_verbs import PostgresLedger

    return PostgresLedger(PostgresEngine(url, patience_us=200_000))


@pytest.mark.parametrize("number", ["0", "1", "many", "-3", "99999"])
def test_a_number_of_connections_that_is_none(postgres_server: Any, number: str) -> None:
    with pytest.raises(BadInput, match="sublet_connections"):
        open_ledger(f"{postgres_server.url}&sublet_connections={number}", HostClock())
