"""Catching up: what a save did not wait for, given to the replicas that were slow or away, behind everything
else.

Rules of this file:
- Only what is committed is owed. Packs first, the manifest last: a replica that has a manifest has what it
  refers to.
- It is read from a replica that has it, nearest first and verified, and not from the trainer's memory, which
  another save may be using.
- A replica that does not take it is left alone, longer each time, up to a minute. What is still owed when the
  process ends is `sublet checkpoint repair`'s, or the next process's, which finds out at its first save what
  the head's packs lack.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sublet.core.checkpoints.checkpoint import ChunkEntry, Manifest
from sublet.core.errors import SubletError
from sublet.store.replicas.quorum import Health, Replicas, SaveTimings, needed

#: Replicas that are only a little late finish by themselves within this time.
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0
#: Older debts of one replica than so many manifests are left to a repair.
MOST_MANIFESTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLag:
    """How far one replica is behind."""

    replica: str
    packs: int
    bytes: int  # of packs this process wrote; what else it lacks is counted when it is given
    versions: int
    why: str  # what it said last; '' while it is being given what it lacks


@dataclass(slots=True)
class _Debt:
    packs: dict[str, tuple[ChunkEntry, ...] | None] = field(default_factory=dict)
    manifests: dict[str, tuple[bytes, SaveTimings]] = field(default_factory=dict)
    not_before: float = 0.0
    pause: float = FIRST_PAUSE_SECONDS
    why: str = ""

    @property
    def paid(self) -> bool:
        return not self.packs and not self.manifests


class CatchingUp:
    def __init__(self, replicas: Replicas, everything: Callable[[], Iterable[Manifest]]) -> None:
        self._replicas = replicas
        self._everything = everything
        self._changed = threading.Condition()
        self._debts: dict[str, _Debt] = {}
        self._thread: threading.Thread | None = None
        self._over = False

    def owe(
        self,
        name: str,
        *,
        packs: dict[str, tuple[ChunkEntry, ...] | None],
        manifest: tuple[str, bytes, SaveTimings] | None,
    ) -> None:
        """A replica lacks these packs (with everything that is in them, or None where that has to be looked
        up) and this manifest."""
        with self._changed:
            debt = self._debts.setdefault(name, _Debt())
            if debt.paid:
                debt.not_before, debt.pause = time.monotonic() + FIRST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS
            debt.packs.update(packs)
            if manifest is not None:
                digest, data, account = manifest
                debt.manifests[digest] = data, account
                while len(debt.manifests) > MOST_MANIFESTS:
                    debt.manifests.pop(next(iter(debt.manifests)))
            if self._thread is None and not self._over:
                self._thread = threading.Thread(target=self._run, name="sublet-catches-up", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def standing(self) -> list[ReplicaLag]:
        """Who is behind, and by how much."""
        with self._changed:
            return [
                ReplicaLag(
                    replica=name,
                    packs=len(debt.packs),
                    bytes=sum(c.span.size for chunks in debt.packs.values() for c in chunks or ()),
                    versions=len(debt.manifests),
                    why=debt.why,
                )
                for name, debt in sorted(self._debts.items())
                if not debt.paid
            ]

    def settle(self, seconds: float, *, patient: bool = False) -> bool:
        """Wait until nobody is behind; whether that is so. Those who do not take what they are given are
        waited for by the patient only."""

        def over() -> bool:
            return all(d.paid or (d.why and not patient) for d in self._debts.values())

        with self._changed:
            if patient:
                for debt in self._debts.values():
                    debt.not_before, debt.pause = 0.0, FIRST_PAUSE_SECONDS
                self._changed.notify_all()
            self._changed.wait_for(over, seconds)
            return all(d.paid for d in self._debts.values())

    def stop(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                name = self._next()
                while name is None:
                    if self._over:
                        return
                    due = [d.not_before for d in self._debts.values() if not d.paid]
                    self._changed.wait(max(0.01, min(due) - time.monotonic()) if due else None)
                    name = self._next()
                if self._over:
                    return
                debt = self._debts[name]
            why = self._serve(name, debt)
            with self._changed:
                debt.why = why
                if why:
                    debt.pause = min(2 * debt.pause, LONGEST_PAUSE_SECONDS)
                else:
                    debt.pause = FIRST_PAUSE_SECONDS
                debt.not_before = time.monotonic() + debt.pause
                self._changed.notify_all()

    def _next(self) -> str | None:
        now = time.monotonic()
        due = [name for name, debt in self._debts.items() if not debt.paid and debt.not_before <= now]
        return due[0] if due else None

    def _serve(self, name: str, debt: _Debt) -> str:
        """Give the replica what it lacks. Returns '', or what went wrong."""
        try:
            with self._changed:
                packs, manifests = dict(debt.packs), dict(debt.manifests)
            for pack, chunks in packs.items():
                if self._over:
                    return ""
                self._give(name, pack, chunks)
                with self._changed:
                    debt.packs.pop(pack, None)
            for digest, (data, account) in manifests.items():
                self._replicas.give_manifest(name, digest, data)
                account.confirm(name)
                with self._changed:
                    debt.manifests.pop(digest, None)
            return ""
        except SubletError as e:
            return e.message
        except OSError as e:
            return str(e.strerror or e)

    def _give(self, name: str, pack: str, chunks: Sequence[ChunkEntry] | None) -> None:
        if self._replicas.has_pack(name, pack):
            return  # it was only a little late
        if chunks is None:
            found = needed(self._everything(), {pack})
            chunks = found[0][1] if found else ()
        if chunks:
            self._replicas.give_pack(name, pack, chunks, Health())
