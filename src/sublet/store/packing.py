"""Packing: changed chunks to one pack on every replica, hashed on the way.

Rules of this file:
- A chunk is hashed once and written to each replica. Replicas that share a disk are written one after the other, so that the quorum is
  reached soonest; others beside each other.
- A pack has a name of its own that nobody ever had: what a sweep has seen to be needed by nobody can then never be needed again (C5).
  What it holds is verified by its chunks' digests.
- A replica that fails is left behind and named; whether enough are left is the caller's to decide.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from sublet.core.checkpoint import ALIGN, Span, aligned
from sublet.core.errors import SubletError
from sublet.failpoints import failpoint
from sublet.ports.store import Draft, Replica

THREADS = 2


@dataclass(frozen=True, slots=True)
class Packed:
    pack: str
    digests: tuple[str, ...]
    places: tuple[int, ...]  # where each chunk lies in the pack
    confirmed: tuple[str, ...]  # replicas that have it, durably
    failed: dict[str, str]  # the others, and what they said


def digest(data: Any) -> str:
    return str(_blake3()(data).hexdigest())


def _blake3() -> Any:
    return import_module("blake3").blake3


def write_pack(arena: memoryview, spans: Sequence[Span], replicas: Sequence[Replica]) -> Packed:
    """The chunks at `spans` of the arena. The arena is readable up to a whole block behind each of them."""
    places: list[int] = []
    end = 0
    for span in spans:
        places.append(end)
        end += aligned(span.size, ALIGN)
    failed: dict[str, str] = {}
    drafts: dict[str, Draft] = {}
    lanes: dict[str, list[str]] = {}
    for replica in replicas:
        try:
            drafts[replica.name] = replica.begin_pack(end)
            lanes.setdefault(replica.lane, []).append(replica.name)
        except SubletError as e:
            failed[replica.name] = e.message

    def write_lane(names: Sequence[str]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for name in names:
                jobs = [(drafts[name], arena, s, at) for s, at in zip(spans, places, strict=True)]
                for problem in pool.map(lambda job: _write(*job), jobs):
                    if problem:
                        failed.setdefault(name, problem)

    try:
        with ThreadPoolExecutor(THREADS) as hashing, ThreadPoolExecutor(max(1, len(lanes))) as writing:
            writes = [writing.submit(write_lane, names) for names in lanes.values()]
            digests = tuple(hashing.map(lambda s: digest(arena[s.offset : s.end]), spans))
            for write in writes:
                write.result()
        name_of_pack = secrets.token_hex(32)
        pieces = [Span(at, s.size) for s, at in zip(spans, places, strict=True)]
        confirmed = []
        for name, draft in drafts.items():
            if name in failed:
                continue
            failpoint("between_replicas")
            try:
                draft.publish(name_of_pack, pieces)
                confirmed.append(name)
            except SubletError as e:
                failed[name] = e.message
    finally:
        for draft in drafts.values():
            draft.discard()
    return Packed(name_of_pack, digests, tuple(places), tuple(confirmed), failed)


def verify_pack(replica: Replica, pack: str, digests: Sequence[str], pieces: Sequence[Span]) -> str:
    """'good', 'missing' or 'bad'."""
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


def _write(draft: Draft, arena: memoryview, span: Span, at: int) -> str:
    try:
        # Whole blocks, also the last one: direct I/O writes nothing less, and the pack is cut to its length afterwards.
        draft.write(at, arena[span.offset : span.offset + aligned(span.size, ALIGN)])
        return ""
    except SubletError as e:
        return e.message
