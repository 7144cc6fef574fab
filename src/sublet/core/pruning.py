"""Removing the beginning of the journal so that the rest can still be verified.

Rules of this file:
- What goes is a beginning: every row up to a number, of every strand. For each strand that goes on the last row that went is carried:
  its sequence and its hash. The chain is verified from there.
- A row of the main strand carries the digest of all that is carried, and of the file the rows went to. Rows that are missing and that no such
  row speaks of were removed by somebody else, and are named (S7).
- Only what verifies goes. A journal that was tampered with is evidence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sublet.core.journal import (
    GENESIS,
    MAIN,
    Chain,
    Entry,
    Fault,
    StrandEnd,
    clerk_strand,
    job_strand,
    lease_strand,
)

PRUNED = "journal.pruned"
Carried = Mapping[str, StrandEnd]


def carried_digest(carried: Carried) -> str:
    told = hashlib.sha256()
    for strand in sorted(carried):
        end = carried[strand]
        told.update(f"{strand}\n{end.seq}\n{end.hash}\n".encode())
    return told.hexdigest()


def check_mark(carried: Carried, main: Iterable[Entry]) -> list[Fault]:
    """That the newest prune the main strand knows of is the one that left these."""
    digest = ""
    for entry in main:
        if entry.kind == PRUNED:
            digest = _text(entry, "carried")
    if not carried and not digest:
        return []
    begins = carried.get(MAIN, StrandEnd(0, GENESIS)).seq + 1
    if not digest:
        return [Fault(MAIN, begins, f"rows before {begins} are missing, and no prune says so")]
    if digest != carried_digest(carried):
        return [Fault(MAIN, begins, "where its strands go on is not what the last prune left")]
    return []


def _text(entry: Entry, name: str) -> str:
    try:
        found = json.loads(entry.body).get(name)
    except (ValueError, AttributeError):
        return ""  # the chain has named it already
    return found if isinstance(found, str) else ""


@dataclass(slots=True)
class Beginning:
    """The rows that are to go, walked one by one."""

    carried: Carried
    faults: list[Fault] = field(default_factory=list)
    rows: int = 0
    main_at: int = 0  # of the last row of the main strand among them
    born: dict[str, str] = field(default_factory=dict)  # strand to the hash it begins at
    anchors: set[str] = field(default_factory=set)
    leases: set[str] = field(default_factory=set)  # that a row of the main strand speaks of
    _chains: dict[str, Chain] = field(default_factory=dict)

    def see(self, entry: Entry) -> None:
        self.rows += 1
        chain = self._chains.get(entry.strand)
        if chain is None:
            before = self.carried.get(entry.strand)
            if before is not None and self.born.get(entry.strand) is None:
                chain = Chain(entry.strand, before.hash, before.seq)
            elif entry.strand == MAIN:
                chain = Chain(MAIN, GENESIS)
            elif entry.strand in self.born:
                chain = Chain(entry.strand, self.born[entry.strand])
            else:
                chain = Chain(entry.strand, "")
                self.faults.append(Fault(entry.strand, entry.seq, "nothing says where it began"))
            self._chains[entry.strand] = chain
        self.faults += chain.add(entry)
        if entry.strand == MAIN:
            self.main_at = entry.at
            self.anchors.add(entry.hash)
            if entry.kind.startswith("lease."):
                self.leases.add(entry.subject)
            strand = _begins(entry)
            if strand:
                self.born[strand] = entry.hash

    @property
    def strands(self) -> set[str]:
        """Those that may go on after these rows: what they speak of, and what was carried before."""
        return {*self.carried, *self._chains, *self.born, *map(lease_strand, self.leases)} - {MAIN}

    def left(self, anchors: Mapping[str, str]) -> dict[str, StrandEnd]:
        """What is carried from now on, of strands that stay (each with the hash it begins at), and the main strand."""
        found: dict[str, StrandEnd] = {}
        for strand, anchor in anchors.items():
            chain, before = self._chains.get(strand), self.carried.get(strand)
            if chain is not None:
                found[strand] = chain.end
            elif anchor in self.anchors:
                found[strand] = StrandEnd(0, anchor)
            elif before is not None:
                found[strand] = before
        main = self._chains.get(MAIN)
        found[MAIN] = main.end if main is not None else self.carried.get(MAIN, StrandEnd(0, GENESIS))
        return found


def _begins(entry: Entry) -> str:
    """The strand that begins at this row, or ''."""
    if entry.kind == "lease.granted":
        return lease_strand(entry.subject)
    if entry.kind == "job.started":
        return job_strand(entry.subject)
    if entry.kind == "clerk.opened":
        try:
            return clerk_strand(int(json.loads(entry.body)["clerk"]))
        except (ValueError, KeyError, TypeError):
            return ""
    return ""
