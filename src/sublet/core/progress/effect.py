"""The commit rule: what one step's transaction may do, and when it may do nothing.

Rules of this file:
- Everything is decided before anything is written. A refusal changes nothing.
- The order of questions matters: a duplicate is answered even to a fenced holder (it learns the truth, and
  writes nothing), every write needs the fence, then the effect, then the head (S1-S4).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sublet.core.errors import BadInput, EffectBusy, Fenced, FingerprintMismatch, HeadMoved, SubletError
from sublet.core.leasing.lease import LeaseRecord, fence


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
    """A key is one line of printable text, because the journal holds it as it is."""
    if not isinstance(text, str) or not 1 <= len(text) <= 512 or not text.isprintable():
        raise BadInput(f"a {what} is 1 to 512 printable characters on one line")
    return text


#: The most text a cursor or an outcome holds.
MOST_TEXT = 65_536
#: The most effects that join one commit.
MOST_EFFECTS = 10_000


def _check_text(*texts: str) -> None:
    if any("\x00" in text for text in texts):
        raise BadInput("cursor and outcome are text, without NUL: encode bytes, or put them in a checkpoint")
    if any(len(text) > MOST_TEXT for text in texts):
        raise BadInput("cursor and outcome may hold 64 KiB of text: put bigger state in a checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An effect beyond the state that becomes true with a commit."""

    key: str
    fingerprint: str
    outcome: str = ""

    def __post_init__(self) -> None:
        check_key(self.key)
        check_key(self.fingerprint, what="fingerprint")
        _check_text(self.outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a save says about the steps it commits, besides their state."""

    step: int
    first: int = 0  # of the steps it commits; 0: only `step`
    starts: bool = False  # the job may begin at this step
    key: str = ""  # of the commit's own effect; '': made from the manifest
    fingerprint: str = ""
    cursor: str = ""
    outcome: str = ""
    effects: tuple[Done, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One step, or several that follow each other, ready to become true."""

    job: str
    key: str
    step: int  # the last one
    fingerprint: str
    expected_version: int
    digest: str
    cursor: str = ""
    outcome: str = ""
    first: int = 0  # 0: only `step`
    starts: bool = False  # the job may begin at this step: its earlier ones are somebody else's
    effects: tuple[Done, ...] = ()
    new_bytes: int = 0  # what it stores that the version before had not
    whole_bytes: int = 0  # all of its state; 0: it is kept elsewhere

    def __post_init__(self) -> None:
        check_key(self.key)
        check_key(self.fingerprint, what="fingerprint")
        if not 0 <= self.new_bytes <= self.whole_bytes:
            raise BadInput("what a version adds is a part of what it is")
        check_key(self.digest, what="digest")
        if self.step < 1:
            raise BadInput(f"step {self.step} is not a step: the first one is 1")
        if not 0 <= self.first <= self.step:
            raise BadInput(f"steps {self.first} to {self.step} are not a span")
        _check_text(self.cursor, self.outcome)
        if len(self.effects) > MOST_EFFECTS:
            raise BadInput(f"a commit takes up to {MOST_EFFECTS} effects: commit more often")
        keys = {self.key, *(e.key for e in self.effects)}
        if len(keys) != 1 + len(self.effects):
            raise BadInput("an effect's key stands twice in one commit")

    @property
    def begins(self) -> int:
        """The first step it makes true."""
        return self.first or self.step


def said(first: str, second: str) -> str:
    """What the journal keeps of a text that a commit stored, so that an edit shows: of an effect's
    fingerprint and outcome, or of a cursor. They are kept apart, because the next commit replaces the
    cursor."""
    return hashlib.sha256(f"{len(first)}:{first}{second}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Committed:
    version: int


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """It happened before, with this result."""

    version: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Reserved:
    epoch: int
    taken_over: bool


def _prior(effect: Effect | None, fingerprint: str) -> AlreadyCommitted | SubletError | None:
    if effect is None:
        return None
    if effect.fingerprint != fingerprint:
        return FingerprintMismatch(f"effect {effect.key} was recorded with other inputs")
    if effect.completed:
        return AlreadyCommitted(effect.version, effect.outcome)
    return None


def decide_reserve(
    lease: LeaseRecord, epoch: int, effect: Effect | None, owner_alive: bool, fingerprint: str, now: int
) -> Reserved | AlreadyCommitted | SubletError:
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
    lease: LeaseRecord,
    epoch: int,
    head: Head,
    effect: Effect | None,
    owner_alive: bool,
    commit: Commit,
    now: int,
) -> Committed | AlreadyCommitted | SubletError:
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
    # No gap and no repeat (S3), from step 1 on, or from where the first commit says on purpose that the job
    # begins.
    if commit.begins != head.step + 1 and not (commit.starts and head.version == 0):
        return HeadMoved(
            f"job {commit.job} has committed step {head.step}; step {commit.begins} does not follow it",
            version=head.version,
        )
    return Committed(head.version + 1)


def decide_joining(
    lease: LeaseRecord, epoch: int, done: Done, effect: Effect | None, owner_alive: bool, now: int
) -> SubletError | None:
    """None when this effect may become true with the commit, because it has not become true before."""
    prior = decide_reserve(lease, epoch, effect, owner_alive, done.fingerprint, now)
    if isinstance(prior, AlreadyCommitted):
        return HeadMoved(
            f"effect {done.key} was committed before, at version {prior.version}", version=prior.version
        )
    return prior if isinstance(prior, SubletError) else None
