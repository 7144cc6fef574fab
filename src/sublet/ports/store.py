"""The checkpoint store: one replica of it, what a run asks of all of them, and the host's memory of
checkpoints.

Rules of a replica:
- Bytes under a name never change: every write is create-only. The same content again is fine, other content
  is a failure (C2).
- A put that returned survives the loss of power. One that raised may or may not have happened, and repeating
  it finds out.
- A replica verifies nothing; whoever reads does, before a byte is used (C3).
- `MARK` is put, read and removed like a manifest, and is not one: it says which ledger the replica belongs
  to.
- Failures are `NotDurable` (a write) or `OSError` (a read) with the replica's own words; a missing object is
  not a failure of a read.

Rules of the store (`Checkpoints`, implemented by `store.checkpoints.CheckpointStore`):
- A save that returned, or whose `result()` returned, is durable and committed; one that raised moved no head
  (C6).
- One save at a time: the next one, and `settle`, wait for the one under way and raise what went wrong with
  it, once.

Rules of the host's memory (arenas that outlive the process that filled them):
- It is faster than a replica and never counts as one: it is gone with the host, and nothing is lost with it.
- It is asked, never relied on: no call of it fails, and what it gives is verified like anything else that is
  read (C3).
- An arena is given out only when the process that kept it is dead: nobody else may write to it any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from sublet.core.checkpoints.checkpoint import Away, ByteSpan
from sublet.core.progress.effect import Steps
from sublet.ports.ledger import LeaseKey


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

    def begin_pack(self, size: int) -> PackDraft:
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
        """Kind ('drafts', or 'aside' for what did not verify), name, age in seconds, size; `remove` takes
        kind and name."""


@runtime_checkable
class Remote(Replica, Protocol):
    """A replica behind a network: it may be away for a while, and who waits for it may have to leave."""

    @property
    def away(self) -> str:
        """Called by whoever tells the user: why it does not answer, once that has lasted for some seconds; ''
        otherwise."""

    def give_up(self) -> None:
        """Called when the process must leave: whatever waits for an answer fails now, and so does what is
        asked from now on."""

    def take_up(self) -> None:
        """Called before the next save: it is asked and waited for again."""

    def ask_again(self) -> None:
        """Called by whoever waits for it to catch up: the next question is asked, however often it was away
        before."""

    def clock(self) -> datetime:
        """Called by whoever checks it: what time it is there."""

    def hurried(self, seconds: float) -> Replica:
        """Called by a read that has other replicas to ask: the same one, waited for so long and no longer."""


class PackDraft(Protocol):
    """A pack being written. Nobody sees it before `publish`."""

    def write(self, at: int, data: memoryview) -> None:
        """`data` and `at` are aligned for direct I/O, except for the end of the last piece. May be called
        from several threads."""

    def publish(self, pack: str, pieces: Sequence[ByteSpan]) -> None:
        """Durable, under this name, create-only."""

    def discard(self) -> None: ...


# --- what a run asks of the whole store ----------------------------------------------------------------


@runtime_checkable
class Fence(Protocol):
    """What a save asks of a lease."""

    @property
    def key(self) -> LeaseKey: ...
    def check(self) -> None: ...


class SavedState(Protocol):
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def bytes_written(self) -> int: ...
    @property
    def bytes_shared(self) -> int: ...


class SaveUnderWay(Protocol):
    @property
    def seconds(self) -> float:
        """How long it took, once it is done."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def result(self, timeout: float | None = None) -> SavedState: ...


class Checkpoints(Protocol):
    def save(
        self, name: str, state: Any, *, expected_version: int, lease: Fence, steps: Steps | None = None
    ) -> SavedState:
        """Called at a drain, and by a single step."""

    def save_behind(
        self,
        name: str,
        state: Any,
        *,
        expected_version: int,
        lease: Fence,
        steps: Steps | None = None,
        overlap: Any = None,
    ) -> SaveUnderWay:
        """Called by a training loop when a save is due: the state may change as soon as it returns."""

    def settle(self) -> None:
        """Called before the state of a save under way is counted on."""

    def load(self, name: str, *, version: int | str | None = None, keys: Sequence[str] | None = None) -> Any:
        """Called at a resume, and to give a duplicate its stored result."""

    def tag(self, name: str, version: int | str, tag: str, *, actor: str = ...) -> None:
        """Called when a script has come to its end: this version is its last."""

    @property
    def away(self) -> Away | None:
        """Called between steps: which replicas have not answered for some seconds, or None."""

    def give_up(self) -> None:
        """Called, from any thread, when the process must leave: a save under way fails now, and its head does
        not move (C6). The next save is made as if nothing had been."""

    def close(self) -> None: ...


# --- the host's memory of checkpoints -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remembered:
    fd: int  # the arena; the caller's to close
    size: int
    manifest: bytes


class HostMemory(Protocol):
    def keep(self, job: str, fd: int, size: int, digest: str, manifest: bytes) -> None:
        """Called when a save was committed: the arena has the state this manifest describes, until the next
        save begins."""

    def fetch(self, job: str, digest: str) -> Remembered | None:
        """Called by a load: the arena that was kept with this manifest, if its process is gone. It is then
        the caller's."""

    def drop(self, job: str) -> None:
        """Called when a job's memory is wanted back."""
