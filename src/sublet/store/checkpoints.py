"""The checkpoint store: states by name and version.

Rules of this file:
- Order of a save: copy, chunks to a quorum, manifest to a quorum, then the head, in one transaction with the
  fence (C1, S2). Before the head moved nothing happened; after it everything is durable (C6).
- A chunk whose bytes are known to be stored is not written again. A save refers to packs of its parent, which
  is the head until the commit, and to packs this process wrote lately; to nothing else, because anything else
  a sweep may be about to delete (C5).
- History is the chain of manifests from the head back, each naming its parent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sublet.core.checkpoints.checkpoint import (
    LONGEST_SAVE_US,
    Away,
    ByteSpan,
    ChunkEntry,
    Manifest,
    TensorEntry,
    away_of,
    lay_out,
    manifest_bytes,
)
from sublet.core.checkpoints.versions import Adoption
from sublet.core.errors import BadInput, Damaged, Disconnected, HeadMoved, NotDurable, Refused
from sublet.core.progress.effect import AlreadyCommitted, Commit, Head, Steps
from sublet.core.values import check_job
from sublet.machine.failpoints import failpoint
from sublet.ports.ledger import Ledger
from sublet.ports.store import Fence, HostMemory
from sublet.store.arena import Arena
from sublet.store.load.loading import READERS, Loading
from sublet.store.load.restoring import part_of
from sublet.store.load.weights import Exported, read_weights, tensors_of, write_safetensors
from sublet.store.replicas.catching_up import CatchingUp, ReplicaLag
from sublet.store.replicas.ownership import claim
from sublet.store.replicas.quorum import KnownPacks, PublishedManifest, Replicas, SaveTimings
from sublet.store.save.background import Writer
from sublet.store.save.packing import Packed, digest, write_pack
from sublet.store.save.refused import remove_refused
from sublet.store.save.saving import Owned, PendingSave, Saved
from sublet.store.slots import Slot
from sublet.store.tree import take_apart
from sublet.store.upkeep.lineage import is_digest
from sublet.store.upkeep.sweeping import Progress, quiet

#: Fewer bytes are written by a thread: they disturb training less than starting a process would.
WORTH_A_PROCESS = 1 << 20
#: How long a store that is closed waits for replicas that take what they lack. One that is away is not waited
#: for.
FAREWELL_SECONDS = 30.0
#: How often the outcome of a commit is asked for when the connection broke under it.
ASK_AGAIN = 5


Write = Callable[[Arena, Sequence[ByteSpan]], Packed]
#: Moves the head to a durable manifest. Takes the manifest, its digest, and the bytes it stores that the
#: version before did not; returns the new version.
Commits = Callable[[Manifest, str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    """A save whose bytes are in the arena, and what will be said about them."""

    name: str
    version: int
    step: int
    schema: str
    parent: str
    tree: Any
    tensors: tuple[TensorEntry, ...]
    slot: Slot
    since: int
    tenant: str
    epoch: int


class CheckpointStore(Loading):
    def __init__(
        self, replicas: Replicas, ledger: Callable[[], Ledger], memory: HostMemory | None = None
    ) -> None:
        super().__init__(replicas, ledger, memory)
        self._behind: PendingSave | None = None
        self._owned: Owned | None = None
        self._writer = Writer()
        self._catching_up = CatchingUp(replicas, lambda: self.lineage.everything())
        self._given_up = False
        self._claimed = False
        self._pid = os.getpid()

    def _leave_the_parents(self) -> None:
        """After a fork: the parent's threads are not here, and nobody would free the locks they held."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._behind = self._owned = None
            self._ahead = {}
            self._writer = Writer()
            self._catching_up = CatchingUp(self._replicas, lambda: self.lineage.everything())

    def close(self) -> None:
        """Waits for a save that is under way, and for replicas that are catching up with it, for a while;
        then gives the memory of the last states back. What was loaded is the caller's."""
        self._leave_the_parents()
        try:
            self.settle()
            if not self._given_up:
                self._catching_up.settle(FAREWELL_SECONDS)
        finally:
            self._catching_up.stop()
            self._join_ahead()
            self._writer.close()
            self._slots.close()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # replicas that are slow or away

    @property
    def away(self) -> Away | None:
        """Replicas that have not answered for some seconds, and whether saves wait for them."""
        silent = {r.name: r.away for r in self._replicas.remote if r.away} | self._writer.away
        return away_of(self._replicas.policy, silent, self._replicas.domains)

    def behind(self) -> list[ReplicaLag]:
        """Replicas that have not got yet what was committed, and by how much."""
        return self._catching_up.standing()

    def catch_up(self, seconds: float = 60.0) -> bool:
        """Wait until every replica has what was committed, at most so long; whether they have."""
        for replica in self._replicas.remote:
            replica.ask_again()
        return self._catching_up.settle(seconds, patient=True)

    def give_up(self) -> None:
        """A save under way fails now instead of waiting for a replica; its head does not move, unless it has
        (C6)."""
        self._given_up = True
        for replica in self._replicas.remote:
            replica.give_up()
        self._writer.give_up()

    def _take_up(self) -> None:
        if self._given_up:
            self._given_up = False
            for replica in self._replicas.remote:
                replica.take_up()
            self._writer.take_up()

    # saving

    def save(
        self,
        name: str,
        state: Any,
        *,
        expected_version: int,
        lease: Fence,
        schema: str = "",
        step: int | None = None,
        steps: Steps | None = None,
    ) -> Saved:
        """Durable and committed when it returns. Raises with the head unmoved otherwise; never half.

        `steps` says more of what is committed than the number of one step: several, their cursor, what came
        of them, and effects that become true with them.
        """
        self.settle()
        self._take_up()
        copied = self._copy(name, state, expected_version, lease, schema, steps.step if steps else step)
        return self._finish(copied, self._leased(lease, steps), self._write_here)

    def save_behind(
        self,
        name: str,
        state: Any,
        *,
        expected_version: int,
        lease: Fence,
        schema: str = "",
        step: int | None = None,
        steps: Steps | None = None,
        overlap: Any = None,
    ) -> PendingSave:
        """Copied when it returns: the state may change at once. Hashed, written and committed behind the next
        steps, by another process.

        With `overlap=optimizer` (or a list of them) what the optimizer owns is copied behind the next forward
        and backward passes too, at the latest when the optimizer steps. Nothing else may write to its
        parameters until then.

        One at a time: the next save waits for this one, and raises what became of it if it failed. Its head
        has then not moved.
        """
        self.settle()
        self._take_up()
        owned = Owned(overlap) if overlap is not None else None
        copied = self._copy(
            name, state, expected_version, lease, schema, steps.step if steps else step, owned
        )
        commit = self._leased(lease, steps)
        saving = PendingSave(lambda: self._finish(copied, commit, self._write_behind, owned))
        try:
            if owned is not None:
                owned.finish_before_steps()
            self._behind, self._owned = saving, owned
            saving.begin()
        except BaseException as e:
            if isinstance(e, Exception) or not saving.has_begun():
                self._behind = self._owned = None
                copied.slot.in_use = False
                if owned is not None:
                    owned.let_steps_go()  # nobody will make the copy they would wait for
            raise
        return saving

    def settle(self) -> None:
        """Wait for the save that is under way, if there is one, and raise what went wrong with it. Said
        once."""
        self._leave_the_parents()
        behind, owned = self._behind, self._owned
        if behind is None:
            return
        behind.wait()  # interrupted, it is still under way: the next save must not copy over what it writes
        self._behind = self._owned = None
        if owned is not None:
            owned.let_steps_go()
        behind.result()

    def _write_here(self, arena: Arena, spans: Sequence[ByteSpan]) -> Packed:
        return write_pack(arena.view, spans, self._replicas.replicas, self._replicas.enough)

    def _write_behind(self, arena: Arena, spans: Sequence[ByteSpan]) -> Packed:
        small = sum(span.size for span in spans) < WORTH_A_PROCESS
        return (self._write_here if small else self._write_elsewhere)(arena, spans)

    def _write_elsewhere(self, arena: Arena, spans: Sequence[ByteSpan]) -> Packed:
        # The domain is ours to know; without one a '@' in a path would be taken for its beginning.
        quorum = {"policy": asdict(self._replicas.policy), "domains": self._replicas.domains}
        return self._writer.write(arena, spans, [f"{r.name}@writer" for r in self._replicas.replicas], quorum)

    def _copy(
        self,
        name: str,
        state: Any,
        expected_version: int,
        lease: Fence | str,
        schema: str,
        step: int | None,
        owned: Owned | None = None,
    ) -> _Copied:
        """What the training thread pays for: everything after this needs the arena, and not the state (or
        what is owned of it)."""
        check_job(name)
        if isinstance(lease, Fence):
            lease.check()
        self._join_ahead()
        head = self._ledger().head(name)
        version = head.version if head is not None else 0
        if version != expected_version:
            raise HeadMoved(f"{name} is at version {version}, not {expected_version}", version=version)
        taken = take_apart(state)
        layout = lay_out([s.nbytes for s in taken.storages])
        slot = self._slots.place(name, layout)
        known, slot.entries = slot.entries, [None] * len(layout.chunks)  # nothing, if the copy is interrupted
        fresh = all(entry is None for entry in known)
        now, later = owned.split(taken) if owned is not None else (None, [])
        try:
            dirty = slot.arena.take(taken.storages, layout, all_new=fresh, only=now)
        except BaseException:
            self._slots.abandon(name)
            raise
        copied = _Copied(
            name=name,
            version=expected_version + 1,
            step=step if step is not None else (head.step if head else 0) + 1,
            schema=schema,
            parent=head.digest if head is not None and is_digest(head.digest) else "",
            tree=taken.tree,
            tensors=taken.tensors,
            slot=slot,
            since=_now_us(),
            tenant=self._tenant(head, lease),
            epoch=lease.key.epoch if isinstance(lease, Fence) else 0,
        )
        if owned is None:
            slot.entries = _unchanged(known, dirty)
        else:
            owned.leave(slot, taken, layout, later, lambda more: _unchanged(known, dirty, more))
        slot.in_use = True
        return copied

    def _finish(self, copied: _Copied, commit: Commits, write: Write, owned: Owned | None = None) -> Saved:
        try:
            if owned is not None:
                owned.copied()
            return self._store(copied, commit, write)
        finally:
            copied.slot.in_use = False

    def _store(self, copied: _Copied, commit: Commits, write: Write) -> Saved:
        slot = copied.slot
        account = SaveTimings()
        lacking: dict[str, dict[str, tuple[ChunkEntry, ...] | None]] = {}
        if not self._claimed:
            claim(self._replicas.replicas, self._ledger().identity().id)
            self._claimed = True
        kept = KnownPacks(self._replicas)
        # Who saved the state before knows what changed since; anybody else looks for what that state had.
        mine = copied.parent == slot.saved_as
        parent = None if mine else self._parent(copied.parent)
        lately = {p for p, since in slot.written.items() if copied.since - since < LONGEST_SAVE_US}
        # A parent that does not read gives nothing to refer to: what this process saved before it may be
        # swept already.
        usable = lately | (slot.packs if mine else set(parent.packs) if parent is not None else set())
        there = kept.among({e.pack for e in slot.entries if e is not None} & usable)
        slot.entries = [e if e is not None and e.pack in there else None for e in slot.entries]
        written = self._store_chunks(copied, parent, kept, write, lacking)
        failpoint("before_manifest")
        manifest = Manifest(
            name=copied.name,
            tenant=copied.tenant,
            version=copied.version,
            step=copied.step,
            schema=copied.schema,
            policy=digest(self._replicas.policy.to_text().encode()),
            parent=copied.parent,
            epoch=copied.epoch,
            attempt=secrets.token_hex(8),
            tree=copied.tree,
            tensors=copied.tensors,
            storages=slot.layout.storages,
            chunks=tuple(e for e in slot.entries if e is not None),
            size=slot.layout.size,
        )
        data = manifest_bytes(manifest)
        spread = self._replicas.spread(data, account)
        name_of_manifest = spread.name
        account.quorum_seconds = time.monotonic() - account.begun
        self._writer.is_there(spread.confirmed)
        failpoint("after_quorum")
        if _now_us() - copied.since > LONGEST_SAVE_US:
            raise NotDurable(
                f"the save of {copied.name} took longer than {LONGEST_SAVE_US // 3_600_000_000} hours, and "
                "was given up",
                remedy="use faster replicas; what was written is shared with the next save",
            )
        # By what the version before needed, not by what was written now: an attempt that was refused has
        # written it already.
        before = slot.packs if mine else frozenset(parent.packs if parent is not None else ())
        try:
            committed = commit(manifest, name_of_manifest, manifest.added_bytes(before))
        except Refused:  # by its transaction, so the head has not moved, and nobody knows these names
            remove_refused(self._replicas.replicas, name_of_manifest, slot.forget_written())
            raise
        slot.settle_on(name_of_manifest, manifest)
        self._slots.remember(copied.name, slot, name_of_manifest, data)
        for name, packs in kept.lacking.items():
            known = lacking.setdefault(name, {})
            known.update({pack: known.get(pack) for pack in packs & set(manifest.packs)})
        self._owe(spread, lacking, (name_of_manifest, data, account))
        total = sum(c.size for c in slot.layout.chunks)
        return Saved(
            version=committed,
            digest=name_of_manifest,
            bytes_written=written,
            bytes_shared=total - written,
            account=account,
        )

    def _owe(
        self,
        spread: PublishedManifest,
        lacking: dict[str, dict[str, tuple[ChunkEntry, ...] | None]],
        manifest: tuple[str, bytes, SaveTimings],
    ) -> None:
        """Note what is committed now and was not waited for."""
        account = manifest[2]
        remote = {r.name for r in self._replicas.remote}
        without = {name for name in remote if name in spread.late or name in spread.failed}
        account.late = tuple(sorted(without | (lacking.keys() & remote)))
        for name in account.late:
            account.seconds.pop(name, None)  # the manifest alone is not the save
            self._catching_up.owe(name, packs=lacking.get(name, {}), manifest=manifest)

    def _parent(self, digest: str) -> Manifest | None:
        """The state before, whose chunks need not be written again. Losing it must not keep the next one from
        being saved."""
        try:
            return self._replicas.manifest(digest, self.health) if digest else None
        except Damaged:
            return None

    def _store_chunks(
        self,
        copied: _Copied,
        parent: Manifest | None,
        kept: KnownPacks,
        write: Write,
        lacking: dict[str, dict[str, tuple[ChunkEntry, ...] | None]],
    ) -> int:
        """Everything not known to be stored: looked for by digest in the parent, written if it is not
        there."""
        slot = copied.slot
        unknown = [n for n, entry in enumerate(slot.entries) if entry is None]
        stored: dict[tuple[str, int], ChunkEntry] = {}
        if parent is not None and unknown:
            there = kept.among(parent.packs)
            stored = {(c.digest, c.span.size): c for c in parent.chunks if c.pack in there}
        if stored:
            with ThreadPoolExecutor(READERS) as pool:
                spans = [slot.layout.chunks[n] for n in unknown]
                digests = list(pool.map(lambda s: digest(slot.arena.view[s.offset : s.end]), spans))
            new = []
            for number, name in zip(unknown, digests, strict=True):
                span = slot.layout.chunks[number]
                known = stored.get((name, span.size))
                if known is None:
                    new.append(number)
                else:
                    slot.entries[number] = ChunkEntry(span, name, known.pack, known.at)
            unknown = new
        if not unknown:
            return 0
        spans = [slot.layout.chunks[n] for n in unknown]
        packed = write(slot.arena, spans)
        self._replicas.require(packed.confirmed, packed.failed, "the state")
        slot.written[packed.pack] = copied.since
        for number, span, name, at in zip(unknown, spans, packed.digests, packed.places, strict=True):
            slot.entries[number] = ChunkEntry(span, name, packed.pack, at)
        whole = tuple(entry for n in unknown if (entry := slot.entries[n]) is not None)
        for name in (*packed.late, *packed.failed):
            lacking.setdefault(name, {})[packed.pack] = whole
        return sum(span.size for span in spans)

    def _tenant(self, head: Head | None, lease: Fence | str) -> str:
        if isinstance(lease, str):
            return lease
        return head.tenant if head else self._ledger().look(lease.key.lease_id).lease.tenant

    def _leased(self, lease: Fence, steps: Steps | None = None) -> Commits:
        return lambda manifest, name, added: self._commit(self._ledger(), lease, manifest, name, added, steps)

    def _commit(
        self,
        ledger: Ledger,
        lease: Fence,
        manifest: Manifest,
        name: str,
        added: int,
        steps: Steps | None,
    ) -> int:
        said = steps or Steps(step=manifest.step)
        commit = Commit(
            job=manifest.name,
            key=said.key or f"save:{manifest.name}:{manifest.version}:{name[:16]}",
            step=manifest.step,
            fingerprint=said.fingerprint or name,
            expected_version=manifest.version - 1,
            digest=name,
            cursor=said.cursor,
            outcome=said.outcome,
            first=said.first,
            starts=said.starts,
            effects=said.effects,
            new_bytes=added,
            whole_bytes=manifest.stored_bytes,
        )
        try:
            answer = ledger.commit(lease.key, commit)
            if isinstance(answer, AlreadyCommitted):
                raise HeadMoved(
                    f"{commit.key} was committed before, at version {answer.version}", version=answer.version
                )
            return answer.version
        except Disconnected:
            # Whether it happened is written down; nothing is repeated before that was read (S5).
            for attempt in range(ASK_AGAIN):
                with contextlib.suppress(Disconnected):
                    effect = ledger.effect(commit.key)
                    if effect is None or not effect.completed:
                        break
                    if (effect.owner, effect.epoch) != (lease.key.lease_id, lease.key.epoch):
                        raise HeadMoved(
                            f"{commit.key} was committed by another holder, at version {effect.version}",
                            version=effect.version,
                        ) from None
                    return effect.version
                if attempt == ASK_AGAIN - 1:
                    raise
            raise

    # files of other programs

    def export(
        self,
        name: str,
        path: str | Path,
        *,
        weights: str | None = None,
        version: int | str | None = None,
        progress: Progress = quiet,
    ) -> Exported:
        """Tensors to a `.safetensors` file, every byte verified first. `weights` names the part they are in
        ('model'), whose names they then have in the file; without it they have their whole paths."""
        found = self.manifest(name, version)
        state = self.load(
            name, version=found.version, keys=None if weights is None else [weights], progress=progress
        )
        part = state if weights is None else part_of(state, weights)
        tensors, others = tensors_of(part)
        if not tensors:
            raise BadInput(f"{weights or name} has no tensors to export")
        about = {"sublet.name": name, "sublet.version": str(found.version), "sublet.step": str(found.step)}
        return Exported(
            tensors=len(tensors), bytes=write_safetensors(Path(path), tensors, about), left_out=others
        )

    def import_weights(
        self,
        name: str,
        path: str | Path,
        *,
        under: str = "",
        tenant: str = "default",
        actor: str = "operator",
    ) -> Saved:
        """A new job that begins with the weights of a `.safetensors` or `.pt` file, as `under` ('model') of
        its state."""
        head = self._ledger().head(check_job(name))
        if head is not None:
            raise HeadMoved(
                f"there is a job {name} already, at version {head.version}; nothing was changed",
                version=head.version,
                remedy="choose another name",
            )
        weights = read_weights(Path(path))
        self.settle()
        copied = self._copy(name, {under: weights} if under else weights, 0, tenant, "", 0)

        def adopt(manifest: Manifest, digest_of: str, added: int) -> int:
            adoption = Adoption(
                job=name,
                tenant=tenant,
                expected_version=0,
                version=1,
                digest=digest_of,
                step=0,
                epoch=0,
                reason="import",
                new_bytes=added,
                whole_bytes=manifest.stored_bytes,
            )
            return self._ledger().adopt(adoption, actor=actor).head.version

        return self._finish(copied, adopt, self._write_here)


def _unchanged(known: Sequence[ChunkEntry | None], *dirty: Sequence[bool]) -> list[ChunkEntry | None]:
    return [None if any(changed) else entry for entry, *changed in zip(known, *dirty, strict=True)]


def _now_us() -> int:
    """Goes on while the machine sleeps: so does the age of what was written."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
