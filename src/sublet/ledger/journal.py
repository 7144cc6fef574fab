"""Reading the journal back: verify it, follow it, seal it.

Rules of this file:
- Rows that a prune archived are not there, whether they were swept up yet or not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain

from sublet.core.history import audit
from sublet.core.journal import (
    GENESIS,
    MAIN,
    Entry,
    Fault,
    StrandEnd,
    clerk_strand,
    job_strand,
    lease_strand,
    verify_strand,
)
from sublet.core.pruning import PRUNED, Carried, check_mark
from sublet.ledger.archive import Archive
from sublet.ledger.pruning import carried_of, mark_of
from sublet.ledger.tx import Row, Tx, write_main
from sublet.ports.ledger import Followed, Verification

_COLUMNS = "strand, seq, at, kind, tenant, subject, body, hash"


def _entry(row: Row) -> Entry:
    return Entry(*row)


def verify(tx: Tx, archive: Archive) -> Verification:
    """Walk every strand from its anchor to the end its owning row names. Faults come in the order found.

    After a prune each strand begins where the prune left it; with the archive, at its first row."""
    mark, carried = mark_of(tx), carried_of(tx)
    begins = {} if archive else carried
    pool = tx.row("SELECT journal_seq, journal_hash FROM pool WHERE id = 1")
    assert pool is not None
    faults: list[Fault] = []
    strands: dict[str, list[Entry]] = {}
    # Stored order, not sequence order: a swap of two rows must show.
    kept = (
        _entry(row) for row in tx.rows(f"SELECT {_COLUMNS} FROM journal WHERE id > ? ORDER BY id", mark.upto)
    )
    everything = list(chain(archive.entries(), kept))
    for entry in everything:
        strands.setdefault(entry.strand, []).append(entry)
    main = strands.pop(MAIN, [])
    rows = len(main) + sum(len(entries) for entries in strands.values())
    first = begins.get(MAIN, StrandEnd(0, GENESIS))
    faults += check_mark(carried, main)
    faults += verify_strand(MAIN, main, first.hash, StrandEnd(pool[0], pool[1]), first.seq)
    if archive:
        faults += _check_files(main, archive)
    main_hashes = {entry.hash for entry in main}
    count = 1
    by_seq = {strand: {e.seq: e.hash for e in entries} for strand, entries in strands.items()}
    owners: list[tuple[str, Row]] = [
        (lease_strand(r[0]), r)
        for r in tx.rows(
            "SELECT id, strand_seq, strand_hash, strand_anchor FROM lease "
            "WHERE NOT EXISTS (SELECT 1 FROM leaving x WHERE x.lease_id = lease.id AND x.upto <= ?) ORDER BY id",
            mark.upto,
        )
    ]
    owners += [
        (job_strand(r[0]), r)
        for r in tx.rows("SELECT job, strand_seq, strand_hash, strand_anchor FROM head ORDER BY job")
    ]
    owners += [
        (clerk_strand(r[0]), r)
        for r in tx.rows("SELECT id, strand_seq, strand_hash, strand_anchor FROM clerk ORDER BY id")
    ]
    for strand, (_, seq, digest, anchor) in owners:
        entries = strands.pop(strand, [])
        count += 1
        start = StrandEnd(0, anchor)
        if anchor not in main_hashes:
            start = begins.get(strand, start)
            if strand not in begins or (start.seq == 0 and start.hash != anchor):
                faults.append(
                    Fault(strand, 0, "the row of the main strand it began at is missing or was edited")
                )
        faults += verify_strand(strand, entries, start.hash, StrandEnd(seq, digest), start.seq)
    removed = _removed(main, mark.settled) if archive else {}
    for strand in sorted(strands):
        if strand in removed:
            anchor, end = removed[strand]
            faults += verify_strand(strand, strands[strand], anchor, end)
        else:
            faults.append(Fault(strand, 0, "its owner is missing"))
    faults += _check_pledges(main, dict(owners), by_seq, begins, removed)
    if not faults:  # a history that was tampered with proves nothing about the rules
        capacities = {r[0]: r[1] for r in tx.rows("SELECT id, capacity_bytes FROM device")}
        faults += audit(everything, capacities, pruned=bool(begins))
    return Verification(
        rows=rows, strands=count, head=pool[1], faults=tuple(faults), pruned_before=mark.before
    )


def _removed(main: list[Entry], settled: int) -> dict[str, tuple[str, StrandEnd]]:
    """Leases that a prune removed, by what the archive says of them: where each began, and where it said it ended."""
    found: dict[str, tuple[str, StrandEnd]] = {}
    for entry in main:
        strand = lease_strand(entry.subject)
        if entry.kind == "lease.granted":
            found[strand] = (entry.hash, StrandEnd(0, entry.hash))
        elif entry.kind == "lease.ended" and strand in found:
            try:
                told = json.loads(entry.body)
                found[strand] = (found[strand][0], StrandEnd(told["strand_seq"], told["strand_hash"]))
            except (ValueError, KeyError):
                continue  # the chain has named it already
        if entry.at >= settled:
            break
    return found


def _check_files(main: list[Entry], archive: Archive) -> list[Fault]:
    """Every file a prune wrote was given, and is the one it wrote."""
    given = archive.digests()
    faults: list[Fault] = []
    for entry in main:
        if entry.kind == PRUNED:
            told = json.loads(entry.body)
            if given.pop(told["sha256"], None) is None:
                faults.append(
                    Fault(
                        MAIN, entry.seq, f"the archive {told['file']} it names was not given, or was edited"
                    )
                )
    faults += [Fault(MAIN, 0, f"no prune wrote {name}, or it was edited") for name in given.values()]
    return faults


def _check_pledges(
    main: list[Entry],
    owners: dict[str, Row],
    by_seq: dict[str, dict[int, str]],
    begins: Carried,
    removed: Mapping[str, object],
) -> list[Fault]:
    """What the main strand says of other strands: where a finished lease stood, where a job stood at a seal."""
    faults: list[Fault] = []
    for entry in main:
        try:
            body = json.loads(entry.body)
        except ValueError:
            continue  # the chain has named it already
        if entry.kind == "lease.granted" and not (
            lease_strand(entry.subject) in owners or lease_strand(entry.subject) in removed
        ):
            faults.append(Fault(lease_strand(entry.subject), 0, "the lease was granted, its row is missing"))
        if entry.kind == "job.started" and job_strand(entry.subject) not in owners:
            faults.append(Fault(job_strand(entry.subject), 0, "the job was started, its head is missing"))
        if entry.kind == "clerk.opened" and clerk_strand(body.get("clerk", 0)) not in owners:
            faults.append(
                Fault(clerk_strand(body.get("clerk", 0)), 0, "the clerk was opened, its row is missing")
            )
        if entry.kind == "lease.ended" and "strand_hash" in body:
            row = owners.get(lease_strand(entry.subject))
            if row is not None and (row[1], row[2]) != (body["strand_seq"], body["strand_hash"]):
                faults.append(Fault(lease_strand(entry.subject), row[1], "it changed after the lease ended"))
        if entry.kind == "journal.sealed":
            stood = {job_strand(job): end for job, end in body.get("jobs", {}).items()}
            stood |= {clerk_strand(int(clerk)): end for clerk, end in body.get("clerks", {}).items()}
            for strand, (seq, digest) in stood.items():
                row = owners.get(strand)
                if row is None or row[1] < seq:
                    faults.append(Fault(strand, seq, "it is shorter than it was when sealed"))
                elif strand in begins and seq <= begins[strand].seq:
                    if seq == begins[strand].seq and begins[strand].hash != digest:
                        faults.append(Fault(strand, seq, "it is not the strand that was sealed"))
                elif seq and by_seq.get(strand, {}).get(seq) != digest:
                    faults.append(Fault(strand, seq, "it is not the strand that was sealed"))
    return faults


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
