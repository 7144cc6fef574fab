"""Packing: changed chunks to one pack on every replica, hashed on the way.

Rules of this file:
- A chunk is hashed once and written to each replica. Replicas that share a disk are written one after the
  other, so that the quorum is reached soonest; others beside each other.
- A pack has a name of its own that nobody ever had: what a sweep has seen to be needed by nobody can then
  never be needed again (C5). What it holds is verified by its chunks' digests.
- A replica that fails is left behind and named; whether enough are left is the caller's to decide.
- Replicas on this machine are waited for. Those behind a network are waited for until enough have it: the
  others are late. One that is still being written then gets no more of it, because the memory will be another
  save's; one that has every byte may publish by itself.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from sublet.core.checkpoints.checkpoint import ALIGN, ByteSpan, aligned
from sublet.core.errors import SubletError
from sublet.machine.failpoints import failpoint
from sublet.ports.store import PackDraft, Replica

THREADS = 2
#: One that is nearly done when enough have it is waited for: for this share of the time that took, and no
#: longer than so many seconds.
LINGER_SHARE, LINGER_SECONDS = 0.5, 1.0

Enough = Callable[[Collection[str]], bool]


@dataclass(frozen=True, slots=True)
class Packed:
    pack: str
    digests: tuple[str, ...]
    places: tuple[int, ...]  # where each chunk lies in the pack
    confirmed: tuple[str, ...]  # replicas that have it, durably
    failed: dict[str, str]  # the others, and what they said
    late: tuple[str, ...] = ()  # those that were not waited for


def digest(data: Any) -> str:
    return str(_blake3()(data).hexdigest())


def _blake3() -> Any:
    return import_module("blake3").blake3


def write_pack(
    arena: memoryview, spans: Sequence[ByteSpan], replicas: Sequence[Replica], enough: Enough | None = None
) -> Packed:
    """Write the chunks at `spans` of the arena, which is readable up to a whole block behind each of them.
    `enough` says whether these replicas are a quorum; without it all are waited for."""
    places: list[int] = []
    end = 0
    for span in spans:
        places.append(end)
        end += aligned(span.size, ALIGN)
    pieces = [ByteSpan(at, s.size) for s, at in zip(spans, places, strict=True)]
    name_of_pack = secrets.token_hex(32)
    outcomes = PackOutcomes(replicas, enough)
    lanes: dict[str, list[Replica]] = {}
    for replica in replicas:
        lanes.setdefault(replica.lane, []).append(replica)

    def write_lane(lane: Sequence[Replica]) -> None:
        drafts: dict[str, PackDraft] = {}
        try:
            for replica in lane:
                try:
                    drafts[replica.name] = replica.begin_pack(end)
                except SubletError as e:
                    outcomes.fail(replica.name, e.message)
            with ThreadPoolExecutor(THREADS) as pool:
                for name, draft in drafts.items():
                    jobs = [(outcomes, draft, arena, s, at) for s, at in zip(spans, places, strict=True)]
                    for problem in pool.map(lambda job: _write(*job), jobs):
                        if problem:
                            outcomes.fail(name, problem)
                    outcomes.written(name)
            for name, draft in drafts.items():
                if not outcomes.may_publish(name):
                    continue
                failpoint("between_replicas")
                try:
                    draft.publish(name_of_pack, pieces)
                    outcomes.confirm(name)
                except SubletError as e:
                    outcomes.fail(name, e.message)
        except BaseException as e:  # said to the caller: nobody looks at a thread
            outcomes.broke(e)
        finally:
            for draft in drafts.values():
                draft.discard()
            outcomes.leave(lane)

    for lane in lanes.values():
        threading.Thread(target=write_lane, args=(lane,), name="sublet-pack", daemon=True).start()
    try:
        with ThreadPoolExecutor(THREADS) as hashing:
            digests = tuple(hashing.map(lambda s: digest(arena[s.offset : s.end]), spans))
        outcomes.wait()
    finally:
        outcomes.close()
    return Packed(
        name_of_pack, digests, tuple(places), tuple(outcomes.confirmed), dict(outcomes.failed), outcomes.late
    )


class PackOutcomes:
    """Where each replica's outcome is written down, and where the caller waits until it knows enough."""

    def __init__(self, replicas: Sequence[Replica], enough: Enough | None) -> None:
        self._names = [r.name for r in replicas]
        self._here = {r.name for r in replicas if r.near}
        self._enough = enough
        self._begun = time.monotonic()
        self._changed = threading.Condition()
        self._working = set(self._names)
        self._complete: set[str] = set()  # every byte of it was handed over
        self._closed = False
        self._error: BaseException | None = None
        self._seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    # by the lanes

    def may_write(self) -> bool:
        return not self._closed

    def written(self, name: str) -> None:
        with self._changed:
            if not self._closed and name not in self.failed:
                self._complete.add(name)

    def may_publish(self, name: str) -> bool:
        with self._changed:
            return name in self._complete and name not in self.failed

    def confirm(self, name: str) -> None:
        with self._changed:
            self._seconds[name] = time.monotonic() - self._begun
            self._changed.notify_all()

    def fail(self, name: str, why: str) -> None:
        with self._changed:
            if not self._closed:
                self.failed.setdefault(name, why)

    def broke(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error

    def leave(self, lane: Sequence[Replica]) -> None:
        with self._changed:
            self._working -= {r.name for r in lane}
            self._changed.notify_all()

    # by the caller

    @property
    def confirmed(self) -> list[str]:
        return [name for name in self._names if name in self._seconds]

    @property
    def late(self) -> tuple[str, ...]:
        return tuple(n for n in self._names if n not in self._seconds and n not in self.failed)

    def wait(self) -> None:
        with self._changed:
            ends = None
            while self._working and self._error is None:
                if self._is_enough():
                    now = time.monotonic()
                    if ends is None:
                        ends = now + min(LINGER_SECONDS, LINGER_SHARE * (now - self._begun))
                    if now >= ends:
                        break
                self._changed.wait(None if ends is None else ends - time.monotonic())
            if self._error is not None:
                raise self._error

    def _is_enough(self) -> bool:
        return (
            self._enough is not None and not self._working & self._here and self._enough(list(self._seconds))
        )

    def close(self) -> None:
        """Fix the outcome: a replica that is late stays late, even if it finishes in the end."""
        with self._changed:
            self._closed = True
            self._seconds = dict(self._seconds)


def verify_pack(replica: Replica, pack: str, digests: Sequence[str], pieces: Sequence[ByteSpan]) -> str:
    """Returns 'good', 'missing' or 'bad'."""
    try:
        if not replica.has_pack(pack):  # asked anew: a replica may remember where it read it before
            return "missing"
    except OSError:
        return "missing"
    buffer = memoryview(bytearray(max((p.size for p in pieces), default=0)))
    for name, piece in zip(digests, pieces, strict=True):
        part = buffer[: piece.size]
        try:
            if not replica.read_pack(pack, piece.offset, part):
                return "bad" if replica.has_pack(pack) else "missing"
        except OSError:
            return "missing"
        if digest(part) != name:
            return "bad"
    return "good"


def _write(outcomes: PackOutcomes, draft: PackDraft, arena: memoryview, span: ByteSpan, at: int) -> str:
    try:
        if not outcomes.may_write():
            return "it was late"
        # Whole blocks, also the last one: direct I/O writes nothing less, and the pack is cut to its length
        # afterwards.
        draft.write(at, arena[span.offset : span.offset + aligned(span.size, ALIGN)])
        return ""
    except SubletError as e:
        return e.message
