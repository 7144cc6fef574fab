"""The journal: every decision, chained so that an edit, a removal or a swap is named.

Rules of this file:
- Rows live on strands. The `main` strand holds every grant, wait, refusal, revoke and end. A lease's renewals
  and a job's commits each have a strand of their own, so that they do not queue behind one row.
- A strand's first row carries the hash of the main row it began at; when it is finished, or at a seal, a main
  row carries its last hash. A whole strand can therefore not vanish unseen.
- The hash covers the text exactly as stored. Nothing is re-serialised to verify it.
- No secret is ever put into a body (A1).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sublet.core.errors import InvariantBroken

MAIN = "main"
GENESIS = "0" * 64


def lease_strand(lease_id: str) -> str:
    return f"lease:{lease_id}"


def job_strand(job: str) -> str:
    return f"job:{job}"


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


def verify_strand(strand: str, entries: Iterable[Entry], anchor: str, end: StrandEnd) -> Iterator[Fault]:
    """Walk one strand from its anchor to its stored end. `entries` come in the order they are stored."""
    previous, expected = anchor, 1
    for entry in entries:
        if entry.seq != expected:
            what = (
                f"rows {expected} to {entry.seq - 1} are missing"
                if entry.seq > expected
                else f"row {entry.seq} stands where {expected} should: rows were reordered"
            )
            yield Fault(strand, expected, what)
        computed = entry_hash(
            previous, strand, entry.seq, entry.at, entry.kind, entry.tenant, entry.subject, entry.body
        )
        if computed != entry.hash and entry.seq == expected:
            yield Fault(strand, entry.seq, "the row was edited, or does not follow the one before it")
        previous, expected = entry.hash, entry.seq + 1
    if expected - 1 != end.seq:
        yield Fault(strand, expected, f"it ends at row {expected - 1}, its stored end is row {end.seq}")
    elif previous != end.hash:
        yield Fault(strand, end.seq, "its last row is not the one the stored end names")
