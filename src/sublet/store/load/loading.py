"""Loading: a state back into memory, or into what the caller has, every byte verified first (C3).

Rules of this file:
- A load into tensors goes through the arena the next save will copy into: its pages are there then, and only
  what changed is written. Nothing of it reaches the caller before all of it is verified (C4).
- A load without a target reads into memory that becomes the state's own; nothing is copied a second time.
- What an arena of this process has already, or one that outlived a dead process, is not read again.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sublet.core.checkpoints.checkpoint import Manifest, manifest_bytes
from sublet.core.errors import BadInput, Damaged, Misconfigured, SubletError
from sublet.core.values import check_job
from sublet.ports.ledger import Ledger
from sublet.ports.store import HostMemory
from sublet.store.arena import Arena
from sublet.store.load.restoring import check_fits, chunks_of, copy_into, lends, only, storages_of
from sublet.store.replicas.quorum import Health, Replicas
from sublet.store.save.packing import digest
from sublet.store.slots import Slot, Slots, layout_of, unknown
from sublet.store.tree import put_together
from sublet.store.upkeep.sweeping import Progress, quiet
from sublet.store.upkeep.upkeep import Upkeep

READERS = 4


class Loading(Upkeep):
    def __init__(self, replicas: Replicas, ledger: Callable[[], Ledger], memory: HostMemory | None) -> None:
        super().__init__(replicas, ledger)
        self._slots = Slots(memory)
        self._ahead: dict[str, threading.Thread] = {}

    def load(
        self,
        name: str,
        *,
        version: int | str | None = None,
        schema: str | None = None,
        into: Any = None,
        keys: Sequence[str] | None = None,
        progress: Progress = quiet,
    ) -> Any:
        """The state as it was saved, every byte verified. `into` restores in place where shapes and types
        agree; `keys` names the parts that are wanted, as `sublet checkpoint show` lists them, and nothing
        else is read."""
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
            state = self._load_apart(
                manifest, tree, None if keys is None else storages_of(tree, manifest), progress
            )
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
        """Begin to read the newest state into memory, while the program imports and builds what it will be
        loaded into."""
        if name in self._ahead or self._slots.get(check_job(name)) is not None:
            return

        def read() -> None:
            with contextlib.suppress(SubletError, OSError):  # the load that follows says what is wrong
                self._fill_slot(self._recall(name) or self.manifest(name))

        self._ahead[name] = threading.Thread(target=read, name="sublet-prefetch", daemon=True)
        self._ahead[name].start()

    def _join_ahead(self, name: str | None = None) -> None:
        for key in [name] if name is not None else list(self._ahead):
            thread = self._ahead.get(key)
            if thread is not None:
                thread.join()  # interrupted, it is still there for the next who must not be beside it
                self._ahead.pop(key, None)

    def _recall(self, name: str) -> Manifest | None:
        head = self._ledger().head(check_job(name))
        return self._slots.recall(name, head.digest) if head is not None else None

    def _put_together(self, manifest: Manifest, tree: Any, arena: Arena) -> Any:
        spans = manifest.storages
        return put_together(tree, manifest.tensors, lambda n: arena.view[spans[n].offset : spans[n].end])

    def _load_apart(
        self, manifest: Manifest, tree: Any, storages: set[int] | None, progress: Progress = quiet
    ) -> Any:
        """Load into memory that becomes the state's own, so that nothing is copied a second time."""
        wanted = range(len(manifest.chunks)) if storages is None else chunks_of(storages, manifest)
        with _enough_memory(manifest):
            arena = Arena(manifest.size, shared=False, populate=False)
        self._read(arena, manifest, wanted, progress)
        return self._put_together(manifest, tree, arena)

    def _fill_slot(self, manifest: Manifest) -> Slot:
        """Bring the slot of this name to the manifest's state. What it already has is not read again."""
        with _enough_memory(manifest):
            slot = self._slots.place(manifest.name, layout_of(manifest), populate=False)
        wanted = unknown(slot, manifest.chunks)
        if wanted:
            for number in wanted:
                slot.entries[number] = None
            try:
                wanted = self._verified(slot, manifest, wanted)
                self._read(slot.arena, manifest, wanted)
            except Exception:
                raise
            except BaseException:
                self._slots.abandon(manifest.name)
                raise
            slot.entries = list(manifest.chunks)
            data = manifest_bytes(manifest)
            slot.settle_on(digest(data), manifest)
            self._slots.remember(manifest.name, slot, slot.saved_as, data)
        return slot

    def _verified(self, slot: Slot, manifest: Manifest, numbers: Sequence[int]) -> list[int]:
        """The chunks of a surviving arena that do not verify."""
        if not slot.inherited:
            return list(numbers)
        slot.inherited = False

        def differs(number: int) -> bool:
            chunk = manifest.chunks[number]
            slot.arena.populate(chunk.span)  # mapped at once: page by page costs more than hashing it
            return digest(slot.arena.view[chunk.span.offset : chunk.span.end]) != chunk.digest

        with ThreadPoolExecutor(READERS) as pool:
            return [n for n, bad in zip(numbers, pool.map(differs, numbers), strict=True) if bad]

    def _read(
        self, arena: Arena, manifest: Manifest, numbers: Sequence[int], progress: Progress = quiet
    ) -> None:
        health = Health()

        def read(number: int) -> None:
            chunk = manifest.chunks[number]
            arena.populate(chunk.span)
            self._replicas.chunk(chunk, arena.view[chunk.span.offset : chunk.span.end], health)

        pool = ThreadPoolExecutor(READERS)
        try:
            done, total = 0, sum(manifest.chunks[n].span.size for n in numbers)
            for number, _ in zip(numbers, pool.map(read, numbers), strict=True):
                done += manifest.chunks[number].span.size
                progress("reading", done, total)
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
            f"{manifest.name} needs {manifest.size} bytes of memory, which this machine does not have"
        ) from e
