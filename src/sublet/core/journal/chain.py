"""The journal: every decision, chained so that an edit, a removal or a swap is named.

Rules of this file:
- Rows live on strands. The `main` strand holds every grant, wait, refusal, revoke and end. A lease's
  renewals, a job's commits and a consumer's items each have a strand of their own, so that they do not queue
  behind one row.
- A strand's first row carries the hash of the main row it began at; when it is finished, or at a seal, a main
  row carries its last hash. A whole strand can therefore not vanish unseen.
- The hash covers the text exactly as stored. Nothing is re-serialised to verify it.
- No secret is ever put into a body (A1).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sublet.core.errors import InvariantBroken

MAIN = "main"
GENESIS = "0" * 64


def lease_strand(lease_id: str) -> str:
    return f"lease:{lease_id}"


def job_strand(job: str) -> str:
    return f"job:{job}"


def consumer_strand(consumer: int) -> str:
    return f"consumer:{consumer}"


@dataclass(frozen=True, slots=True)
class Entry:
    strand: str
    seq: int
    at: int
    kind: str
    tenant: str
    subject: str
    body: str
    hash: str


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode


def body_text(body: dict[str, object]) -> str:
    return _encode(body)


def fields_of(entry: Entry) -> dict[str, Any] | None:
    """What a row's body says, or None when it cannot be read."""
    try:
        found = json.loads(entry.body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def strand_begun(entry: Entry) -> str:
    """The strand that begins at this row of the main strand, or ''."""
    if entry.kind == "lease.granted":
        return lease_strand(entry.subject)
    if entry.kind == "job.started":
        return job_strand(entry.subject)
    if entry.kind == "consumer.opened":
        consumer = (fields_of(entry) or {}).get("consumer")
        return consumer_strand(consumer) if isinstance(consumer, int) else ""
    return ""


def entry_hash(
    previous: str, strand: str, seq: int, at: int, kind: str, tenant: str, subject: str, body: str
) -> str:
    if "\n" in f"{strand}{kind}{tenant}{subject}":
        raise InvariantBroken("a line break in a journal field would let one row stand for another")
    text = f"{previous}\n{strand}\n{seq}\n{at}\n{kind}\n{tenant}\n{subject}\n{body}"
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong, by name and place."""

    strand: str
    seq: int
    what: str


@dataclass(frozen=True, slots=True)
class StrandEnd:
    """Where a strand stands according to the row that owns it."""

    seq: int
    hash: str


class Chain:
    """One strand, walked row by row. `anchor` is '' when nobody knows where the strand began; `after` is how
    many rows were removed before it."""

    __slots__ = ("_expected", "_previous", "strand")

    def __init__(self, strand: str, anchor: str, after: int = 0) -> None:
        self.strand = strand
        self._previous = anchor
        self._expected = after + 1

    @property
    def end(self) -> StrandEnd:
        """Where it stands after the rows seen so far."""
        return StrandEnd(self._expected - 1, self._previous)

    def add(self, entry: Entry) -> Iterator[Fault]:
        """Rows come in the order they are stored."""
        expected = self._expected
        if entry.seq != expected:
            what = (
                f"rows {expected} to {entry.seq - 1} are missing"
                if entry.seq > expected
                else f"row {entry.seq} stands where {expected} should: rows were reordered"
            )
            yield Fault(self.strand, expected, what)
        if entry.seq == expected and _hash_of(self._previous, self.strand, entry) != entry.hash:
            yield Fault(self.strand, entry.seq, "the row was edited, or does not follow the one before it")
        self._previous, self._expected = entry.hash, entry.seq + 1

    def close(self, end: StrandEnd) -> Iterator[Fault]:
        last = self._expected - 1
        if last != end.seq:
            what = f"it ends at row {last}, its stored end is row {end.seq}"
            yield Fault(self.strand, self._expected, what)
        elif self._previous != end.hash:
            yield Fault(self.strand, end.seq, "its last row is not the one the stored end names")


def _hash_of(previous: str, strand: str, entry: Entry) -> str:
    if "\n" in f"{entry.kind}{entry.tenant}{entry.subject}":
        return ""  # nobody wrote it like this
    return entry_hash(
        previous, strand, entry.seq, entry.at, entry.kind, entry.tenant, entry.subject, entry.body
    )
