"""Writing refusals into the journal, at most so many of one kind in a minute: see `core.journal.refusals`."""

from __future__ import annotations

from sublet.core.journal.refusals import SPAN_US, SUMMED, RefusalTally, count_refusal, is_over
from sublet.ledger.tx import Tx, write_main

_COLUMNS = "tenant, kind, code, since, counted, more"


def write_refusal(tx: Tx, kind: str, tenant: str, subject: str, code: str, reason: str) -> None:
    """Journal one refusal, by itself or in the sum of its minute. Takes the pool's lock."""
    _ = tx.pool
    row = tx.row(
        f"SELECT {_COLUMNS} FROM refusal_tally WHERE tenant = ? AND kind = ? AND code = ?", tenant, kind, code
    )
    known = RefusalTally(since=row[3], rows=row[4], more=row[5]) if row is not None else None
    if known is not None and is_over(known, tx.now):
        _sum_up(tx, tenant, kind, code, known)
        known = None
    tally, by_itself = count_refusal(known, tx.now)
    tx.run(
        f"INSERT INTO refusal_tally ({_COLUMNS}) VALUES (?,?,?,?,?,?) ON CONFLICT (tenant, kind, code) DO "
        "UPDATE SET counted = excluded.counted, more = excluded.more",
        tenant,
        kind,
        code,
        tally.since,
        tally.rows,
        tally.more,
    )
    if by_itself:
        write_main(tx, kind, tenant, subject, {"code": code, "reason": reason})


def sum_up_refusals(tx: Tx) -> None:
    """Write the sums whose minute is over. Called by every tick."""
    _ = tx.pool
    for tenant, kind, code, since, rows, more in tx.rows(
        f"SELECT {_COLUMNS} FROM refusal_tally WHERE since <= ? ORDER BY tenant, kind, code", tx.now - SPAN_US
    ):
        _sum_up(tx, tenant, kind, code, RefusalTally(since=since, rows=rows, more=more))


def _sum_up(tx: Tx, tenant: str, kind: str, code: str, tally: RefusalTally) -> None:
    tx.run("DELETE FROM refusal_tally WHERE tenant = ? AND kind = ? AND code = ?", tenant, kind, code)
    if tally.more:
        write_main(
            tx,
            SUMMED,
            tenant,
            kind,
            {"refused": kind, "code": code, "count": tally.more, "since": tally.since},
        )
