"""The checkpoint store: states by name and version.

Rules of this file:
- Order of a save: copy, chunks to a quorum, manifest to a quorum, then the head, in one transaction with the fence (C1, S2). Before the
  head moved nothing happened; after it everything is durable (C6).
- A chunk whose bytes are known to be stored is not written again. A save refers to packs of its parent, which is the head until the
  commit, and to packs this process wrote lately; to nothing else, because anything else a sweep may be about to delete (C5).
- History is the chain of manifests from the head back, each naming its parent.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from sublet.core.checkpoint import (
    LONGEST_SAVE_US,
    ChunkEntry,
    Layout,
    Manifest,
    Span,
    TensorEntry,
    lay_out,
    manifest_bytes,
)
from sublet.core.effect import Commit
from sublet.core.errors import BadInput, Damaged, Disconnected, HeadMoved, Misconfigured, NotDurable, NotFound
from sublet.core.values import check_job
from sublet.failpoints import failpoint
from sublet.ports.ledger import LeaseKey, Ledger
from sublet.store.arena import Arena
from sublet.store.background import Writer
from sublet.store.packing import Packed, digest, write_pack
from sublet.store.replicas import Health, Replicas
from sublet.store.tree import put_together, take_apart

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
class Saved:
    version: int
    digest: str
    bytes_written: int
    bytes_shared: int


@dataclass(slots=True)
class _Slot:
    """The last state of one name that this process saved or loaded, and where its chunks are stored."""

    arena: Arena
    layout: Layout
    entries: list[ChunkEntry | None]  # None: not known to be stored
    saved_as: str = ""  # the manifest this process committed last
    packs: frozenset[str] = frozenset()  # and what it refers to
    written: dict[str, int] = field(
        default_factory=dict
    )  # packs of saves that were not committed, and since when


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
    slot: _Slot
    since: int


class Saving:
    """A save under way."""

    def __init__(self, work: Callable[[], Saved]) -> None:
        self._outcome: Saved | BaseException | None = None
        # Not a daemon: a program that comes to its end waits for its last save.
        self._thread = threading.Thread(target=self._run, args=(work,), name="sublet-save")
        self._thread.start()

    def _run(self, work: Callable[[], Saved]) -> None:
        try:
            self._outcome = work()
        except BaseException as e:
            self._outcome = e

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Saved:
        """Wait for it. Raises what went wrong, or `TimeoutError` when it is still under way."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError("the save is still under way")
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


