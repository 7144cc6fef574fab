"""Removing the beginning of the journal so that the rest can still be verified.

Rules of this file:
- A prune removes every row up to a number, of every strand. Of each strand that continues, the sequence and
  the hash of the last removed row are carried over, and the chain is verified from there.
- A row of the main strand holds the digest of everything carried over, and of the file the rows went to.
  Missing rows that no such row accounts for were removed by somebody else, and are named (S7).
- Only rows that verify are removed: a journal that was tampered with is evidence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sublet.core.journal.chain import (
    GENESIS,
    MAIN,
    Chain,
    Entry,
    Fault,
    StrandEnd,
    fields_of,
    lease_strand,
    strand_begun,
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
    """Check that the newest prune in the main strand is the one that left `carried`."""
    digest = ""
    for entry in main:
        if entry.kind == PRUNED:
            digest = str((fields_of(entry) or {}).get("carried", ""))
    if not carried and not digest:
        return []
    begins = carried.get(MAIN, StrandEnd(0, GENESIS)).seq + 1
    if not digest:
        return [Fault(MAIN, begins, f"rows before {begins} are missing, and no prune says so")]
    if digest != carried_digest(carried):
        return [Fault(MAIN, begins, "where its strands go on is not what the last prune left")]
    return []


@dataclass(slots=True)
class Beginning:
    """The rows that a prune will remove, walked one by one."""

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
            strand = strand_begun(entry)
            if strand:
                self.born[strand] = entry.hash

    @property
    def strands(self) -> set[str]:
        """The strands that may continue after these rows: those they mention, and those carried before."""
        return {*self.carried, *self._chains, *self.born, *map(lease_strand, self.leases)} - {MAIN}

    def left(self, anchors: Mapping[str, str]) -> dict[str, StrandEnd]:
        """What is carried from now on: of the strands in `anchors`, each with the hash it begins at, and of
        the main strand."""
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
