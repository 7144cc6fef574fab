"""Reading the journal back: verify it, follow it, seal it.

Rules of this file:
- Rows that a prune archived are not there, whether they were swept up yet or not.
"""

from __future__ import annotations

from collections.abc import Iterator

from sublet.core.history import audit
from sublet.core.journal import MAIN, Entry, StrandEnd, clerk_strand, job_strand, lease_strand
from sublet.core.verifying import Owner, Walk
from sublet.ledger.archive import Archive
from sublet.ledger.pruning import carried_of, mark_of
from sublet.ledger.tx import Row, Tx, write_main
from sublet.ports.ledger import Followed, Verification

_COLUMNS = "strand, seq, at, kind, tenant, subject, body, hash"


def _entry(row: Row) -> Entry:
    return Entry(*row)


def verify(tx: Tx, archive: Archive) -> Verification:
    """Walk every strand from its anchor to the end its owning row names; then, if nothing was tampered with, whether the rules were kept.

    After a prune each strand begins where the prune left it; with the archive, at its first row. Rows are read one at a time, in three walks."""
    mark, carried = mark_of(tx), carried_of(tx)
    pool = tx.row("SELECT journal_seq, journal_hash FROM pool WHERE id = 1")
    assert pool is not None
    walk = Walk(
        _owners(tx, mark.upto),
        StrandEnd(pool[0], pool[1]),
        carried=carried,
        files=archive.digests() if archive else None,
        settled=mark.settled,
    )
    for entry in _stored(tx, archive, mark.upto, main=True):
        walk.see_main(entry)
    for entry in _stored(tx, archive, mark.upto, main=False):
        walk.see(entry)
    faults = list(walk.faults())
    if not faults:  # a history that was tampered with proves nothing about the rules
        capacities = {r[0]: r[1] for r in tx.rows("SELECT id, capacity_bytes FROM device")}
        pruned = bool(carried) and not archive
        faults += audit(_stored(tx, archive, mark.upto), capacities, pruned=pruned)
    return Verification(
        rows=walk.rows, strands=walk.strands, head=pool[1], faults=tuple(faults), pruned_before=mark.before
    )


def _stored(tx: Tx, archive: Archive, upto: int, *, main: bool | None = None) -> Iterator[Entry]:
    """The main strand, the others, or all: in stored order, not in that of their numbers, so that a swap of two rows shows."""
    yield from (e for e in archive.entries() if main is None or (e.strand == MAIN) is main)
    only = {None: "", True: f"AND strand = '{MAIN}'", False: f"AND strand <> '{MAIN}'"}[main]
    for row in tx.stream(f"SELECT {_COLUMNS} FROM journal WHERE id > ? {only} ORDER BY id", upto):
        yield _entry(row)


def _owners(tx: Tx, upto: int) -> dict[str, Owner]:
    """By strand: leases that no prune has archived, jobs, clerks."""
    leases = tx.stream(
        "SELECT id, strand_seq, strand_hash, strand_anchor FROM lease "
        "WHERE NOT EXISTS (SELECT 1 FROM leaving x WHERE x.lease_id = lease.id AND x.upto <= ?) ORDER BY id",
        upto,
    )
    found = {lease_strand(r[0]): Owner(StrandEnd(r[1], r[2]), r[3]) for r in leases}
    for r in tx.stream("SELECT job, strand_seq, strand_hash, strand_anchor FROM head ORDER BY job"):
        found[job_strand(r[0])] = Owner(StrandEnd(r[1], r[2]), r[3])
    for r in tx.stream("SELECT id, strand_seq, strand_hash, strand_anchor FROM clerk ORDER BY id"):
        found[clerk_strand(r[0])] = Owner(StrandEnd(r[1], r[2]), r[3])
    return found


def tail(tx: Tx, after: int, limit: int) -> list[tuple[int, Entry]]:
    if after >= 0:
        found = tx.rows(f"SELECT id, {_COLUMNS} FROM journal WHERE id > ? ORDER BY id LIMIT ?", after, limit)
    else:
        newest = tx.rows(f"SELECT id, {_COLUMNS} FROM journal ORDER BY id DESC LIMIT ?", limit)
        found = list(reversed(newest))
    return [(r[0], _entry(r[1:])) for r in found]


def follow(tx: Tx, after: int, limit: int) -> Followed:
    running_from, begun_before = tx.others()
    rows = tuple(tail(tx, max(0, after), limit))
    return Followed(at=tx.now, rows=rows, running_from=running_from, begun_before=begun_before)


def seal(tx: Tx) -> str:
    """Write where the strand of every job and every clerk stands into the main strand; returns the main strand's end to keep elsewhere."""
    _ = tx.pool
    jobs = {r[0]: [r[1], r[2]] for r in tx.rows("SELECT job, strand_seq, strand_hash FROM head ORDER BY job")}
    body: dict[str, object] = {"jobs": jobs}
    clerks = {
        str(r[0]): [r[1], r[2]]
        for r in tx.rows("SELECT id, strand_seq, strand_hash FROM clerk WHERE strand_seq > 0")
    }
    if clerks:
        body["clerks"] = clerks
    return write_main(tx, "journal.sealed", "", "journal", body)
