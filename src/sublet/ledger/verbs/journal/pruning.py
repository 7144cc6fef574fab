"""Pruning: removing journal rows, leases, items and sessions that are older than somebody wants to keep.

Rules of this file:
- Nothing is removed that is not written down first: journal rows are in a synced file before a row of the
  main strand says that they went, and what a lease used is in the sums of its day in the transaction that
  removes it (T4).
- One short transaction is the prune (`_mark`). From it on every reader begins after the rows that went, and
  removing them is only sweeping up: batches in any order, killed anywhere, taken up again by the next prune.
- No transaction here holds the pool's lock for longer than a batch. What is read for long is read in a
  snapshot.
- Effects, heads, consumers and queues stay: who asks again for what was done long ago is still told that it
  was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from sublet.core.billing.goodput import CommitUse, DayUse, day_uses, stretches
from sublet.core.billing.price import PriceList
from sublet.core.errors import BadInput, JournalBroken, NotFound
from sublet.core.journal.chain import MAIN, Entry, StrandEnd, lease_strand
from sublet.core.journal.pruning import PRUNED, Beginning, carried_digest
from sublet.core.values import HOUR_US
from sublet.ledger.engine import Engine
from sublet.ledger.rows import SELECT_LEASE, lease_of
from sublet.ledger.tx import Row, Tx, write_main
from sublet.ledger.verbs.billing import goodput, prices
from sublet.ledger.verbs.journal import archive
from sublet.ledger.verbs.queues.queues import by_id
from sublet.ledger.verbs.studio import sessions
from sublet.ports.ledger import Pruned

#: A row may be taken and not yet be visible for as long as a transaction lasts. None lasts an hour.
LEAST_KEPT_US = HOUR_US
ROWS_A_ROUND = 50_000
ROWS_A_BATCH = 5_000
LEASES_A_BATCH = 500
ITEMS_A_BATCH = 1_000

_ROWS = (
    "SELECT id, strand, seq, at, kind, tenant, subject, body, hash FROM journal "
    "WHERE id > ? ORDER BY id LIMIT ?"
)
_PUT_META = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
#: How to find the row that owns a strand, by the word before the strand's name.
_OWNERS = {
    "lease": "SELECT id, strand_anchor FROM lease WHERE id IN ",
    "job": "SELECT job, strand_anchor FROM head WHERE job IN ",
    "consumer": "SELECT id, strand_anchor FROM consumer WHERE id IN ",
}
#: A lease that is over, and of no session whose usage may still be asked for.
_OVER = (
    "settled_at > 0 AND settled_at < ? AND NOT EXISTS (SELECT 1 FROM session_lease x WHERE x.lease_id = "
    "lease.id) "
    "AND NOT EXISTS (SELECT 1 FROM studio_session s WHERE s.lease_id = lease.id)"
)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the journal was cut last."""

    upto: int = 0  # the number of the last row that went
    before: int = 0  # the instant that was asked for
    settled: int = 0  # leases that were over before it may be gone


def mark_of(tx: Tx) -> Mark:
    found = {
        r[0]: r[1]
        for r in tx.rows(
            "SELECT key, value FROM meta WHERE key IN ('pruned_upto', 'pruned_before', 'pruned_settled')"
        )
    }
    return Mark(*(int(found.get(f"pruned_{name}", 0)) for name in ("upto", "before", "settled")))


def carried_of(tx: Tx) -> dict[str, StrandEnd]:
    return {r[0]: StrandEnd(r[1], r[2]) for r in tx.rows("SELECT strand, seq, hash FROM pruned")}


def day_uses_of(tx: Tx, tenant: str, job: str, since_day: int) -> Iterator[DayUse]:
    for row in tx.rows(
        "SELECT day, tenant, job, tier, used FROM used_day WHERE day >= ? ORDER BY day", since_day
    ):
        if (not tenant or row[1] == tenant) and (not job or row[2] == job):
            yield DayUse(day=row[0], tenant=row[1], job=row[2], tier=row[3], **json.loads(row[4]))


