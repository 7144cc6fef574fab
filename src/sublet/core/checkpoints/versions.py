"""Versions of a job: the head, what lies behind it, and the few rows that outlive the chain.

Rules of this file:
- A version number is never used twice and never goes back: a rollback is a new version with an old state.
- `floor` is the oldest version that still hangs together with the head through parents; what is older exists
  only if a row says so: kept by retention (no tag), or tagged. A floor never falls.
- `sweeps` counts what could take a version away. Whoever acts on a history names the count it was
  read at, and is refused if a version may have gone since (C5).
- Everything is decided before anything is written. A refusal changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sublet.core.errors import BadInput, HeadMoved, NotFound, SubletError
from sublet.core.progress.effect import Head, check_key
from sublet.core.values import check_job, check_name

#: What may move a head without a lease.
REASONS = ("rollback", "fork", "import", "rebuild")
MOST_VERSION = 1 << 62
_TAG = re.compile(r"[A-Za-z_][A-Za-z0-9._@-]{0,62}")


def check_tag(text: str) -> str:
    """A tag begins with a letter, so that it is never taken for a version."""
    if not isinstance(text, str) or not _TAG.fullmatch(text):
        raise BadInput("a tag is 1 to 63 letters, digits and . _ @ -, and begins with a letter")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVersion:
    """A version that is kept whatever becomes of the chain: by retention (no tag) or by a tag."""

    version: int
    digest: str
    step: int
    tag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    head: Head
    kept: tuple[KeptVersion, ...] = ()

    @property
    def tags(self) -> dict[str, KeptVersion]:
        return {k.tag: k for k in self.kept if k.tag}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionSource:
    """Whose history an adopted state was read from, and the count of sweeps it was read at."""

    job: str
    sweeps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A head that moves without a lease: an operator's rollback, fork, import or rebuild."""

    job: str
    tenant: str
    expected_version: int  # 0: there is no such job yet
    version: int
    digest: str
    step: int
    epoch: int
    reason: str
    source: AdoptionSource | None = None
    floor: int = 0
    kept: tuple[KeptVersion, ...] = ()
    #: Effects of later versions are forgotten, so that their steps can run again.
    forget_after: int | None = None
    new_bytes: int = 0  # as in a commit
    whole_bytes: int = 0

    def __post_init__(self) -> None:
        check_job(self.job)
        check_name(self.tenant, what="tenant")
        check_key(self.digest, what="digest")
        if self.reason not in REASONS:
            raise BadInput(f"a head moves by {', '.join(REASONS)}, not by {self.reason[:40]!r}")
        if not 0 <= self.expected_version < self.version <= MOST_VERSION:
            raise BadInput(f"version {self.version} does not follow {self.expected_version}")
        if not (0 <= self.step <= MOST_VERSION and 0 <= self.epoch <= MOST_VERSION):
            raise BadInput("a step and an epoch are not negative")
        if not 0 <= self.new_bytes <= self.whole_bytes:
            raise BadInput("what a version adds is a part of what it is")
        if not 0 <= self.floor <= self.version:
            raise BadInput(f"the floor {self.floor} is not at or below version {self.version}")
        if any(k.tag or not 1 <= k.version < max(self.floor, 1) for k in self.kept):
            raise BadInput("what is kept has no tag, and lies below the floor")


def decide_adopt(adoption: Adoption, head: Head | None, source: Head | None) -> Head | SubletError:
    """The new head. `source` is the job the state was read from."""
    mine = adoption.tenant
    if head is not None and head.tenant != mine:
        return NotFound(f"tenant {mine} has no job {adoption.job}")
    found = head.version if head is not None else 0
    if head is not None and (head.version, head.digest) == (adoption.version, adoption.digest):
        return head  # asked again after a lost answer
    if found != adoption.expected_version:
        return HeadMoved(
            f"{adoption.job} is at version {found}, not {adoption.expected_version}", version=found
        )
    if adoption.source is not None:
        if source is None or source.tenant != mine:
            return NotFound(f"tenant {mine} has no job {adoption.source.job}")
        if source.sweeps != adoption.source.sweeps:
            return HeadMoved(
                f"versions of {adoption.source.job} were dropped meanwhile: read its history again",
                version=source.version,
            )
    return Head(
        job=adoption.job,
        tenant=mine,
        version=adoption.version,
        step=adoption.step,
        digest=adoption.digest,
        cursor="",
        epoch=max(adoption.epoch, head.epoch if head is not None else 0),
        committed_at=0,
        floor=max(adoption.floor, head.floor if head is not None else 0),
        sweeps=head.sweeps if head is not None else 0,
    )


def decide_retain(
    versions: Versions, expected_sweeps: int, floor: int, kept: Sequence[KeptVersion]
) -> SubletError | None:
    """None when these survivors may replace the rows without a tag. Only `untag` drops tags."""
    head = versions.head
    if head.sweeps != expected_sweeps:
        return HeadMoved(
            f"versions of {head.job} were dropped by somebody else meanwhile: read its history again",
            version=head.version,
        )
    if not head.floor <= floor <= head.version:
        return BadInput(
            f"the floor of {head.job} is {head.floor} and its head {head.version}: {floor} is not between "
            "them"
        )
    before = {(k.version, k.digest) for k in versions.kept}
    for row in kept:
        on_the_chain = max(head.floor, 1) <= row.version < floor
        if row.tag or not (on_the_chain or (row.version < floor and (row.version, row.digest) in before)):
            return BadInput(f"version {row.version} of {head.job} cannot be kept: it was dropped before")
    return None
