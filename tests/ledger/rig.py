"""Both engines behind one face: a ledger, a way to move its time, and a way round it into its tables."""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw

from sublet.core.leasing.lease import Holder, LeaseRecord, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import Commit
from sublet.ledger.engines.sqlite.engine import open_ledger as open_sqlite
from sublet.ledger.ledger import SqlLedger
from sublet.ports.ledger import Answer, FoundDevice, LeaseKey
from sublet.processes.clock import HostClock
from sublet.testing.clock import VirtualClock

ENGINES = ["sqlite", "postgres"]
TABLES = [
    "meta",
    "pool",
    "tenant",
    "former_tenant",
    "token",
    "studio_session",
    "session_lease",
    "price",
    "stored_version",
    "host",
    "device",
    "lease",
    "slice",
    "seat",
    "head",
    "kept_version",
    "effect",
    "block",
    "queue",
    "consumer",
    "item",
    "journal",
    "refusal_tally",
    "pruned",
    "pruned_commit",
    "leaving",
    "used_day",
]
SECOND = 1_000_000
MINUTE = 60 * SECOND
HERE = "node-a"

_numbers = itertools.count(1)


class Rig:
    """One ledger on one engine, with the few things a test does to it again and again."""

    def __init__(
        self,
        engine: str,
        url: str,
        open_again: Callable[[], SqlLedger],
        advance: Callable[[SqlLedger, int], None],
        sql: Callable[[str, tuple[object, ...]], list[tuple[Any, ...]]],
        clock: VirtualClock | None = None,
    ) -> None:
        self.engine = engine
        self.url = url
        self.clock = clock
        self._open, self._advance, self._sql = open_again, advance, sql
        self._opened: list[SqlLedger] = []
        self.secrets: dict[str, str] = {}
        self.ledger = self.open()

    def open(self) -> SqlLedger:
        """Another ledger object on the same store, as another process would have."""
        ledger = self._open()
        skew = getattr(getattr(self, "ledger", None), "engine", None)
        if skew is not None and hasattr(skew, "skew_us"):
            ledger.engine.skew_us = skew.skew_us
        self._opened.append(ledger)
        return ledger

    def advance(self, us: int) -> None:
        self._advance(self.ledger, us)

    def while_heard(self, us: int, *hosts: str) -> None:
        """Time passes in which the wardens of these hosts are heard, and no others."""
        step = self.ledger.policy().host_silence_us // 2
        for passed in range(0, us, step):
            self.advance(min(step, us - passed))
            for host in hosts:
                self.ledger.beat_host(host)

    def later(self, us: int, *waiting: Answer) -> None:
        """Time passes while the host's warden and these waiters give signs of life."""
        self.advance(us)
        self.ledger.beat_host(HERE)
        for answer in waiting:
            self.ledger.attend(answer.lease.id, self.secret(answer), explain=False)

    def sql(self, text: str, *params: object) -> list[tuple[Any, ...]]:
        """Straight into the tables, past every rule."""
        return self._sql(text, params)

    def dump(self, *, without: tuple[str, ...] = ()) -> dict[str, list[tuple[Any, ...]]]:
        return {t: sorted(self.sql(f"SELECT * FROM {t}"), key=repr) for t in TABLES if t not in without}

    def state(self) -> dict[str, list[tuple[Any, ...]]]:
        """Everything that is true, without the record of how it came to be."""
        found = self.dump(without=("journal", "refusal_tally", "pool"))
        return {**found, "pool": self.sql("SELECT epoch, waiting, policy FROM pool")}

    @contextlib.contextmanager
    def only_journals(self, *kinds: str) -> Iterator[None]:
        """What happens inside changes nothing, and leaves exactly these rows in the journal."""
        before, last = self.state(), self._last_row()
        yield
        after = self.state()
        for table, rows in before.items():
            assert after[table] == rows, f"{table} changed"
        added = self.sql("SELECT kind FROM journal WHERE id > ? ORDER BY id", last)
        assert [kind for (kind,) in added] == list(kinds)

    def _last_row(self) -> int:
        return int(self.sql("SELECT coalesce(max(id), 0) FROM journal")[0][0])

    def close(self) -> None:
        for ledger in self._opened:
            ledger.close()

    # arranging

    def device(self, name: str = "gpu0", gb: int = 80, host: str = HERE) -> None:
        self.devices({name: gb}, host=host, complete=False)

    def devices(self, sizes: dict[str, int], *, host: str = HERE, complete: bool = True) -> None:
        found = [
            FoundDevice(id=name, driver="host", ordinal=i, name="test device", capacity_bytes=size)
            for i, (name, size) in enumerate(sizes.items())
        ]
        self.ledger.report_host(host, found, complete=complete)

    def tenant(self, name: str = "ada", **limits: int) -> None:
        self.ledger.add_tenant(Tenant(name=name, **limits), actor="test")

    def policy(self, **knobs: int) -> None:
        self.ledger.set_policy(replace(self.ledger.policy(), **knobs), actor="test")

    def ask(
        self,
        vram: int = 10,
        *,
        tenant: str = "ada",
        lease_id: str = "",
        pid: int = 0,
        host: str = HERE,
        ledger: SqlLedger | None = None,
        **request: Any,
    ) -> Answer:
        lease_id = lease_id or f"lease-{next(_numbers):05d}"
        self.secrets.setdefault(lease_id, f"secret-{uuid.uuid4().hex}")
        wanted = Request(tenant=tenant, vram_bytes=vram, **{"ttl_us": 5 * MINUTE, **request})
        return (ledger or self.ledger).acquire(
            lease_id, self.secrets[lease_id], wanted, Holder(host=host, pid=pid)
        )

    def key(self, lease: LeaseRecord | Answer) -> LeaseKey:
        lease = lease.lease if isinstance(lease, Answer) else lease
        return LeaseKey(lease.id, lease.epoch, self.secrets[lease.id])

    def look(self, lease: LeaseRecord | Answer | str) -> LeaseRecord:
        if isinstance(lease, Answer):
            lease = lease.lease
        return self.ledger.look(lease if isinstance(lease, str) else lease.id).lease

    def secret(self, answer: Answer) -> str:
        return self.secrets[answer.lease.id]

    def release(self, answer: Answer) -> bool:
        return self.ledger.release(answer.lease.id, self.secret(answer))

    def commit(self, answer: Answer, step: int, *, job: str = "train", **over: Any) -> Any:
        return self.ledger.commit(self.key(answer), a_step(step, job=job, **over))

    def kinds(self, subject: str) -> list[str]:
        """What the journal says of one subject, oldest first."""
        return [r[0] for r in self.sql("SELECT kind FROM journal WHERE subject = ? ORDER BY id", subject)]

    def faults(self) -> list[str]:
        return [f"{f.strand}#{f.seq}: {f.what}" for f in self.ledger.verify().faults]