def prune(engine: Engine, *, keep_us: int, into: Path, actor: str, dry_run: bool) -> Pruned:
    if keep_us < LEAST_KEPT_US:
        raise BadInput("what is younger than an hour is not pruned", remedy="keep more, such as --keep 90d")
    before = engine.now() - keep_us
    if dry_run:
        return engine.read(lambda tx: _would(tx, before))
    _sweep(engine)  # what an earlier one left
    items = sum(_purge_items(engine, before, actor))
    dropped = engine.write(lambda tx: sessions.drop(tx, before), durable=True)
    rows, leases, files = 0, 0, []
    while (found := engine.read(lambda tx: _look(tx, before))) is not None:
        entries, ledger = _entries(engine, found), engine.read(_ledger_id)
        path, digest = archive.write(into, ledger, found.after + 1, found.upto, entries)
        for at in range(0, len(found.leaving), LEASES_A_BATCH):
            part = found.leaving[at : at + LEASES_A_BATCH]
            engine.write(partial(_announce, upto=found.upto, part=part), durable=False)
        marked = partial(_mark, found=found, before=before, file=path.name, digest=digest, actor=actor)
        if not engine.write(marked, durable=True):
            continue  # another prune was here first: look again
        _sweep(engine)
        rows, leases = rows + found.rows, leases + len(found.leaving)
        files.append(str(path))
    return Pruned(before=before, rows=rows, leases=leases, items=items, sessions=dropped, files=tuple(files))


def _ledger_id(tx: Tx) -> str:
    row = tx.row("SELECT value FROM meta WHERE key = 'ledger_id'")
    return str(row[0]) if row else ""


def _would(tx: Tx, before: int) -> Pruned:
    mark = mark_of(tx)

    def count(sql: str, *params: object) -> int:
        row = tx.row(sql, *params)
        return int(row[0]) if row else 0

    return Pruned(
        before=before,
        rows=count("SELECT count(*) FROM journal WHERE id > ? AND at < ?", mark.upto, before),
        leases=count(f"SELECT count(*) FROM lease WHERE {_OVER}", before),
        items=count("SELECT count(*) FROM item WHERE state = 'done' AND done_at < ?", before),
        sessions=count("SELECT count(*) FROM studio_session WHERE ended_at > 0 AND ended_at < ?", before),
    )


# --- items --------------------------------------------------------------------------------------------------


def _purge_items(engine: Engine, before: int, actor: str) -> Iterator[int]:
    queues = engine.read(lambda tx: [r[0] for r in tx.rows("SELECT id FROM queue ORDER BY id")])
    for queue in queues:
        some = partial(_purge_some, queue=queue, before=before, actor=actor)
        while gone := engine.write(some, durable=True):
            yield gone


def _purge_some(tx: Tx, queue: int, before: int, actor: str) -> int:
    found = by_id(tx, queue)
    if isinstance(found, NotFound):
        return 0
    rows = tx.free_rows(
        "SELECT id FROM item WHERE queue = ? AND state = 'done' AND done_at < ? LIMIT ?",
        queue,
        before,
        ITEMS_A_BATCH,
    )
    if not rows:
        return 0
    gone = tx.run_many("DELETE FROM item WHERE id = ?", rows)
    tx.run("UPDATE queue SET purged = purged + ? WHERE id = ?", gone, queue)
    body: dict[str, object] = {"items": gone, "states": ["done"], "before": before, "by": actor}
    write_main(tx, "queue.purged", found.tenant, found.name, body)
    return gone


# --- one round ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A beginning of the journal that can go, and what follows from it."""

    after: int
    upto: int
    settled: int
    rows: int
    carried: dict[str, StrandEnd]
    changed: dict[str, StrandEnd]
    leaving: list[tuple[str, str]]  # lease, and what it used
    commits: list[tuple[object, ...]]  # of leases that stay