class CheckpointStore:
    def __init__(self, replicas: Replicas, ledger: Callable[[], Ledger]) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._slots: dict[str, _Slot] = {}
        self._behind: Saving | None = None
        self._writer = Writer()
        self.health = Health()

    def close(self) -> None:
        """Waits for a save that is under way, then gives the memory of the last states back. What was loaded is the caller's."""
        try:
            self.settle()
        finally:
            self._writer.close()
            self._free()

    def _free(self) -> None:
        while self._slots:
            self._slots.popitem()[1].arena.close()

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
        return self._finish(
            self._copy(name, state, expected_version, lease, schema, step), lease, self._write_here
        )

    def save_behind(
        self,
        name: str,
        state: Any,
        *,
        expected_version: int,
        lease: Fenced,
        schema: str = "",
        step: int | None = None,
    ) -> Saving:
        """Copied when it returns: the state may change at once. Hashed, written and committed behind the next steps, by another process.

        One at a time: the next save waits for this one, and raises what became of it if it failed. Its head has then not moved.
        """
        self.settle()
        copied = self._copy(name, state, expected_version, lease, schema, step)
        self._behind = Saving(lambda: self._finish(copied, lease, self._write_elsewhere))
        return self._behind

    def settle(self) -> None:
        """Wait for the save that is under way, if there is one, and raise what went wrong with it. Said once."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()

    def _write_here(self, arena: Arena, spans: Sequence[Span]) -> Packed:
        return write_pack(arena.view, spans, self._replicas.replicas)

    def _write_elsewhere(self, arena: Arena, spans: Sequence[Span]) -> Packed:
        # The domain is ours to know; without one a '@' in a path would be taken for its beginning.
        return self._writer.write(arena, spans, [f"{r.name}@writer" for r in self._replicas.replicas])

    def _copy(
        self, name: str, state: Any, expected_version: int, lease: Fenced, schema: str, step: int | None
    ) -> _Copied:
        """What the training thread pays for: everything after this needs the arena, and not the state."""
        check_job(name)
        lease.check()
        head = self._ledger().head(name)
        version = head.version if head is not None else 0
        if version != expected_version:
            raise HeadMoved(f"{name} is at version {version}, not {expected_version}", version=version)
        taken = take_apart(state)
        layout = lay_out([s.nbytes for s in taken.storages])
        slot = self._slot(name, layout)
        known, slot.entries = slot.entries, [None] * len(layout.chunks)  # nothing, if the copy is interrupted
        fresh = all(entry is None for entry in known)
        dirty = slot.arena.take(taken.storages, layout, all_new=fresh)
        slot.entries = [None if changed else entry for entry, changed in zip(known, dirty, strict=True)]
        return _Copied(
            name=name,
            version=expected_version + 1,
            step=step if step is not None else (head.step if head else 0) + 1,
            schema=schema,
            parent=head.digest if head is not None and _is_digest(head.digest) else "",
            tree=taken.tree,
            tensors=taken.tensors,
            slot=slot,
            since=_now_us(),
        )

    def _finish(self, copied: _Copied, lease: Fenced, write: Write) -> Saved:
        slot = copied.slot
        kept = functools.cache(self._replicas.kept)
        # Who saved the state before knows what changed since; anybody else looks for what that state had.
        parent = self._parent(copied.parent) if copied.parent != slot.saved_as else None
        lately = {p for p, since in slot.written.items() if copied.since - since < LONGEST_SAVE_US}
        usable = lately | (slot.packs if parent is None else set(parent.packs))
        slot.entries = [
            e if e is not None and e.pack in usable and kept(e.pack) else None for e in slot.entries
        ]
        written = self._store_chunks(copied, parent, kept, write)
        failpoint("before_manifest")
        manifest = Manifest(
            name=copied.name,
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
        name_of_manifest, _ = self._replicas.put_manifest(manifest_bytes(manifest))
        failpoint("after_quorum")
        if _now_us() - copied.since > LONGEST_SAVE_US:
            raise NotDurable(
                f"the save of {copied.name} took longer than {LONGEST_SAVE_US // 3_600_000_000} hours, and was given up",
                remedy="use faster replicas; what was written is shared with the next save",
            )
        committed = self._commit(self._ledger(), lease, manifest, name_of_manifest)
        slot.saved_as, slot.packs = name_of_manifest, frozenset(manifest.packs)
        slot.written.clear()
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

    def _slot(self, name: str, layout: Layout) -> _Slot:
        slot = self._slots.get(name)
        if slot is not None and slot.layout == layout:
            return slot
        if slot is not None:
            del self._slots[name]
            slot.arena.close()
        slot = self._slots[name] = _Slot(Arena(layout.size), layout, [None] * len(layout.chunks))
        return slot

    def _store_chunks(
        self, copied: _Copied, parent: Manifest | None, kept: Callable[[str], bool], write: Write
    ) -> int:
        """Everything not known to be stored: looked for by digest in the parent, written if it is not there."""
        slot = copied.slot
        unknown = [n for n, entry in enumerate(slot.entries) if entry is None]
        stored: dict[tuple[str, int], ChunkEntry] = {}
        if parent is not None and unknown:
            stored = {(c.digest, c.span.size): c for c in parent.chunks if kept(c.pack)}
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
        self, name: str, *, version: int | None = None, schema: str | None = None, into: Any = None
    ) -> Any:
        """The state as it was saved, every byte verified. `into` restores in place where shapes and types agree."""
        manifest = self.manifest(name, version)
        if schema is not None and manifest.schema != schema:
            raise BadInput(
                f"{name} was saved with schema {manifest.schema!r}, not {schema!r}",
                remedy="load it with the code that saved it, or without schema= to convert it",
            )
        layout = Layout(manifest.storages, tuple(c.span for c in manifest.chunks), manifest.size)
        try:
            arena = Arena(manifest.size, shared=False)
        except (OSError, OverflowError) as e:
            raise Misconfigured(
                f"{name} needs {manifest.size} bytes of memory, which this machine has not"
            ) from e
        self._fill(arena, manifest)
        state = put_together(
            manifest.tree,
            manifest.tensors,
            lambda n: arena.view[layout.storages[n].offset : layout.storages[n].end],
        )
        if into is None:
            return state
        copy_into(state, into, "state")
        return into

    def _fill(self, arena: Arena, manifest: Manifest) -> None:
        health = Health()

        def read(chunk: ChunkEntry) -> None:
            self._replicas.chunk(chunk, arena.view[chunk.span.offset : chunk.span.end], health)

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, manifest.chunks))
        if health.wanting:
            # Older versions share these packs, and want what they have of them.
            kept = [m for m in self.history(manifest.name) if m.version != manifest.version]
            self._replicas.repair([manifest, *kept], health, only=health.wanting)
        self.health.add(health)

    def manifest(self, name: str, version: int | None = None) -> Manifest:
        for manifest in self.history(name):
            if version is None or manifest.version == version:
                return manifest
            if manifest.version < version:
                break
        raise NotFound(f"{name} has no version {version}", remedy="'sublet checkpoint ls' lists them")

    def history(self, name: str) -> Iterator[Manifest]:
        """From the head back, as far as manifests are kept."""
        head = self._ledger().head(check_job(name))
        if head is None or not _is_digest(head.digest):
            raise NotFound(f"nothing was saved as {name}", remedy="'sublet checkpoint ls' lists what was")
        at = head.digest
        while at:
            try:
                manifest = self._replicas.manifest(at, self.health)
            except Damaged:
                if at == head.digest:
                    raise
                return  # retention ended here
            yield manifest
            at = manifest.parent

    # keeping order

    def verify(self, name: str) -> list[tuple[str, str, str]]:
        """Every copy of every pack its versions need: replica, pack, and 'good', 'missing' or 'bad'. Changes nothing."""
        return self._replicas.inspect(list(self.history(name)))

    def repair(self, name: str) -> Health:
        """Give every replica a good copy of everything its versions need; what was done."""
        health = Health()
        manifests = list(self.history(name))
        for manifest in manifests:
            self._replicas.spread_manifest(manifest_bytes(manifest), health)
        self._replicas.repair(manifests, health)
        return health


def _now_us() -> int:
    """Goes on while the machine sleeps: so does the age of what was written."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def copy_into(source: Any, target: Any, path: str) -> None:
    """Tensors copied in place, everything else replaced in its container. All of it, or `BadInput` and nothing."""
    if not isinstance(target, (dict, list)) and not _is_array(target):
        raise BadInput(f"{path} cannot be restored in place: give a dict or list of tensors")
    _check_fits(source, target, path)
    _copy(source, target)