def a_step(step: int, *, job: str = "train", **over: Any) -> Commit:
    values: dict[str, Any] = {
        "job": job,
        "key": f"{job}:{step}",
        "step": step,
        "fingerprint": f"print-{step}",
        "expected_version": step - 1,
        "digest": f"digest-{step}",
        "cursor": f"cursor-{step}",
        "outcome": f"outcome-{step}",
    }
    return Commit(**{**values, **over})


def sqlite_rig(folder: Path) -> Rig:
    clock = VirtualClock()
    path = folder / f"ledger-{uuid.uuid4().hex[:8]}.db"

    def sql(text: str, params: tuple[object, ...]) -> list[tuple[Any, ...]]:
        db = apsw.Connection(str(path))
        try:
            db.set_busy_timeout(5000)
            return db.execute(text, params).fetchall()
        finally:
            db.close()

    return Rig(
        "sqlite",
        f"sqlite:{path}",
        lambda: open_sqlite(f"sqlite:{path}", clock),
        lambda _, us: clock.advance(us),
        sql,
        clock,
    )


#: All that a schema is made of, in one line of text, without its name and its rows.
_STRUCTURE = """
SELECT md5(string_agg(part, E'\\n' ORDER BY part)) FROM (SELECT replace(part, %(name)s, '') AS part FROM (
  SELECT format('%%s %%s %%s %%s %%s', c.relkind, c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull) AS part
    FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
   WHERE c.relnamespace = to_regnamespace(%(name)s)
  UNION ALL SELECT pg_get_indexdef(indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
   WHERE c.relnamespace = to_regnamespace(%(name)s)
  UNION ALL SELECT format('%%s %%s', conname, pg_get_constraintdef(oid)) FROM pg_constraint
   WHERE connamespace = to_regnamespace(%(name)s)
  UNION ALL SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = to_regnamespace(%(name)s)
  UNION ALL SELECT tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
   WHERE c.relnamespace = to_regnamespace(%(name)s)
) AS named) AS parts
"""
#: Schemas nobody uses at the moment, by their server: making one takes ten times as long as emptying one.
_handed_on: dict[str, list[PostgresSchema]] = {}