def _look(tx: Tx, before: int) -> _Found | None:
    mark, old = mark_of(tx), carried_of(tx)
    beginning, upto = Beginning(old), 0
    commits: dict[str, list[CommitUse]] = {}
    for row in tx.stream(_ROWS, mark.upto, ROWS_A_ROUND):
        if row[3] >= before:
            break
        upto = row[0]
        beginning.see(Entry(*row[1:]))
    if beginning.faults:
        fault = beginning.faults[0]
        raise JournalBroken(
            f"nothing was pruned, the journal does not verify: {fault.strand} row {fault.seq}: {fault.what}",
            remedy="look at all of it with 'sublet journal verify'; "
            "a journal that was tampered with is evidence",
        )
    if not upto:
        return None
    for commit in goodput.commits_between(tx, mark.upto, upto):
        commits.setdefault(commit.lease, []).append(commit)
    # Rows of the main strand are in the order of their times. A lease that was settled at the time of the
    # last one that goes may have that row behind it, if the next one is of the same microsecond.
    following = tx.row("SELECT at FROM journal WHERE id > ? AND strand = 'main' ORDER BY id LIMIT 1", upto)
    same_time = following is not None and following[0] <= beginning.main_at
    settled = max(mark.settled, beginning.main_at + (not same_time))
    named = {word: sorted(_names(beginning.strands, word)) for word in _OWNERS}
    leaving = list(_leaving(tx, settled, named["lease"], commits))
    gone = {lease_strand(lease) for lease, _ in leaving}
    anchors = {
        strand: row[1]
        for word, sql in _OWNERS.items()
        for row in _by_name(tx, sql, named[word])
        if (strand := f"{word}:{row[0]}") not in gone
    }
    carried = beginning.left(anchors)
    leaving_ids = {lease for lease, _ in leaving}
    return _Found(
        after=mark.upto,
        upto=upto,
        settled=settled,
        rows=beginning.rows,
        carried=carried,
        changed={strand: end for strand, end in carried.items() if old.get(strand) != end},
        leaving=leaving,
        commits=[
            (c.lease, c.job, c.at, c.steps, c.compute_us)
            for lease, found in commits.items()
            if lease not in leaving_ids
            for c in found
        ],
    )


def _names(strands: set[str], word: str) -> Iterator[str | int]:
    for strand in strands:
        of, _, name = strand.partition(":")
        if of == word:
            yield int(name) if word == "consumer" else name


def _by_name(tx: Tx, sql: str, names: Sequence[object], rest: str = "", *params: object) -> Iterator[Row]:
    """Rows by name, a few at a time: no table of millions is walked for the thousand rows of a round."""
    for at in range(0, len(names), LEASES_A_BATCH):
        part = names[at : at + LEASES_A_BATCH]
        yield from tx.rows(f"{sql}({','.join('?' * len(part))}){rest}", *part, *params)


def _leaving(
    tx: Tx, settled: int, named: Sequence[object], commits: dict[str, list[CommitUse]]
) -> Iterator[tuple[str, str]]:
    """The leases that the rows name and that were over by then, each with what it used."""
    listed, classes = PriceList(prices.list_prices(tx)), prices.classes(tx)
    committing = {r[0] for r in tx.rows("SELECT job FROM head WHERE version > 0")}
    for row in _by_name(tx, f"{SELECT_LEASE} WHERE id IN ", named, f" AND {_OVER}", settled):
        lease = lease_of(row)
        used: list[DayUse] = []
        if lease.granted_at:
            own = [*goodput.carried_commits(tx, lease.id), *commits.get(lease.id, ())]
            parts = stretches([lease], own, since=0, now=lease.ended_at, committing=committing)
            used = day_uses(parts, listed.tariff(lease, classes) if listed else None)
        yield lease.id, json.dumps([asdict(use) for use in used], separators=(",", ":"))


def _entries(engine: Engine, found: _Found) -> list[Entry]:
    def read(tx: Tx) -> list[Entry]:
        return [
            Entry(*row[1:]) for row in tx.stream(_ROWS, found.after, ROWS_A_ROUND) if row[0] <= found.upto
        ]

    return engine.read(read)


def _announce(tx: Tx, upto: int, part: list[tuple[str, str]]) -> None:
    """Which leases will go. Until the mark is made this says nothing."""
    tx.run_many(
        "INSERT INTO leaving (lease_id, upto, used) VALUES (?,?,?) "
        "ON CONFLICT (lease_id) DO UPDATE SET upto = excluded.upto, used = excluded.used",
        [(lease, upto, used) for lease, used in part],
    )


