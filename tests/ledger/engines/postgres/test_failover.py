"""A standby that answers, one that is promoted, several addresses, and what PostgreSQL itself asks to be tried again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from sublet.core.errors import Disconnected, LeaseLost
from sublet.core.leasing.lease import LeaseState
from sublet.core.progress.effect import Committed
from sublet.ledger.engines.postgres.engine import open_ledger
from sublet.ledger.tx import Tx
from sublet.processes.clock import HostClock
from sublet.testing.postgres import PostgresServer
from tests.ledger.rig import HERE, MINUTE, SECOND, PostgresSchema, Rig, rig_on


class Pair:
    """A primary and its standby, which confirms what is durable before a client is told."""

    def __init__(self) -> None:
        self.primary = PostgresServer()
        self.primary.start()
        self.standby = self.primary.standby()
        self.standby.start()
        with psycopg.connect(self.primary.url, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{self.standby.name}'")
            connection.execute("SELECT pg_reload_conf()")
            while (
                connection.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone()
                is None
            ):
                time.sleep(0.02)

    @property
    def url(self) -> str:
        """The standby first: whoever takes the first that answers has the wrong one."""
        return f"postgresql:///postgres?host={self.standby.folder},{self.primary.folder}&user=sublet"

    def stop_receiving(self) -> None:
        """From here on the standby hears nothing."""
        with psycopg.connect(self.standby.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
            while connection.execute("SELECT 1 FROM pg_stat_wal_receiver").fetchone() is not None:
                time.sleep(0.02)

    def stop(self) -> None:
        self.standby.stop()
        self.primary.stop()


@pytest.fixture
def pair(postgres_server: PostgresServer) -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.stop()


@pytest.mark.timeout(300)
def test_a_failover(pair: Pair) -> None:
    """L1, L3, S1: with a synchronous standby nothing durable is lost; a renewal may be, and then the lease runs out."""
    schema = PostgresSchema(pair.url)
    rig = rig_on(schema)
    schema.connection.close()
    rig.tenant()
    rig.device()
    held = rig.ask(10, ttl_us=MINUTE)
    assert rig.commit(held, 1) == Committed(1)

    # The standby alone: neither writes nor reads, and nothing is said to be there or not.
    alone = open_later(f"{pair.standby.url}&sublet_schema={schema.name}", patience_us=300_000)
    for verb in (lambda: alone.renew(rig.key(held)), lambda: alone.head("train"), alone.tenants):
        with pytest.raises(Disconnected, match="standby") as told:
            verb()
        assert "SUBLET_LEDGER" in told.value.remedy
    alone.close()

    pair.stop_receiving()
    rig.advance(50 * SECOND)
    renewed = rig.ledger.renew(rig.key(held))
    assert renewed.lease.expires_at > held.lease.expires_at
    pair.primary.crash()
    promoted = threading.Timer(0.5, pair.standby.promote)
    promoted.start()  # meanwhile the next verb tries again and again
    assert rig.commit(held, 2) == Committed(2)
    promoted.join()
    assert rig.look(held).expires_at == held.lease.expires_at, "the renewal was lost with the primary"

    rig.advance(20 * SECOND)  # past the expiry that survived, within the one that was lost
    with pytest.raises(LeaseLost):
        rig.ledger.renew(rig.key(held))
    rig.ledger.tick(HERE)
    assert rig.look(held).state is LeaseState.ENDED
    assert rig.ask(10).lease.epoch > held.lease.epoch
    assert rig.ledger.head("train").version == 2
    assert rig.faults() == []
    rig.close()


def open_later(url: str, *, patience_us: int):
    """Without looking at its schema first, which would fail already."""
    from sublet.ledger.engines.postgres.engine import PostgresEngine
    from sublet.ledger.engines.postgres.hot_verbs import PostgresLedger

    return PostgresLedger(PostgresEngine(url, patience_us=patience_us))


def test_a_server_set_to_read_only_is_none(postgres: Rig) -> None:
    with pytest.raises(Disconnected, match="read only"):
        open_ledger(f"{postgres.url}&options=-c%20default_transaction_read_only%3Don", HostClock())


def test_a_server_that_becomes_read_only_for_a_while(postgres: Rig) -> None:
    """As an old primary is for a moment: refused, tried again on a new connection, done once."""
    postgres.tenant()
    postgres.device()
    held = postgres.ask(10)
    postgres.commit(held, 1)
    with psycopg.connect(postgres.schema.url.split("&sublet_schema")[0], autocommit=True) as admin:
        for lending in postgres.ledger.engine._lending.values():
            for connection in lending.all:
                connection.execute("SET default_transaction_read_only = on")
        assert postgres.commit(held, 2) == Committed(2)
        assert admin.execute("SELECT 1").fetchone() == (1,)
    assert postgres.ledger.head("train").version == 2
    assert postgres.faults() == []


# --- tried again ---------------------------------------------------------------------------------------------


def test_a_deadlock_is_tried_again(postgres: Rig) -> None:
    """PostgreSQL ends one of the two; it begins anew and both are done."""
    postgres.tenant("ada")
    postgres.tenant("bob")
    both = threading.Barrier(2)
    tries: list[str] = []
    failed: list[BaseException] = []

    def work(first: str, second: str) -> None:
        def in_this_order(tx: Tx) -> None:
            tries.append(first)
            tx.locked("SELECT name FROM tenant WHERE name = ?", first)
            if len(tries) <= 2:
                both.wait(60)
            tx.locked("SELECT name FROM tenant WHERE name = ?", second)
            tx.run("UPDATE tenant SET weight = weight + 1 WHERE name = ?", second)

        try:
            postgres.ledger.engine.write(in_this_order, durable=True)
        except BaseException as e:
            failed.append(e)

    threads = [
        threading.Thread(target=work, args=names, daemon=True) for names in (("ada", "bob"), ("bob", "ada"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert (
        len(tries) >= 3
    )  # one of them was ended at least once; on a crowded machine it may meet the other again
    assert postgres.sql("SELECT weight FROM tenant") == [(101,), (101,)]


@pytest.mark.parametrize("code", ["40001", "40P01", "55P03"])
def test_what_is_to_be_tried_again_is_and_not_for_ever(postgres: Rig, code: str) -> None:
    tries: list[int] = []

    def refused_by_the_server(until: int):
        def work(tx: Tx) -> str:
            tries.append(1)
            if len(tries) < until:
                tx.run(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$")
            return "done"

        return work

    assert postgres.ledger.engine.write(refused_by_the_server(4), durable=True) == "done"
    assert len(tries) == 4
    with pytest.raises(Disconnected, match="nothing was changed"):
        postgres.ledger.engine.write(refused_by_the_server(10**6), durable=True, patience_us=100_000)


@pytest.mark.parametrize("kind", ["hosts", "said"])
def test_of_several_addresses_the_one_that_writes_is_asked_for(kind: str) -> None:
    from sublet.ledger.engines.postgres.connection import connection_options

    url = "postgresql://sublet@one,two/ledger"
    if kind == "hosts":
        assert connection_options(url)["target_session_attrs"] == "read-write"
        assert "target_session_attrs" not in connection_options("postgresql://sublet@one/ledger")
    else:
        assert "target_session_attrs" not in connection_options(f"{url}?target_session_attrs=primary")
        assert "tcp_user_timeout" not in connection_options(f"{url}?tcp_user_timeout=1000")
        assert connection_options(url)["tcp_user_timeout"] == 10_000


def test_one_that_does_not_answer_is_passed_over(
    postgres: Rig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    nobody = tmp_path_factory.mktemp("nobody")
    head, _, rest = postgres.url.partition("host=")
    ledger = open_ledger(f"{head}host={nobody},{rest}", HostClock())
    assert ledger.tenants() == []
    ledger.close()