class PostgresSchema:
    """A schema for one test at a time. The next one gets it as a new one would be, or not at all."""

    def __init__(self, server_url: str) -> None:
        self.name = f"t_{uuid.uuid4().hex[:12]}"
        self.url = f"{server_url}&sublet_schema={self.name}"
        self.server_url = server_url
        self.connection = self.connect()
        self._structure = ""
        self._first_rows: dict[str, list[tuple[Any, ...]]] = {}
        self._taken_at = self._now()

    @classmethod
    def take(cls, server_url: str) -> PostgresSchema:
        free = _handed_on.setdefault(server_url, [])
        if not free:
            return cls(server_url)
        found = free.pop()
        found._taken_at = found._now()
        return found

    def connect(self, **options: Any) -> Any:
        import psycopg

        connection = psycopg.connect(self.server_url, autocommit=True, **options)
        connection.execute(f'SET search_path = "{self.name}"')
        return connection

    def sql(self, text: str, params: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        done = self.connection.execute(text.replace("?", "%s"), params)
        return done.fetchall() if done.description else []

    def remember(self) -> None:
        """This is how a new one is: called when its ledger was made, before anything was done to it."""
        if not self._structure:
            self._structure = self.structure()
            self._first_rows = {table: self.sql(f'SELECT * FROM "{table}"') for table in self._tables()}

    def empty(self) -> None:
        """Its rows as they were at first."""
        with self.connection.transaction():
            self.connection.execute("SET LOCAL lock_timeout = '2s'")
            self.connection.execute("; ".join(f'DELETE FROM "{table}"' for table in self._tables()))
            for table, rows in self._first_rows.items():
                for row in rows:
                    self.connection.execute(
                        f'INSERT INTO "{table}" VALUES ({", ".join(["%s"] * len(row))})', row
                    )
            self.connection.execute(
                "SELECT setval(format('%%I.%%I', schemaname, sequencename)::regclass, start_value, false) "
                "FROM pg_sequences WHERE schemaname = %s",
                (self.name,),
            )

    def hand_on(self) -> None:
        """Only if it is built as it was and nobody of this test is connected any more; else it is dropped."""
        import psycopg

        try:
            if self._structure and self._left_alone() and self.structure() == self._structure:
                self.empty()
                self.connection.execute("RESET ALL")
                self.connection.execute(f'SET search_path = "{self.name}"')
                _handed_on[self.server_url].append(self)
                return
        except psycopg.Error:
            pass
        self.drop()

    def drop(self) -> None:
        import psycopg

        self.connection.close()
        with psycopg.connect(self.server_url, autocommit=True) as connection:
            connection.execute("SET lock_timeout = '5s'")
            connection.execute("SET client_min_messages = warning")
            connection.execute(f'DROP SCHEMA IF EXISTS "{self.name}" CASCADE')

    def _now(self) -> Any:
        return self.sql("SELECT clock_timestamp()")[0][0]

    def _tables(self) -> list[str]:
        return [t for (t,) in self.sql("SELECT tablename FROM pg_tables WHERE schemaname = ?", (self.name,))]

    def structure(self) -> str:
        return str(self.connection.execute(_STRUCTURE, {"name": self.name}).fetchone()[0])

    def _left_alone(self) -> bool:
        """A connection that was closed takes a moment to be gone at the server."""
        give_up = time.monotonic() + 1
        while time.monotonic() < give_up:
            [(others,)] = self.sql(
                "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' "
                "AND backend_start >= ? AND pid <> pg_backend_pid()",
                (self._taken_at,),
            )
            if not others:
                return True
            time.sleep(0.002)
        return False


def postgres_rig(server_url: str, *, patience_us: int = 10_000_000) -> tuple[Rig, PostgresSchema]:
    schema = PostgresSchema.take(server_url)
    rig = rig_on(schema, patience_us=patience_us)
    schema.remember()
    return rig, schema


def rig_on(schema: PostgresSchema, *, patience_us: int = 10_000_000) -> Rig:
    from sublet.ledger.engines.postgres.engine import open_ledger

    def advance(ledger: SqlLedger, us: int) -> None:
        ledger.engine.skew_us += us

    return Rig(
        "postgres",
        schema.url,
        lambda: open_ledger(schema.url, HostClock(), patience_us=patience_us),
        advance,
        schema.sql,
    )