def _mark(tx: Tx, found: _Found, before: int, file: str, digest: str, actor: str) -> bool:
    _ = tx.pool
    mark = mark_of(tx)
    if mark.upto == found.upto and tx.again:
        return True  # its answer was lost
    if mark.upto != found.after:
        return False
    for strand in carried_of(tx).keys() - found.carried.keys():
        tx.run("DELETE FROM pruned WHERE strand = ?", strand)
    if found.changed:
        tx.run_many(
            "INSERT INTO pruned (strand, seq, hash) VALUES (?,?,?) "
            "ON CONFLICT (strand) DO UPDATE SET seq = excluded.seq, hash = excluded.hash",
            [(strand, end.seq, end.hash) for strand, end in sorted(found.changed.items())],
        )
    if found.commits:
        tx.run_many(
            "INSERT INTO pruned_commit (lease_id, job, at, steps, compute_us) VALUES (?,?,?,?,?)",
            found.commits,
        )
    for name, value in (("upto", found.upto), ("before", before), ("settled", found.settled)):
        tx.run(_PUT_META, f"pruned_{name}", str(value))
    body: dict[str, object] = {
        "before": before,
        "rows": found.rows,
        "main": found.carried[MAIN].seq,
        "leases": len(found.leaving),
        "carried": carried_digest(found.carried),
        "file": file,
        "sha256": digest,
        "by": actor,
    }
    write_main(tx, PRUNED, "", "journal", body)
    return True


# --- sweeping up --------------------------------------------------------------------------------------------


def _sweep(engine: Engine) -> None:
    """Remove what the last mark says is gone, and forget what was announced for one that was never made."""
    upto = engine.read(lambda tx: mark_of(tx).upto)
    engine.write(lambda tx: tx.run("DELETE FROM leaving WHERE upto > ?", upto), durable=False)
    while engine.write(lambda tx: _remove_rows(tx, upto), durable=False):
        pass
    while engine.write(lambda tx: _remove_leases(tx, upto), durable=True):
        pass


def _remove_rows(tx: Tx, upto: int) -> int:
    return tx.run(
        "DELETE FROM journal WHERE id IN (SELECT id FROM journal WHERE id <= ? ORDER BY id LIMIT ?)",
        upto,
        ROWS_A_BATCH,
    )


def _remove_leases(tx: Tx, upto: int) -> int:
    """A lease's row, or its part in the sums: one transaction, so never both and never neither (T4)."""
    _ = tx.pool
    found = tx.rows(
        "SELECT lease_id, used FROM leaving WHERE upto <= ? ORDER BY lease_id LIMIT ?", upto, LEASES_A_BATCH
    )
    if not found:
        return 0
    sums: dict[tuple[int, str, str, str], DayUse] = {}
    for _, text in found:
        for told in json.loads(text):
            use = DayUse(**told)
            if use.key in sums:
                sums[use.key].add(use)
            else:
                sums[use.key] = use
    for (day, tenant, job, tier), use in sorted(sums.items()):
        known = tx.row(
            "SELECT used FROM used_day WHERE day = ? AND tenant = ? AND job = ? AND tier = ?",
            day,
            tenant,
            job,
            tier,
        )
        if known is not None:
            use.add(DayUse(day=day, tenant=tenant, job=job, tier=tier, **json.loads(known[0])))
        rest = {k: v for k, v in asdict(use).items() if k not in ("day", "tenant", "job", "tier")}
        tx.run(
            "INSERT INTO used_day (day, tenant, job, tier, used) VALUES (?,?,?,?,?) "
            "ON CONFLICT (day, tenant, job, tier) DO UPDATE SET used = excluded.used",
            *(day, tenant, job, tier, json.dumps(rest, separators=(",", ":"))),
        )
    ids = [(lease,) for lease, _ in found]
    for table, column in (
        ("lease", "id"),
        ("receipt", "lease_id"),
        ("pruned_commit", "lease_id"),
        ("leaving", "lease_id"),
    ):
        tx.run_many(f"DELETE FROM {table} WHERE {column} = ?", ids)
    return len(found)
