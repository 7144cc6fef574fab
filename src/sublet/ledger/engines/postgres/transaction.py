"""One transaction on PostgreSQL: statements, locks, and the time it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sublet.core.leasing.stamp import LedgerState
from sublet.ledger.engines.postgres.connection import LedgerConnection
from sublet.ledger.engines.postgres.psycopg_import import psycopg
from sublet.ledger.tx import PoolRow, Row

STREAMED_ROWS = 2000  # fetched at a time of what may be millions
READER_IDLE = "10min"  # between two fetches of a transaction that only reads

_statements: dict[str, str] = {}


def placed(sql: str) -> str:
    found = _statements.get(sql)
    if found is None:
        found = _statements[sql] = sql.replace("?", "%s")
    return found


class PostgresTx:
    """Implements `ledger.tx.Tx`."""

    def __init__(
        self,
        connection: LedgerConnection,
        *,
        writing: bool,
        again: bool = False,
        check: Callable[[LedgerState], None] = lambda state: None,
    ) -> None:
        """`check` is called with the state in which a transaction that writes finds the pool."""
        self.rings: set[str] = set()
        self.again = again
        self._wrote = False
        self._connection = connection
        self._writing = writing
        self._pool: PoolRow | None = None
        self._now: int | None = None
        self._streams = 0
        self._check = check

    def rows(self, sql: str, *params: object) -> list[Row]:
        return self._connection.execute(placed(sql), params).fetchall()

    def row(self, sql: str, *params: object) -> Row | None:
        return self._connection.execute(placed(sql), params).fetchone()

    def stream(self, sql: str, *params: object) -> Iterator[Row]:
        if not self._writing and not self._streams:
            # Whoever reads much takes time between two fetches. It holds no lock that others wait for.
            self._connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{READER_IDLE}'")
        self._streams += 1
        with self._connection.cursor(name=f"sublet_stream_{self._streams}") as cursor:
            cursor.itersize = STREAMED_ROWS
            yield from cursor.execute(placed(sql), params)

    def locked(self, sql: str, *params: object, of: str = "") -> Row | None:
        found = self.row(f"{sql} FOR UPDATE{of and f' OF {of}'}", *params)
        if self._now is not None and not self._wrote:
            # It may have waited for this lock: the time known before is a time in the past. Once a
            # transaction writes, its time stands still.
            self._now = max(self._now, self._clock())
        return found

    def run(self, sql: str, *params: object) -> int:
        self._wrote = True
        return self._connection.execute(placed(sql), params).rowcount

    def run_many(self, sql: str, rows: Sequence[Sequence[object]]) -> int:
        self._wrote = True
        with self._connection.cursor() as cursor:
            cursor.executemany(placed(sql), rows)
            return cursor.rowcount

    def run_all(self, sql: str, rows: Sequence[Sequence[object]]) -> bool:
        with self._connection.transaction() as part:
            if self.run_many(sql, rows) == len(rows):
                return True
            raise psycopg.Rollback(part)
        return False

    def free_rows(self, sql: str, *params: object) -> list[Row]:
        return self.rows(f"{sql} FOR UPDATE SKIP LOCKED", *params)

    @property
    def pool(self) -> PoolRow:
        if self._pool is None:
            find = self.locked if self._writing else self.row
            row = find(
                "SELECT epoch, waiting, journal_seq, journal_hash, policy, clock_us FROM pool WHERE id = 1"
            )
            assert row is not None
            if self._writing:
                self._check(LedgerState(row[0], row[2], 0))
            self._pool = PoolRow(*row[:5])
            self._now = max(row[5], self._clock())
        return self._pool

    @property
    def state(self) -> LedgerState | None:
        """The state this transaction gave the ledger; None if it left the pool alone."""
        pool = self._pool
        return LedgerState(pool.epoch, pool.journal_seq, 0) if pool is not None and pool.dirty else None

    @property
    def now(self) -> int:
        if self._now is None:
            self._now = self._clock()
        return self._now

    def others(self) -> tuple[int, int]:
        row = self.row(
            "SELECT pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint FROM "
            "pg_current_snapshot() s"
        )
        assert row is not None
        return int(row[0]), int(row[1])

    def _clock(self) -> int:
        row = self.row("SELECT sublet_now()")
        assert row is not None
        return int(row[0])

    def flush(self) -> None:
        pool = self._pool
        if pool is not None and pool.dirty:
            self.run(
                "UPDATE pool SET clock_us = ?, epoch = ?, waiting = ?, journal_seq = ?, journal_hash = ?, "
                "policy = ? "
                "WHERE id = 1",
                self.now,
                pool.epoch,
                pool.waiting,
                pool.journal_seq,
                pool.journal_hash,
                pool.policy_text,
            )
