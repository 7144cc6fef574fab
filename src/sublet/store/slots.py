"""Slots: the last state of each name that this process saved or loaded, in an arena, and where its chunks are
stored.

Rules of this file:
- What a slot says about a chunk is true of the arena's bytes, or it says nothing: an entry is taken back
  before bytes change.
- An arena is this process's own. A forked child lets go of its parent's, and one that outlived a dead process
  is believed chunk by chunk, each only after its digest was computed again (C3).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from sublet.core.checkpoints.checkpoint import ChunkEntry, Layout, Manifest, read_manifest
from sublet.core.errors import Damaged
from sublet.ports.store import HostMemory
from sublet.store.arena import Arena
from sublet.store.save.packing import digest


@dataclass(slots=True)
class Slot:
    arena: Arena
    layout: Layout
    entries: list[ChunkEntry | None]  # None: not known to be stored
    saved_as: str = ""  # the manifest whose state this process committed or loaded last
    packs: frozenset[str] = frozenset()  # and what it refers to
    in_use: bool = False  # a save copies into it, or writes from it
    inherited: bool = False  # from a dead process: nothing in it is trusted before it was verified
    written: dict[str, int] = field(
        default_factory=dict
    )  # packs of saves that were not committed, and since when

    def has(self, number: int, chunk: ChunkEntry) -> bool:
        """Whether the arena has the bytes of this chunk."""
        entry = self.entries[number]
        return entry is not None and entry.digest == chunk.digest

    def settle_on(self, name: str, manifest: Manifest) -> None:
        """Note that it holds the state of this manifest, which is the head."""
        self.saved_as, self.packs = name, frozenset(manifest.packs)
        self.written.clear()

    def forget_written(self) -> set[str]:
        """Note that packs which were written and not committed are gone; returns which."""
        gone = set(self.written)
        self.written.clear()
        self.entries = [e if e is not None and e.pack not in gone else None for e in self.entries]
        return gone


class Slots:
    def __init__(self, memory: HostMemory | None = None) -> None:
        self._memory = memory
        self._slots: dict[str, Slot] = {}
        self._pid = os.getpid()

    def get(self, name: str) -> Slot | None:
        if self._pid != os.getpid():
            # Its memory is shared with the parent, which goes on saving from it.
            self._slots, self._pid = {}, os.getpid()
        return self._slots.get(name)

    def place(self, name: str, layout: Layout, *, populate: bool = True) -> Slot:
        """The slot of this name for this layout: the one there is, or a new one whose arena is empty."""
        slot = self.get(name)
        if slot is not None and slot.layout == layout:
            return slot
        self.let_go(name)
        slot = self._slots[name] = Slot(
            Arena(layout.size, populate=populate), layout, [None] * len(layout.chunks)
        )
        return slot

    def let_go(self, name: str) -> None:
        if self.get(name) is not None:
            self._slots.pop(name).arena.close()

    def abandon(self, name: str) -> None:
        """Never use the arena again: filling it was interrupted, and threads may still write to it."""
        if self.get(name) is not None:
            self._slots.pop(name).arena.abandon()

    def close(self) -> None:
        """Give all memory back, including what the host would remember."""
        for name in list(self._slots):
            if self._memory is not None and self._pid == os.getpid():
                self._memory.drop(name)
            self.let_go(name)

    # the host's memory

    def remember(self, name: str, slot: Slot, manifest_name: str, manifest: bytes) -> None:
        if self._memory is not None:
            self._memory.keep(name, slot.arena.fd, slot.arena.size, manifest_name, manifest)

    def recall(self, name: str, manifest_name: str) -> Manifest | None:
        """Make the state that a dead process of this host left in memory this name's slot, unverified.
        Returns its manifest, if there is one."""
        if self._memory is None or self.get(name) is not None:
            return None
        found = self._memory.fetch(name, manifest_name)
        if found is None:
            return None
        arena = None
        try:
            if digest(found.manifest) == manifest_name:
                manifest = read_manifest(found.manifest)
                if found.size >= manifest.size:
                    arena = Arena(manifest.size, found.fd)
        except (Damaged, ValueError, OSError):
            pass
        if arena is None:
            os.close(found.fd)
            return None
        layout = layout_of(manifest)
        self._slots[name] = Slot(arena, layout, [None] * len(layout.chunks), inherited=True)
        return manifest


def layout_of(manifest: Manifest) -> Layout:
    return Layout(manifest.storages, tuple(c.span for c in manifest.chunks), manifest.size)


def unknown(slot: Slot, chunks: Sequence[ChunkEntry]) -> list[int]:
    """Which of these chunks the slot is not known to have."""
    return [n for n, chunk in enumerate(chunks) if not slot.has(n, chunk)]
