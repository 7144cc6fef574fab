"""A replica: one copy of the checkpoint store.

Rules of this port:
- Bytes under a name never change: every write is create-only. The same content again is fine, other content is a failure (C2).
- A put that returned survives the loss of power. One that raised may or may not have happened, and repeating it finds out.
- A replica verifies nothing; whoever reads does, before a byte is used (C3).
- `MARK` is put, read and removed like a manifest, and is not one: it says which ledger the replica belongs to.
- Failures are `NotDurable` (a write) or `OSError` (a read) with the replica's own words; a missing object is not a failure of a read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Protocol, runtime_checkable

from sublet.core.checkpoint import Span


class Replica(Protocol):
    @property
    def name(self) -> str:
        """Where it is, as the user wrote it."""

    @property
    def domain(self) -> str:
        """What it fails together with."""

    @property
    def lane(self) -> str:
        """What it shares its bandwidth with: replicas of one lane are written one after the other."""

    @property
    def near(self) -> bool:
        """Whether it is on this machine: such a one is read first."""

    def check(self) -> None:
        """Called when a store is opened: raise if it could not keep the rules of this port."""

    def begin_pack(self, size: int) -> Draft:
        """Called by a save: a pack that is not there yet."""

    def has_pack(self, pack: str) -> bool: ...
    def read_pack(self, pack: str, at: int, into: memoryview) -> bool:
        """Fill `into`; False when the pack, or that part of it, is not there."""

    def put_manifest(self, digest: str, data: bytes) -> None: ...
    def get_manifest(self, digest: str) -> bytes | None: ...

    def set_aside(self, kind: str, name: str) -> None:
        """A copy that did not verify: kept for whoever looks into it, never read again."""

    def packs(self) -> Iterator[tuple[str, float, int]]:
        """Name, age in seconds by the replica's own clock, size; for a sweep."""

    def manifests(self) -> Iterator[tuple[str, float]]: ...
    def remove(self, kind: str, name: str) -> None:
        """What is not there is removed already."""


@runtime_checkable
class Untidy(Protocol):
    """A replica on which crashes leave something behind that a sweep removes when it is old."""

    def leftovers(self) -> Iterator[tuple[str, str, float, int]]:
        """Kind ('drafts', or 'aside' for what did not verify), name, age in seconds, size; `remove` takes kind and name."""


@runtime_checkable
class Remote(Replica, Protocol):
    """A replica behind a network: it may be away for a while, and who waits for it may have to leave."""

    @property
    def away(self) -> str:
        """Called by whoever tells the user: why it does not answer, once that has lasted for some seconds; '' otherwise."""

    def give_up(self) -> None:
        """Called when the process must leave: whatever waits for an answer fails now, and so does what is asked from now on."""

    def take_up(self) -> None:
        """Called before the next save: it is asked and waited for again."""

    def ask_again(self) -> None:
        """Called by whoever waits for it to catch up: the next question is asked, however often it was away before."""

    def clock(self) -> datetime:
        """Called by whoever checks it: what time it is there."""

    def hurried(self, seconds: float) -> Replica:
        """Called by a read that has other replicas to ask: the same one, waited for so long and no longer."""


class Draft(Protocol):
    """A pack being written. Nobody sees it before `publish`."""

    def write(self, at: int, data: memoryview) -> None:
        """`data` and `at` are aligned for direct I/O, except for the end of the last piece. May be called from several threads."""

    def publish(self, pack: str, pieces: Sequence[Span]) -> None:
        """Durable, under this name, create-only."""

    def discard(self) -> None: ...
