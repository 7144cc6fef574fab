"""The checkpoint store: states by name and version.

Rules of this file:
- Order of a save: copy, chunks to a quorum, manifest to a quorum, then the head, in one transaction with the fence (C1, S2). Before the
  head moved nothing happened; after it everything is durable (C6).
- A chunk whose bytes are known to be stored is not written again; what is known comes from the last save or load of this process, or
  from the head's own manifest.
- History is the chain of manifests from the head back, each naming its parent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from sublet.core.checkpoint import ChunkEntry, Layout, Manifest, lay_out
from sublet.core.effect import Commit
from sublet.core.errors import BadInput, Damaged, Disconnected, HeadMoved, NotFound
from sublet.core.values import check_job
from sublet.failpoints import failpoint
from sublet.ports.ledger import LeaseKey, Ledger
from sublet.store.arena import Arena
from sublet.store.packing import digest, write_pack
from sublet.store.replicas import Health, Replicas
from sublet.store.tree import put_together, take_apart

READERS = 4
#: How often the outcome of a commit is asked for when the connection broke under it.
ASK_AGAIN = 5


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


class CheckpointStore:
    def __init__(self, replicas: Replicas, ledger: Callable[[], Ledger]) -> None:
        self._replicas = replicas
        self._ledger = ledger
        self._slots: dict[str, _Slot] = {}
        self.health = Health()

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
        check_job(name)
        lease.check()
        ledger = self._ledger()
        head = ledger.head(name)
        version = head.version if head is not None else 0
        if version != expected_version:
            raise HeadMoved(f"{name} is at version {version}, not {expected_version}", version=version)
        parent = (
            self._replicas.manifest(head.digest) if head is not None and _is_digest(head.digest) else None
        )
        taken = take_apart(state)
        layout = lay_out([s.nbytes for s in taken.storages])
        slot = self._slot(name, layout)
        fresh = all(entry is None for entry in slot.entries)
        dirty = slot.arena.take(taken.storages, layout, all_new=fresh)
        for number, changed in enumerate(dirty):
            if changed:
                slot.entries[number] = None
        written = self._store_chunks(slot, parent)
        failpoint("before_manifest")
        manifest = Manifest(
            name=name,
            version=expected_version + 1,
            step=step if step is not None else (head.step if head else 0) + 1,
            schema=schema,
            policy=digest(self._replicas.policy.to_text().encode()),
            parent=head.digest if parent is not None and head is not None else "",
            epoch=lease.key.epoch,
            tree=taken.tree,
            tensors=taken.tensors,
            storages=layout.storages,
            chunks=tuple(e for e in slot.entries if e is not None),
            size=layout.size,
        )
        name_of_manifest, _ = self._replicas.put_manifest(manifest.to_bytes())
        failpoint("after_quorum")
        committed = self._commit(ledger, lease, manifest, name_of_manifest)
        total = sum(c.size for c in layout.chunks)
        return Saved(
            version=committed, digest=name_of_manifest, bytes_written=written, bytes_shared=total - written
        )

    def _slot(self, name: str, layout: Layout) -> _Slot:
        slot = self._slots.get(name)
        if slot is not None and slot.layout == layout:
            return slot
        if slot is not None:
            slot.arena.close()
        slot = self._slots[name] = _Slot(Arena(layout.size), layout, [None] * len(layout.chunks))
        return slot

    def _store_chunks(self, slot: _Slot, parent: Manifest | None) -> int:
        """Everything not known to be stored: looked for by digest in the parent, written if it is not there."""
        unknown = [n for n, entry in enumerate(slot.entries) if entry is None]
        stored = {(c.digest, c.span.size): c for c in parent.chunks} if parent is not None else {}
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
        packed = write_pack(slot.arena.view, spans, self._replicas.replicas)
        self._replicas.require(packed.confirmed, packed.failed, "the state")
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
        arena = Arena(manifest.size)
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
        if health.set_aside:
            self._replicas.repair([manifest], health)
        self.health.set_aside += health.set_aside
        self.health.repaired += health.repaired
        self.health.unreachable += health.unreachable

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


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def copy_into(source: Any, target: Any, path: str) -> None:
    """Tensors copied in place, everything else replaced in its container."""
    if isinstance(target, dict):
        if not isinstance(source, dict) or source.keys() != target.keys():
            raise BadInput(f"{path} has other keys than what was saved")
        for key, value in source.items():
            if _in_place(value, target[key], f"{path}[{key!r}]"):
                continue
            target[key] = value
        return
    if isinstance(target, list):
        if not isinstance(source, list) or len(source) != len(target):
            raise BadInput(f"{path} has another length than what was saved")
        for number, value in enumerate(source):
            if not _in_place(value, target[number], f"{path}[{number}]"):
                target[number] = value
        return
    if not _in_place(source, target, path):
        raise BadInput(f"{path} cannot be restored in place: give a dict or list of tensors")


def _in_place(source: Any, target: Any, path: str) -> bool:
    if isinstance(target, (dict, list)):
        copy_into(source, target, path)
        return True
    copy = getattr(target, "copy_", None)  # torch
    module = type(target).__module__.partition(".")[0]
    if copy is None and module != "numpy":
        return False
    if tuple(getattr(source, "shape", ())) != tuple(target.shape) or source.dtype != target.dtype:
        raise BadInput(f"{path} has another shape or type than what was saved")
    if copy is not None:
        copy_data = target.detach()
        copy_data.copy_(source.detach())
    else:
        target[...] = source
    return True
