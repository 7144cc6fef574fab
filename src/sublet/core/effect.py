"""The commit rule: what one step's transaction may do, and when it may do nothing.

Rules of this file:
- Everything is decided before anything is written. A refusal changes nothing.
- The order of questions matters: a duplicate is answered even to a fenced holder (it learns the truth, and
  writes nothing), every write needs the fence, then the effect, then the head (S1-S4).
"""

from __future__ import annotations

from dataclasses import dataclass

from sublet.core.errors import (
    BadInput,
    EffectBusy,
    Fenced,
    FingerprintMismatch,
    HeadMoved,
    SubletError,
)
from sublet.core.lease import Lease, fence


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The name that points at a job's current state."""

    job: str
    tenant: str
    version: int = 0
    step: int = 0
    digest: str = ""
    cursor: str = ""
    epoch: int = 0
    committed_at: int = 0
    floor: int = 0  # the oldest version that hangs together with it; 0: all of them
    sweeps: int = 0  # how often versions behind it may have been dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The record that something happened, by key."""

    key: str
    fingerprint: str
    job: str
    owner: str  # lease id
    epoch: int
    completed: bool = False
    outcome: str = ""
    version: int = 0


def check_key(text: str, *, what: str = "key") -> str:
    """One line of printable text: it goes into the journal as it is."""
    if not isinstance(text, str) or not 1 <= len(text) <= 512 or not text.isprintable():
        raise BadInput(f"a {what} is 1 to 512 printable characters on one line")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One step, ready to become true."""

    job: str
    key: str
    step: int
    fingerprint: str
    expected_version: int
    digest: str
    cursor: str = ""
    outcome: str = ""

    def __post_init__(self) -> None:
        check_key(self.key)
        check_key(self.fingerprint, what="fingerprint")
        check_key(self.digest, what="digest")
        if self.step < 1:
            raise BadInput(f"step {self.step} is not a step: the first one is 1")
        if "\x00" in self.cursor or "\x00" in self.outcome:
            raise BadInput(
                "cursor and outcome are text, without NUL: encode bytes, or put them in a checkpoint"
            )
        if len(self.cursor) > 65_536 or len(self.outcome) > 65_536:
            raise BadInput("cursor and outcome may hold 64 KiB of text: put bigger state in a checkpoint")


@dataclass(frozen=True, slots=True)
class Committed:
    version: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """It happened before; this is what came of it."""

    version: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Reserved:
    epoch: int
    taken_over: bool


def _prior(effect: Effect | None, fingerprint: str) -> Duplicate | SubletError | None:
    if effect is None:
        return None
    if effect.fingerprint != fingerprint:
        return FingerprintMismatch(f"effect {effect.key} was recorded with other inputs")
    if effect.completed:
        return Duplicate(effect.version, effect.outcome)
    return None


def decide_reserve(
    lease: Lease, epoch: int, effect: Effect | None, owner_alive: bool, fingerprint: str, now: int
) -> Reserved | Duplicate | SubletError:
    prior = _prior(effect, fingerprint)
    if prior is not None:
        return prior
    refusal = fence(lease, epoch, now)
    if refusal:
        return Fenced(f"the write was refused and changed nothing: {refusal}")
    if effect is not None and effect.owner != lease.id:
        if owner_alive:
            return EffectBusy(f"effect {effect.key} is being worked on under lease {effect.owner}")
        if effect.epoch >= epoch:
            return Fenced(f"effect {effect.key} belongs to epoch {effect.epoch}, yours is {epoch}")
        return Reserved(epoch, taken_over=True)
    return Reserved(epoch, taken_over=False)


def decide_commit(
    lease: Lease, epoch: int, head: Head, effect: Effect | None, owner_alive: bool, commit: Commit, now: int
) -> Committed | Duplicate | SubletError:
    reserved = decide_reserve(lease, epoch, effect, owner_alive, commit.fingerprint, now)
    if not isinstance(reserved, Reserved):
        return reserved
    if epoch < head.epoch:
        return Fenced(f"job {commit.job} was committed by epoch {head.epoch}, yours is {epoch}")
    if head.version != commit.expected_version:
        return HeadMoved(
            f"job {commit.job} is at version {head.version}, not {commit.expected_version}",
            version=head.version,
        )
    if commit.step != head.step + 1:
        return HeadMoved(
            f"job {commit.job} has committed step {head.step}; step {commit.step} does not follow it",
            version=head.version,
        )
    return Committed(head.version + 1)