def _is_array(value: Any) -> bool:
    """What has memory that can be written: torch's tensors and NumPy's arrays, not its scalars."""
    numpy = sys.modules.get("numpy")
    return hasattr(value, "copy_") or (numpy is not None and isinstance(value, numpy.ndarray))


def _members(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value)))


def _check_fits(source: Any, target: Any, path: str) -> None:
    if isinstance(target, dict):
        if not isinstance(source, dict) or source.keys() != target.keys():
            raise BadInput(f"{path} has other keys than what was saved")
    elif isinstance(target, list):
        if not isinstance(source, list) or len(source) != len(target):
            raise BadInput(f"{path} has another length than what was saved")
    elif _is_array(target):
        if (
            not _is_array(source)
            or tuple(source.shape) != tuple(target.shape)
            or source.dtype != target.dtype
        ):
            raise BadInput(f"{path} has another shape or type than what was saved")
        if getattr(getattr(target, "flags", None), "writeable", True) is False:
            raise BadInput(f"{path} may not be written to")
        return
    else:
        return
    for key in _members(target):
        _check_fits(source[key], target[key], f"{path}[{key!r}]")


def _copy(source: Any, target: Any) -> None:
    if not isinstance(target, (dict, list)):
        if hasattr(target, "copy_"):
            target.detach().copy_(source.detach())
        else:
            target[...] = source
        return
    for key in _members(target):
        if isinstance(target[key], (dict, list)) or _is_array(target[key]):
            _copy(source[key], target[key])
        else:
            target[key] = source[key]
