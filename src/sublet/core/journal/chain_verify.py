"""Verifying that a journal is the one that was written: row by row, and no row is kept.

Rules of this file:
- The main strand is walked first, because it says where every other strand began, ended, or stood at a seal.
- A few words of each strand are kept, however many rows it has.
- Faults come in one order, whatever order the rows of different strands have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sublet.core.journal.chain import (
    GENESIS,
    MAIN,
    Chain,
    Entry,
    Fault,
    StrandEnd,
    consumer_strand,
    fields_of,
    job_strand,
    lease_strand,
    strand_begun,
)
from sublet.core.journal.pruning import PRUNED, Carried, check_mark


@dataclass(frozen=True, slots=True)
class Owner:
    """What the row that owns a strand says of it."""

    end: StrandEnd
    anchor: str  # the hash of the main strand's row it began at


@dataclass(frozen=True, slots=True)
class _Pledge:
    """Something the main strand says of another one, which the second walk decides."""

    fault: Fault
    unless_removed: str = ""
    stood: tuple[str, int, str] | None = None  # a strand, a row of it and that row's hash


_MISSING = {
    "lease.granted": "the lease was granted, its row is missing",
    "job.started": "the job was started, its head is missing",
    "consumer.opened": "the consumer was opened, its row is missing",
}


class ChainWalk:
    """`carried` is where strands go on after a prune. `files` are the archive's names by digest, if an
    archive is given; the walk then begins at the first row of all. Leases that ended before `settled` may be
    gone."""

    def __init__(
        self,
        owners: Mapping[str, Owner],
        end: StrandEnd,
        *,
        carried: Carried,
        files: Mapping[str, str] | None = None,
        settled: int = 0,
    ) -> None:
        self.rows = 0
        self._owners = owners
        self._end = end
        self._carried = carried
        self._begins: Carried = carried if files is None else {}
        self._files = files
        self._settled = settled
        first = self._begins.get(MAIN, StrandEnd(0, GENESIS))
        self._main = Chain(MAIN, first.hash, first.seq)
        self._main_faults: list[Fault] = []
        self._anchors = {owner.anchor for owner in owners.values()}
        self._found: set[str] = set()  # anchors that are rows of the main strand
        self._prunes: list[Entry] = []
        #: Leases that a prune removed, as the archive tells: where the strand of each began, and where it
        #: ended.
        self._removed: dict[str, tuple[str, StrandEnd]] = {}
        self._may_be_removed = files is not None
        self._pledges: list[_Pledge] = []
        self._wanted: dict[tuple[str, int], str] = {}  # hashes that a seal names
        self._chains: dict[str, Chain] = {}
        self._faults: dict[str, list[Fault]] = {}
        self._nobodys: set[str] = set()

    @property
    def strands(self) -> int:
        return 1 + len(self._owners)

    # the first walk

    def see_main(self, entry: Entry) -> None:
        self.rows += 1
        self._main_faults += self._main.add(entry)
        if entry.hash in self._anchors:
            self._found.add(entry.hash)
        if entry.kind == PRUNED:
            self._prunes.append(entry)
        body = fields_of(entry) or {}  # the chain has named an edited body already
        if self._may_be_removed:
            self._see_removed(entry, body)
        self._pledges += self._pledged(entry, body)

    def _see_removed(self, entry: Entry, body: dict[str, Any]) -> None:
        strand = lease_strand(entry.subject)
        if entry.kind == "lease.granted":
            self._removed[strand] = (entry.hash, StrandEnd(0, entry.hash))
        elif entry.kind == "lease.ended" and strand in self._removed:
            seq, digest = body.get("strand_seq"), body.get("strand_hash")
            if isinstance(seq, int) and isinstance(digest, str):
                self._removed[strand] = (self._removed[strand][0], StrandEnd(seq, digest))
        self._may_be_removed = entry.at < self._settled

    def _pledged(self, entry: Entry, body: dict[str, Any]) -> Iterator[_Pledge]:
        """What this row says of other strands: where a finished lease stood, where a job stood at a seal."""
        begun = strand_begun(entry)
        if begun and begun not in self._owners:
            removable = begun if entry.kind == "lease.granted" else ""
            yield _Pledge(Fault(begun, 0, _MISSING[entry.kind]), unless_removed=removable)
        elif entry.kind == "lease.ended" and "strand_hash" in body:
            strand = lease_strand(entry.subject)
            owner, said = self._owners.get(strand), (body.get("strand_seq"), body["strand_hash"])
            if owner is not None and (owner.end.seq, owner.end.hash) != said:
                yield _Pledge(Fault(strand, owner.end.seq, "it changed after the lease ended"))
        elif entry.kind == "journal.sealed":
            yield from self._sealed(body)

    def _sealed(self, body: dict[str, Any]) -> Iterator[_Pledge]:
        jobs, consumers = body.get("jobs", {}), body.get("consumers", {})
        stood = {job_strand(job): end for job, end in jobs.items()} if isinstance(jobs, dict) else {}
        if isinstance(consumers, dict):
            stood |= {consumer_strand(int(consumer)): end for consumer, end in consumers.items()}
        for strand, (seq, digest) in stood.items():
            other = Fault(strand, seq, "it is not the strand that was sealed")
            owner = self._owners.get(strand)
            if owner is None or owner.end.seq < seq:
                yield _Pledge(Fault(strand, seq, "it is shorter than it was when sealed"))
            elif strand in self._begins and seq <= self._begins[strand].seq:
                if seq == self._begins[strand].seq and self._begins[strand].hash != digest:
                    yield _Pledge(other)
            elif seq:
                self._wanted.setdefault((strand, seq), "")
                yield _Pledge(other, stood=(strand, seq, digest))

    # the second walk

    def see(self, entry: Entry) -> None:
        """A row of any strand but the main one, which has been walked."""
        self.rows += 1
        strand = entry.strand
        if (strand, entry.seq) in self._wanted:
            self._wanted[strand, entry.seq] = entry.hash
        chain = self._chains.get(strand)
        if chain is None:
            if strand not in self._owners and strand not in self._removed:
                self._nobodys.add(strand)
                return
            chain = self._chains[strand] = self._begun(strand)
        found = list(chain.add(entry))
        if found:
            self._faults.setdefault(strand, []).extend(found)

    def _begun(self, strand: str) -> Chain:
        owner = self._owners.get(strand)
        if owner is None:
            return Chain(strand, self._removed[strand][0])
        start = StrandEnd(0, owner.anchor)
        if owner.anchor not in self._found:
            start = self._begins.get(strand, start)
        return Chain(strand, start.hash, start.seq)

    # the result

    def faults(self) -> Iterator[Fault]:
        yield from check_mark(self._carried, self._prunes)
        yield from self._main_faults
        yield from self._main.close(self._end)
        if self._files is not None:
            yield from self._check_files(dict(self._files))
        for strand, owner in self._owners.items():
            if owner.anchor not in self._found and not self._goes_on(strand, owner):
                yield Fault(strand, 0, "the row of the main strand it began at is missing or was edited")
            yield from self._closed(strand, owner.end)
        for strand in sorted(self._chains.keys() - self._owners.keys() | self._nobodys):
            if strand in self._removed:
                yield from self._closed(strand, self._removed[strand][1])
            else:
                yield Fault(strand, 0, "its owner is missing")
        for pledge in self._pledges:
            if pledge.stood is not None:
                strand, seq, digest = pledge.stood
                if self._wanted[strand, seq] == digest:
                    continue
            if not pledge.unless_removed or pledge.unless_removed not in self._removed:
                yield pledge.fault

    def _goes_on(self, strand: str, owner: Owner) -> bool:
        """Its beginning was archived, and the prune says where it goes on."""
        start = self._begins.get(strand)
        return start is not None and (start.seq > 0 or start.hash == owner.anchor)

    def _closed(self, strand: str, end: StrandEnd) -> Iterator[Fault]:
        chain = self._chains.get(strand)
        yield from self._faults.get(strand, ())
        yield from (chain if chain is not None else self._begun(strand)).close(end)

    def _check_files(self, given: dict[str, str]) -> Iterator[Fault]:
        """Every file a prune wrote was given, and is the one it wrote."""
        for entry in self._prunes:
            told = fields_of(entry) or {}
            if given.pop(str(told.get("sha256")), None) is None:
                yield Fault(
                    MAIN, entry.seq, f"the archive {told.get('file')} it names was not given, or was edited"
                )
        for name in given.values():
            yield Fault(MAIN, 0, f"no prune wrote {name}, or it was edited")
