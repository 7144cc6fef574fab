"""The checkpoint store: states by name and version.

Rules of this file:
- Order of a save: copy, chunks to a quorum, manifest to a quorum, then the head, in one transaction with the fence (C1, S2). Before the
  head moved nothing happened; after it everything is durable (C6).
- A chunk whose bytes are known to be stored is not written again. A save refers to packs of its parent, which is the head until the
  commit, and to packs this process wrote lately; to nothing else, because anything else a sweep may be about to delete (C5).
- History is the chain of manifests from the head back, each naming its parent.
- A load into tensors goes through the arena the next save will copy into: its pages are there then, and only what changed is written.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from sublet.core.checkpoint import (
    LONGEST_SAVE_US,
    ChunkEntry,
    Manifest,
    Span,
    TensorEntry,
    lay_out,
    manifest_bytes,
)
from sublet.core.effect import Commit
from sublet.core.errors import (
    BadInput,
    Damaged,
    Disconnected,
    HeadMoved,
    Misconfigured,
    NotDurable,
    SubletError,
)
from sublet.core.values import check_job
from sublet.failpoints import failpoint
from sublet.ports.ledger import LeaseKey, Ledger
from sublet.ports.memory import HostMemory
from sublet.store.arena import Arena
from sublet.store.background import Writer
from sublet.store.lineage import is_digest
from sublet.store.ownership import claim
from sublet.store.packing import Packed, digest, write_pack
from sublet.store.replicas import Health, Kept, Replicas
from sublet.store.restoring import check_fits, chunks_of, copy_into, lends, only, storages_of
from sublet.store.saving import Owned, Saved, Saving
from sublet.store.slots import Slot, Slots, layout_of, unknown
from sublet.store.tree import put_together, take_apart
from sublet.store.upkeep import Upkeep

READERS = 4
#: How often the outcome of a commit is asked for when the connection broke under it.
ASK_AGAIN = 5


Write = Callable[[Arena, Sequence[Span]], Packed]


class Fenced(Protocol):
    """What a save needs of a lease."""

    @property
    def key(self) -> LeaseKey: ...
    def check(self) -> None: ...


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


class CheckpointStore(Upkeep):
    def __init__(
        self, replicas: Replicas, ledger: Callable[[], Ledger], memory: HostMemory | None = None
    ) -> None:
        super().__init__(replicas, ledger)
        self._slots = Slots(memory)
        self._behind: Saving | None = None
        self._owned: Owned | None = None
        self._ahead: dict[str, threading.Thread] = {}
        self._writer = Writer()
        self._claimed = False

    def close(self) -> None:
        """Waits for a save that is under way, then gives the memory of the last states back. What was loaded is the caller's."""
        try:
            self.settle()
        finally:
            self._join_ahead()
            self._writer.close()
            self._slots.close()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # saving

    def save(
        self,
        name: str,
        state: Any,
        *,
        expected_version: int,
        lease: Fenced,
        schema: str = "",
        step: int | None = None,
    ) -> Saved:
        """Durable and committed when it returns. Raises with the head unmoved otherwise; never half."""
        self.settle()
        copied = self._copy(name, state, expected_version, lease, schema, step)
        return self._finish(copied, lease, self._write_here)

    def save_behind(
        self,
        name: str,
        state: Any,
        *,
        expected_version: int,
        lease: Fenced,
        schema: str = "",
        step: int | None = None,
        overlap: Any = None,
    ) -> Saving:
        """Copied when it returns: the state may change at once. Hashed, written and committed behind the next steps, by another process.

        With `overlap=optimizer` (or a list of them) what the optimizer owns is copied behind the next forward and backward passes
        too, at the latest when the optimizer steps. Nothing else may write to its parameters until then.

        One at a time: the next save waits for this one, and raises what became of it if it failed. Its head has then not moved.
        """
        self.settle()
        owned = Owned(overlap) if overlap is not None else None
        copied = self._copy(name, state, expected_version, lease, schema, step, owned)
        if owned is not None:
            self._owned = owned
            owned.finish_before_steps()
        self._behind = Saving(lambda: self._finish(copied, lease, self._write_elsewhere, owned))
        return self._behind

    def settle(self) -> None:
        """Wait for the save that is under way, if there is one, and raise what went wrong with it. Said once."""
        behind, self._behind = self._behind, None
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.let_steps_go()
        if behind is not None:
            behind.result()

    def _write_here(self, arena: Arena, spans: Sequence[Span]) -> Packed:
        return write_pack(arena.view, spans, self._replicas.replicas)

    def _write_elsewhere(self, arena: Arena, spans: Sequence[Span]) -> Packed:
        # The domain is ours to know; without one a '@' in a path would be taken for its beginning.
        return self._writer.write(arena, spans, [f"{r.name}@writer" for r in self._replicas.replicas])

    def _copy(
        self,
        name: str,
        state: Any,
        expected_version: int,
        lease: Fenced,
        schema: str,
        step: int | None,
        owned: Owned | None = None,
    ) -> _Copied:
        """What the training thread pays for: everything after this needs the arena, and not the state (or what is owned of it)."""
        check_job(name)
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
        dirty = slot.arena.take(taken.storages, layout, all_new=fresh, only=now)
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
            tenant=head.tenant if head else self._ledger().look(lease.key.lease_id).lease.tenant,
        )
        if owned is None:
            slot.entries = _unchanged(known, dirty)
        else:
            owned.leave(slot, taken, layout, later, lambda more: _unchanged(known, dirty, more))
        slot.in_use = True
        return copied

    def _finish(self, copied: _Copied, lease: Fenced, write: Write, owned: Owned | None = None) -> Saved:
        try:
            if owned is not None:
                owned.copied()
            return self._store(copied, lease, write)
        finally:
            copied.slot.in_use = False

    def _store(self, copied: _Copied, lease: Fenced, write: Write) -> Saved:
        slot = copied.slot
        if not self._claimed:
            claim(self._replicas.replicas, self._ledger().identity().id)
            self._claimed = True
        kept = Kept(self._replicas)
        # Who saved the state before knows what changed since; anybody else looks for what that state had.
        mine = copied.parent == slot.saved_as
        parent = None if mine else self._parent(copied.parent)
        lately = {p for p, since in slot.written.items() if copied.since - since < LONGEST_SAVE_US}
        # A parent that does not read gives nothing to refer to: what this process saved before it may be swept already.
        usable = lately | (slot.packs if mine else set(parent.packs) if parent is not None else set())
        there = kept.among({e.pack for e in slot.entries if e is not None} & usable)
        slot.entries = [e if e is not None and e.pack in there else None for e in slot.entries]
        written = self._store_chunks(copied, parent, kept, write)
        failpoint("before_manifest")
        manifest = Manifest(
            name=copied.name,
            tenant=copied.tenant,
            version=copied.version,
            step=copied.step,
            schema=copied.schema,
            policy=digest(self._replicas.policy.to_text().encode()),
            parent=copied.parent,
            epoch=lease.key.epoch,
            attempt=secrets.token_hex(8),
            tree=copied.tree,
            tensors=copied.tensors,
            storages=slot.layout.storages,
            chunks=tuple(e for e in slot.entries if e is not None),
            size=slot.layout.size,
        )
        data = manifest_bytes(manifest)
        name_of_manifest, _ = self._replicas.put_manifest(data)
        failpoint("after_quorum")
        if _now_us() - copied.since > LONGEST_SAVE_US:
            raise NotDurable(
                f"the save of {copied.name} took longer than {LONGEST_SAVE_US // 3_600_000_000} hours, and was given up",
                remedy="use faster replicas; what was written is shared with the next save",
            )
        committed = self._commit(self._ledger(), lease, manifest, name_of_manifest)
        slot.settle_on(name_of_manifest, manifest)
        self._slots.remember(copied.name, slot, name_of_manifest, data)
        total = sum(c.size for c in slot.layout.chunks)
        return Saved(
            version=committed, digest=name_of_manifest, bytes_written=written, bytes_shared=total - written
        )

    def _parent(self, digest: str) -> Manifest | None:
        """The state before, whose chunks need not be written again. Losing it must not keep the next one from being saved."""
        try:
            return self._replicas.manifest(digest, self.health) if digest else None
        except Damaged:
            return None

    def _store_chunks(self, copied: _Copied, parent: Manifest | None, kept: Kept, write: Write) -> int:
        """Everything not known to be stored: looked for by digest in the parent, written if it is not there."""
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
        return sum(span.size for span in spans)

    def _commit(self, ledger: Ledger, lease: Fenced, manifest: Manifest, name: str) -> int:
        commit = Commit(
            job=manifest.name,
            key=f"save:{manifest.name}:{manifest.version}:{name[:16]}",
            step=manifest.step,
            fingerprint=name,
            expected_version=manifest.version - 1,
            digest=name,
        )
        try:
            return ledger.commit(lease.key, commit).version
        except Disconnected:
            # Whether it happened is written down; nothing is repeated before that was read (S5).
            for attempt in range(ASK_AGAIN):
                with contextlib.suppress(Disconnected):
                    effect = ledger.effect(commit.key)
                    if effect is not None and effect.completed:
                        return effect.version
                    break
                if attempt == ASK_AGAIN - 1:
                    raise
            raise

    # loading

    def load(
        self,
        name: str,
        *,
        version: int | str | None = None,
        schema: str | None = None,
        into: Any = None,
        keys: Sequence[str] | None = None,
    ) -> Any:
        """The state as it was saved, every byte verified. `into` restores in place where shapes and types agree; `keys` names the
        parts that are wanted, as `sublet checkpoint show` lists them, and nothing else is read."""
        self._join_ahead(name)
        manifest = (self._recall(name) if version is None else None) or self.manifest(name, version)
        if manifest.name != name:
            raise Damaged(f"the head of {name} refers to a state of {manifest.name[:100]}")
        if schema is not None and manifest.schema != schema:
            raise BadInput(
                f"{name} was saved with schema {manifest.schema!r}, not {schema!r}",
                remedy="load it with the code that saved it, or without schema= to convert it",
            )
        keys = [keys] if isinstance(keys, str) else keys
        tree = manifest.tree if keys is None else only(manifest, keys)
        slot = self._slots.get(name)
        busy = slot is not None and slot.in_use
        if into is None or keys is not None or version is not None or busy:
            state = self._load_apart(manifest, tree, None if keys is None else storages_of(tree, manifest))
            if into is None:
                return state
            check_fits(state, into, part=keys is not None)
        else:
            state = self._put_together(manifest, tree, self._fill_slot(manifest).arena)
            check_fits(state, into)
            if lends(state, into):
                state = self._load_apart(manifest, tree, None)
        copy_into(state, into)
        return into

    def prefetch(self, name: str) -> None:
        """Begin to read the newest state into memory, while the program imports and builds what it will be loaded into."""
        if name in self._ahead or self._slots.get(check_job(name)) is not None:
            return

        def read() -> None:
            with contextlib.suppress(SubletError, OSError):  # the load that follows says what is wrong
                self._fill_slot(self._recall(name) or self.manifest(name))

        self._ahead[name] = threading.Thread(target=read, name="sublet-prefetch", daemon=True)
        self._ahead[name].start()

    def _join_ahead(self, name: str | None = None) -> None:
        for key in [name] if name is not None else list(self._ahead):
            thread = self._ahead.pop(key, None)
            if thread is not None:
                thread.join()

    def _recall(self, name: str) -> Manifest | None:
        head = self._ledger().head(check_job(name))
        return self._slots.recall(name, head.digest) if head is not None else None

    def _put_together(self, manifest: Manifest, tree: Any, arena: Arena) -> Any:
        spans = manifest.storages
        return put_together(tree, manifest.tensors, lambda n: arena.view[spans[n].offset : spans[n].end])

    def _load_apart(self, manifest: Manifest, tree: Any, storages: set[int] | None) -> Any:
        """Into memory that becomes the state's own. Nothing is copied a second time."""
        wanted = range(len(manifest.chunks)) if storages is None else chunks_of(storages, manifest)
        with _enough_memory(manifest):
            arena = Arena(manifest.size, shared=False, populate=False)
        self._read(arena, manifest, wanted)
        return self._put_together(manifest, tree, arena)

    def _fill_slot(self, manifest: Manifest) -> Slot:
        """The slot of this name has the manifest's state when it returns: what it had already is not read again."""
        with _enough_memory(manifest):
            slot = self._slots.place(manifest.name, layout_of(manifest), populate=False)
        wanted = unknown(slot, manifest.chunks)
        if wanted:
            for number in wanted:
                slot.entries[number] = None
            wanted = self._verified(slot, manifest, wanted)
            self._read(slot.arena, manifest, wanted)
            slot.entries = list(manifest.chunks)
            data = manifest_bytes(manifest)
            slot.settle_on(digest(data), manifest)
            self._slots.remember(manifest.name, slot, slot.saved_as, data)
        return slot

    def _verified(self, slot: Slot, manifest: Manifest, numbers: Sequence[int]) -> list[int]:
        """Those of them that an arena which outlived its process has not in good order."""
        if not slot.inherited:
            return list(numbers)
        slot.inherited = False

        def differs(number: int) -> bool:
            chunk = manifest.chunks[number]
            slot.arena.populate(chunk.span)  # mapped at once: page by page costs more than hashing it
            return digest(slot.arena.view[chunk.span.offset : chunk.span.end]) != chunk.digest

        with ThreadPoolExecutor(READERS) as pool:
            return [n for n, bad in zip(numbers, pool.map(differs, numbers), strict=True) if bad]

    def _read(self, arena: Arena, manifest: Manifest, numbers: Sequence[int]) -> None:
        health = Health()

        def read(number: int) -> None:
            chunk = manifest.chunks[number]
            arena.populate(chunk.span)
            self._replicas.chunk(chunk, arena.view[chunk.span.offset : chunk.span.end], health)

        pool = ThreadPoolExecutor(READERS)
        try:
            for _ in pool.map(read, numbers):
                pass
        finally:
            # What is not there must not cost the memory of the rest, only because a manifest speaks of it.
            pool.shutdown(cancel_futures=True)
        if health.wanting:
            # Older versions and other jobs share these packs, and want what they have of them.
            everything = itertools.chain([manifest], self.lineage.everything())
            self._replicas.repair(everything, health, only=health.wanting)
        self.health.add(health)


@contextlib.contextmanager
def _enough_memory(manifest: Manifest) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError) as e:
        raise Misconfigured(
            f"{manifest.name} needs {manifest.size} bytes of memory, which this machine has not"
        ) from e


def _unchanged(known: Sequence[ChunkEntry | None], *dirty: Sequence[bool]) -> list[ChunkEntry | None]:
    return [None if any(changed) else entry for entry, *changed in zip(known, *dirty, strict=True)]


def _now_us() -> int:
    """Goes on while the machine sleeps: so does the age of what was written."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
