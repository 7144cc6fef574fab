"""Lineage: what lies behind a head, and the verbs that give an old version a new life.

Rules of this file:
- History is the chain of manifests from the head down to the floor, each naming its parent, and then what
  retention or a tag kept.
- A rollback and a fork write a manifest and no state: the packs are those of the version they come from. They
  say under which count of sweeps they read it; if a version was dropped since, they read again (C5).
- Both keep C1: packs and manifest are on a write quorum before the head moves.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from sublet.core.checkpoints import checkpoint
from sublet.core.checkpoints.checkpoint import Manifest, manifest_bytes
from sublet.core.checkpoints.versions import Adoption, AdoptionSource, KeptVersion, Versions, check_tag
from sublet.core.errors import BadInput, Damaged, HeadMoved, NotDurable, NotFound, QuorumNotReached
from sublet.core.values import check_job
from sublet.ports.ledger import Ledger
from sublet.store.replicas.quorum import Health, Replicas
from sublet.store.save.packing import digest

#: How often a verb reads the history again because it changed under it.
TRIES = 5
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FoundVersion:
    """One version, and the history it was found in."""

    versions: Versions
    digest: str
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedHead:
    """A head that was moved by hand."""

    name: str
    version: int  # the new one
    source: int  # the version its state comes from
    step: int
    digest: str
    forgotten: int = 0  # effects whose steps may run again


def is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


class Lineage:
    def __init__(
        self, replicas: Replicas, ledger: Callable[[], Ledger], health: Health, *, mend: bool = True
    ) -> None:
        """`mend`: a replica that lacks a manifest that is read is given it on the way."""
        self._replicas = replicas
        self._ledger = ledger
        self._health = health
        self._mend = mend

    def _read(self, name: str) -> Manifest:
        return self._replicas.manifest(name, self._health, mend=self._mend)

    # reading

    def versions(self, name: str) -> Versions:
        missing = NotFound(f"nothing was saved as {name}", remedy="'sublet checkpoint ls' lists what was")
        try:
            found = self._ledger().versions(check_job(name))
        except NotFound:
            raise missing from None
        if not is_digest(found.head.digest) and not found.kept:
            raise missing
        return found

    def history(self, name: str) -> Iterator[FoundVersion]:
        """The newest first, each version once. An unreadable version ends the chain; an unreadable head is
        `Damaged`."""
        versions = self.versions(name)
        seen = set()
        try:
            for digest_, manifest in self.chain(versions):
                seen.add(digest_)
                yield FoundVersion(versions, digest_, manifest)
        except Damaged:
            if not seen:
                raise
        for kept in versions.kept:
            if kept.digest not in seen:
                seen.add(kept.digest)
                try:
                    yield FoundVersion(versions, kept.digest, self._read(kept.digest))
                except Damaged:
                    continue

    def chain(self, versions: Versions, *, walked: set[str] | None = None) -> Iterator[tuple[str, Manifest]]:
        """From the head down to the floor, leaving out what was `walked`. Raises `Damaged` at an unreadable
        manifest."""
        at = versions.head.digest if is_digest(versions.head.digest) else ""
        new = []
        while at and (walked is None or at not in walked):
            manifest = self._read(at)
            yield at, manifest
            new.append(at)
            at = manifest.parent if manifest.version > versions.head.floor else ""
        if walked is not None:
            walked.update(new)  # not before: a later walk that stops here takes all behind it as read

    def reachable(
        self,
        everything: Iterable[Versions],
        walked: set[str],
        kept: set[str],
        unreadable: Callable[[str, Damaged], None] | None = None,
    ) -> Iterator[tuple[str, str, Manifest]]:
        """The job, digest and manifest of everything that must not be lost and is not in `walked` or `kept`
        yet. Without `unreadable`, the first unreadable manifest raises `Damaged`: it could refer to
        anything."""
        for versions in everything:
            job = versions.head.job
            try:
                for digest_, manifest in self.chain(versions, walked=walked):
                    yield job, digest_, manifest
            except Damaged as e:
                if unreadable is None:
                    raise _unreadable(job, e) from e
                unreadable(job, e)
            for row in versions.kept:
                if row.digest in walked or row.digest in kept:
                    continue
                try:
                    manifest = self._read(row.digest)
                except Damaged as e:
                    if unreadable is None:
                        raise _unreadable(job, e) from e
                    unreadable(job, e)
                    continue
                kept.add(row.digest)
                yield job, row.digest, manifest

    def everything(self) -> Iterator[Manifest]:
        """Every readable manifest of every job, because other jobs may share a pack with this one."""
        for _, _, manifest in self.reachable(
            self._ledger().all_versions(), set(), set(), unreadable=lambda job, e: None
        ):
            yield manifest

    def find(self, name: str, version: int | str | None = None) -> FoundVersion:
        """Find a version by number, by tag, or the newest."""
        missing = NotFound(
            f"{name} has no version {version}", remedy=f"'sublet checkpoint show {name}' lists them"
        )
        if isinstance(version, str):
            versions = self.versions(name)
            row = versions.tags.get(version)
            if row is None:
                raise missing
            return FoundVersion(versions, row.digest, self._read(row.digest))
        if version is not None:
            versions = self.versions(name)
            if not 1 <= version <= versions.head.version:
                raise missing
            row = next((k for k in versions.kept if k.version == version), None)
            if row is not None:
                return FoundVersion(versions, row.digest, self._read(row.digest))
        for found in self.history(name):
            if version is None or found.manifest.version == version:
                return found
            if found.manifest.version < version:
                break
        raise missing

    # writing

    def rollback(self, name: str, version: int | str, *, actor: str) -> MovedHead:
        """Make a new version with the state of an old one. A lease holder that saves later finds the head
        moved."""

        def once() -> MovedHead:
            found = self.find(name, version)
            head, old = found.versions.head, found.manifest
            if found.digest == head.digest:
                raise BadInput(f"{name} is at version {head.version} already; nothing was changed")
            return self._adopt(
                found,
                replace(
                    old,
                    version=head.version + 1,
                    parent=head.digest if is_digest(head.digest) else "",
                    epoch=head.epoch,
                ),
                expected_version=head.version,
                reason="rollback",
                forget_after=old.version,
                actor=actor,
            )

        return _again(once)

    def fork(self, name: str, new_name: str, version: int | str | None = None, *, actor: str) -> MovedHead:
        """Begin a job with a version of another one. No bytes are copied."""
        check_job(new_name)

        def once() -> MovedHead:
            found = self.find(name, version)
            return self._adopt(
                found,
                replace(found.manifest, name=new_name, version=1, parent=""),
                expected_version=0,
                reason="fork",
                forget_after=None,
                actor=actor,
            )

        return _again(once)

    def _adopt(
        self,
        found: FoundVersion,
        manifest: Manifest,
        *,
        expected_version: int,
        reason: str,
        forget_after: int | None,
        actor: str,
    ) -> MovedHead:
        begun = time.clock_gettime(time.CLOCK_BOOTTIME)
        head = found.versions.head
        there = self._ledger().head(manifest.name) if reason == "fork" else None
        if there is not None and there.tenant == head.tenant:
            raise HeadMoved(
                f"there is a job {manifest.name} already; nothing was changed",
                version=there.version,
                remedy="choose another name",
            )
        self._on_a_quorum(manifest)
        manifest = replace(
            manifest,
            tenant=head.tenant,
            attempt=secrets.token_hex(8),
            policy=digest(self._replicas.policy.to_text().encode()),
        )
        name_of_manifest, _ = self._replicas.put_manifest(manifest_bytes(manifest))
        if (time.clock_gettime(time.CLOCK_BOOTTIME) - begun) * 1e6 > checkpoint.LONGEST_SAVE_US:
            raise NotDurable("the replicas took so long that a sweep may have been there; nothing was moved")
        done = self._ledger().adopt(
            Adoption(
                job=manifest.name,
                tenant=head.tenant,
                expected_version=expected_version,
                version=manifest.version,
                digest=name_of_manifest,
                step=manifest.step,
                epoch=manifest.epoch,
                reason=reason,
                source=AdoptionSource(job=head.job, sweeps=head.sweeps),
                floor=0,
                forget_after=forget_after,
                # Whoever has the chunks now may be dropped before it: it is charged with all it needs.
                new_bytes=manifest.stored_bytes,
                whole_bytes=manifest.stored_bytes,
            ),
            actor=actor,
        )
        return MovedHead(
            name=manifest.name,
            version=done.head.version,
            source=found.manifest.version,
            step=manifest.step,
            digest=name_of_manifest,
            forgotten=done.forgotten,
        )

    def _on_a_quorum(self, manifest: Manifest) -> None:
        """Copy its packs until as many failure domains have them as must confirm a save (C1)."""
        wanting = set(manifest.packs) - self._replicas.kept(manifest.packs)
        if wanting:
            self._replicas.repair(self.everything(), self._health, only=wanting)
        still = wanting - self._replicas.kept(wanting)
        if still:
            raise QuorumNotReached(
                f"{len(still)} packs of {manifest.name} are on too few replicas; the head is where it was"
            )

    def tag(self, name: str, version: int | str, tag: str, *, actor: str) -> Versions:
        """Keep the version under this name until the tag is removed or given to another one."""
        check_tag(tag)

        def once() -> Versions:
            found = self.find(name, version)
            row = KeptVersion(
                version=found.manifest.version, digest=found.digest, step=found.manifest.step, tag=tag
            )
            return self._ledger().tag(name, row, expected_sweeps=found.versions.head.sweeps, actor=actor)

        return _again(once)

    def untag(self, name: str, tag: str, *, actor: str) -> Versions:
        return self._ledger().untag(check_job(name), tag, actor=actor)


def _again(work: Callable[[], T]) -> T:
    """Try again a few times, because what was read may have changed before it was acted on."""
    for left in range(TRIES - 1, -1, -1):
        try:
            return work()
        except HeadMoved:
            if not left:
                raise
    raise AssertionError  # not reached


def _unreadable(job: str, error: Damaged) -> Damaged:
    return Damaged(
        f"{job}: {error.message}; nothing was deleted, because what it refers to is not known",
        remedy="bring a replica that has it back and run 'sublet checkpoint scrub --repair', then sweep "
        "again",
    )
