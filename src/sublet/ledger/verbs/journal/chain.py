"""Reading the journal back: verify it, follow it, seal it.

Rules of this file:
- Rows that a prune archived are not there, whether they were swept up yet or not.
"""

from __future__ import annotations

from collections.abc import Iterator

from sublet.core.journal.chain import MAIN, Entry, StrandEnd, consumer_strand, job_strand, lease_strand
from sublet.core.journal.chain_verify import ChainWalk, Owner
from sublet.core.journal.lease_audit import audit
from sublet.ledger.tx import Tx, write_main
from sublet.ledger.verbs.journal.archive import Archive
from sublet.ledger.verbs.journal.pruning import carried_of, mark_of
from sublet.ports.ledger import Followed, Verification

_COLUMNS = "strand, seq, at, kind, tenant, subject, body, hash"


def stored(tx: Tx, archive: Archive, *, strand: str = "", but: str = "") -> Iterator[Entry]:
    """The rows of one strand, of all but one, or of all, with those that were pruned. They come in stored
    order, not by sequence, so that a swap of two rows shows."""
    yield from (e for e in archive.entries() if e.strand != but and (not strand or e.strand == strand))
    sql = f"SELECT {_COLUMNS} FROM journal WHERE id > ? AND strand <> ? {'AND strand = ?' if strand else ''}"
    named = (strand,) if strand else ()
    yield from (Entry(*row) for row in tx.stream(f"{sql} ORDER BY id", mark_of(tx).upto, but, *named))


def main_end(tx: Tx) -> StrandEnd:
    pool = tx.row("SELECT journal_seq, journal_hash FROM pool WHERE id = 1")
    assert pool is not None
    return StrandEnd(pool[0], pool[1])


def verify(tx: Tx, archive: Archive) -> Verification:
    """Walk every strand from its anchor to the end its owning row names; if nothing was tampered with, check
    that the rules were kept. After a prune each strand begins where the prune left it, and with the archive
    at its first row. Rows are read one at a time, in three walks."""
    mark, carried = mark_of(tx), carried_of(tx)
    end = main_end(tx)
    walk = ChainWalk(
        _owners(tx, mark.upto),
        end,
        carried=carried,
        files=archive.digests() if archive else None,
        settled=mark.settled,
    )
    for entry in stored(tx, archive, strand=MAIN):
        walk.see_main(entry)
    for entry in stored(tx, archive, but=MAIN):
        walk.see(entry)
    faults = list(walk.faults())
    if not faults:  # a history that was tampered with proves nothing about the rules
        capacities = {r[0]: r[1] for r in tx.rows("SELECT id, capacity_bytes FROM device")}
        pruned = bool(carried) and not archive
        faults += audit(stored(tx, archive), capacities, pruned=pruned)
    return Verification(
        rows=walk.rows, strands=walk.strands, head=end.hash, faults=tuple(faults), pruned_before=mark.before
    )


def _owners(tx: Tx, upto: int) -> dict[str, Owner]:
    """The owners of strands: leases that no prune has archived, jobs, consumers."""
    leases = tx.stream(
        "SELECT id, strand_seq, strand_hash, strand_anchor FROM lease "
        "WHERE NOT EXISTS (SELECT 1 FROM leaving x WHERE x.lease_id = lease.id AND x.upto <= ?) ORDER BY id",
        upto,
    )
    found = {lease_strand(r[0]): Owner(StrandEnd(r[1], r[2]), r[3]) for r in leases}
    for r in tx.stream("SELECT job, strand_seq, strand_hash, strand_anchor FROM head ORDER BY job"):
        found[job_strand(r[0])] = Owner(StrandEnd(r[1], r[2]), r[3])
    for r in tx.stream("SELECT id, strand_seq, strand_hash, strand_anchor FROM consumer ORDER BY id"):
        found[consumer_strand(r[0])] = Owner(StrandEnd(r[1], r[2]), r[3])
    return found


def tail(tx: Tx, after: int, limit: int) -> list[tuple[int, Entry]]:
    if after >= 0:
        found = tx.rows(f"SELECT id, {_COLUMNS} FROM journal WHERE id > ? ORDER BY id LIMIT ?", after, limit)
    else:
        newest = tx.rows(f"SELECT id, {_COLUMNS} FROM journal ORDER BY id DESC LIMIT ?", limit)
        found = list(reversed(newest))
    return [(r[0], Entry(*r[1:])) for r in found]


def follow(tx: Tx, after: int, limit: int) -> Followed:
    running_from, begun_before = tx.others()
    rows = tuple(tail(tx, max(0, after), limit))
    return Followed(at=tx.now, rows=rows, running_from=running_from, begun_before=begun_before)


def seal(tx: Tx) -> str:
    """Write where the strand of every job and every consumer stands into the main strand; returns the main
    strand's end to keep elsewhere."""
    _ = tx.pool
    jobs = {r[0]: [r[1], r[2]] for r in tx.rows("SELECT job, strand_seq, strand_hash FROM head ORDER BY job")}
    body: dict[str, object] = {"jobs": jobs}
    consumers = {
        str(r[0]): [r[1], r[2]]
        for r in tx.rows("SELECT id, strand_seq, strand_hash FROM consumer WHERE strand_seq > 0")
    }
    if consumers:
        body["consumers"] = consumers
    return write_main(tx, "journal.sealed", "", "journal", body)
