"""A transaction as the verbs see it, the same for both engines.

Rules of this file:
- SQL is written once with `?` placeholders in the part of the language both engines share. What differs (how
  to lock a row, what time it is) is a method here.
- `now` exists only after a lock was taken: a time read before waiting for a lock is a time in the past.
- The pool row is loaded at most once and written back at most once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sublet.core.journal import chain as chain
from sublet.core.leasing.policy import Policy
from sublet.ports.bell import JOURNAL_TOPIC

Row = tuple[Any, ...]


@dataclass(slots=True)
class PoolRow:
    """The pool row inside one transaction."""

    epoch: int
    waiting: int
    journal_seq: int
    journal_hash: str
    policy_text: str
    dirty: bool = False
    _policy: Policy | None = None

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            self._policy = policy_of(self.policy_text)
        return self._policy

    def set_policy(self, policy: Policy) -> None:
        self.policy_text, self._policy, self.dirty = policy.to_text(), policy, True

    def next_epoch(self) -> int:
        self.epoch += 1
        self.dirty = True
        return self.epoch


_parsed: dict[str, Policy] = {}


def policy_of(text: str) -> Policy:
    """Parsed once per distinct text: a grant must not pay for JSON."""
    found = _parsed.get(text)
    if found is None:
        if len(_parsed) > 16:
            _parsed.clear()
        found = _parsed[text] = Policy.from_text(text)
    return found


class Tx(Protocol):
    rings: set[str]  # topics to ring once the transaction is committed
    again: bool  # an earlier try lost its connection: what it did may already be there

    def rows(self, sql: str, *params: object) -> list[Row]: ...
    def row(self, sql: str, *params: object) -> Row | None: ...
    def stream(self, sql: str, *params: object) -> Iterator[Row]:
        """Yield rows one at a time, however many there are."""

    def run(self, sql: str, *params: object) -> int:
        """Returns how many rows it changed."""

    def run_many(self, sql: str, rows: Sequence[Sequence[object]]) -> int:
        """Run the statement for each row of values. Returns how many rows it changed in all."""

    def run_all(self, sql: str, rows: Sequence[Sequence[object]]) -> bool:
        """Run the statement for each row of values. False, with nothing changed, unless each changed one
        row."""

    def locked(self, sql: str, *params: object, of: str = "") -> Row | None:
        """The row, locked until the end of the transaction. In a join, `of` names the table to lock."""

    def free_rows(self, sql: str, *params: object) -> list[Row]:
        """Rows, locked; rows locked by others are left out."""

    @property
    def pool(self) -> PoolRow:
        """The pool row, locked."""

    @property
    def now(self) -> int:
        """The ledger's clock, read after the lock."""

    def others(self) -> tuple[int, int]:
        """(xmin, xmax): transactions older than the first are over, and none had begun from the second on."""


def write_main(tx: Tx, kind: str, tenant: str, subject: str, body: dict[str, object]) -> str:
    """Append to the main strand. Its end lives in the pool row, so this takes the pool's lock."""
    pool = tx.pool
    pool.journal_seq += 1
    text = chain.body_text(body)
    pool.journal_hash = chain.entry_hash(
        pool.journal_hash, chain.MAIN, pool.journal_seq, tx.now, kind, tenant, subject, text
    )
    pool.dirty = True
    _insert(tx, chain.MAIN, pool.journal_seq, kind, tenant, subject, text, pool.journal_hash)
    tx.rings.add(JOURNAL_TOPIC)
    return pool.journal_hash


def write_strand(
    tx: Tx,
    strand: str,
    end: chain.StrandEnd,
    kind: str,
    tenant: str,
    subject: str,
    body: dict[str, object],
) -> chain.StrandEnd:
    """Append to a strand whose owning row the caller has locked and will write back."""
    text = chain.body_text(body)
    seq = end.seq + 1
    digest = chain.entry_hash(end.hash, strand, seq, tx.now, kind, tenant, subject, text)
    _insert(tx, strand, seq, kind, tenant, subject, text, digest)
    return chain.StrandEnd(seq, digest)


def _insert(
    tx: Tx, strand: str, seq: int, kind: str, tenant: str, subject: str, text: str, digest: str
) -> None:
    tx.run(
        "INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash) VALUES (?,?,?,?,?,?,?,?)",
        strand,
        seq,
        tx.now,
        kind,
        tenant,
        subject,
        text,
        digest,
    )
