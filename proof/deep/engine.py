"""The ledger's engine of a simulated world: SQLite in memory, whose unsynced end a crash may lose.

Rules of this file:
- The verbs, the transactions' face (`SqliteTx`) and the schema are the ledger's own. What is replaced is where the bytes lie.
- A verb that is not durable stays in an open transaction, as a savepoint; a durable one commits everything before it. A crash keeps
  some first part of the open ones: that is what a write-ahead log promises, and no more.
- The failpoints of the real engine are passed at the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import apsw

from sublet.core.journal.chain import GENESIS
from sublet.core.leasing.policy import Policy
from sublet.ledger.engines.sqlite.connection import translated
from sublet.ledger.engines.sqlite.engine import SqliteTx
from sublet.ledger.schema import versions
from sublet.ledger.tx import Tx
from sublet.machine.failpoints import failpoint
from sublet.testing.clock import VirtualClock

T = TypeVar("T")

#: A log is synced at the latest after so many relaxed commits: checkpoints do it too.
MOST_OPEN = 40


class NoBell:
    """Code that waits for an answer hears none: whoever waits in a simulated world is woken by the world."""

    def listen(self, topic: str) -> None:
        return

    unlisten = listen

    def wait(self, timeout_us: int) -> bool:
        return False

    def close(self) -> None:
        return


class MemoryEngine:
    """Implements `ledger.engine.Engine`."""

    def __init__(self, clock: VirtualClock, incarnation: str) -> None:
        self.clock = clock
        self.db = apsw.Connection(":memory:")
        self.open = 0  # relaxed commits since the last sync
        self.writes = 0
        self.tx: SqliteTx | None = None  # the one that is being worked on
        self.heard: Callable[[set[str]], None] = lambda topics: None  # who hears the bell
        self._make(incarnation)

    def _make(self, incarnation: str) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        for step in versions.migrations("sqlite"):
            self.db.execute(step.sql)
            if step.number == 1:
                self.db.execute("INSERT INTO meta VALUES ('incarnation', ?)", (incarnation,))
                self.db.execute(
                    "INSERT INTO pool VALUES (1, 0, ?, ?, ?, 0, 0, ?, ?)",
                    (
                        self.clock.wall_us(),
                        self.clock.boot_id(),
                        self.clock.wall_us() - self.clock.boot_us(),
                        GENESIS,
                        Policy().to_text(),
                    ),
                )
        # Drawn by SQLite itself, which knows no seed.
        self.db.execute("UPDATE meta SET value = ? WHERE key = 'ledger_id'", (incarnation * 2,))
        self.db.execute("COMMIT")

    # transactions

    def write(self, work: Callable[[Tx], T], *, durable: bool, patience_us: int | None = None) -> T:
        failpoint("before_begin")
        execute = self.db.execute
        if not self.open:
            execute("BEGIN IMMEDIATE")
        name = f"relaxed{self.open}"
        execute(f"SAVEPOINT {name}")
        try:
            with translated:
                tx = self.tx = SqliteTx(self.db, self.clock)
                result = work(tx)
                tx.flush()
                failpoint("before_commit")
        except BaseException:
            if self.open:
                execute(f"ROLLBACK TO {name}")
                execute(f"RELEASE {name}")
            else:
                execute("ROLLBACK")
            raise
        finally:
            self.tx = None
        self.open += 1
        self.writes += 1
        if durable or self.open >= MOST_OPEN:
            self.barrier()
        failpoint("after_commit_before_reply")
        if tx.rings:
            self.ring(tx.rings)
        return result

    def write_restored(self, work: Callable[[Tx, int], T]) -> T:
        return self.write(lambda tx: work(tx, tx.pool.epoch), durable=True)

    def read(self, work: Callable[[Tx], T], *, patience_us: int | None = None) -> T:
        return work(SqliteTx(self.db, self.clock))

    def now(self) -> int:
        return self.read(lambda tx: tx.now)

    def keep_stamp(self, folder: Path) -> None:
        return

    def confirm(self, sql: str, *params: Any) -> tuple[Any, ...] | None:
        self.barrier()
        found = self.rows(sql, *params)
        return found[0] if found else None

    def barrier(self) -> None:
        if self.open:
            self.db.execute("COMMIT")
            self.open = 0

    # what befalls it

    def crash(self, survivors: int) -> int:
        """Power off, and on again: of the commits that were not synced the first so many are there. How many are lost."""
        lost = self.open - survivors
        if lost > 0:
            self.db.execute(f"ROLLBACK TO relaxed{survivors}")
        self.barrier()
        return max(0, lost)

    def backup(self) -> bytes:
        self.barrier()
        return bytes(self.db.serialize("main"))

    def put_back(self, copy: bytes) -> None:
        if self.open:
            self.db.execute("ROLLBACK")
            self.open = 0
        self.db.deserialize("main", copy)

    def rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Past every rule, for whoever checks."""
        return self.db.execute(sql, params).fetchall()

    # the rest of the port

    def ring(self, topics: set[str]) -> None:
        self.heard(topics)

    def bell(self) -> NoBell:
        return NoBell()

    def unstick(self) -> str:
        return ""

    def describe(self) -> dict[str, str]:
        return {"engine": f"SQLite {apsw.sqlite_lib_version()} in memory"}

    def close(self) -> None:
        self.db.close()
