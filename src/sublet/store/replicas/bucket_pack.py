"""How a pack lies in a bucket, and how it gets there.

Rules of this file:
- A pack has one name, `packs/<pack>.pack`, and is there from the moment that object is: it is created once,
  by one conditional put (C2).
- Up to `PART_BYTES` its bytes are in it. A larger pack's bytes are in parts under a name nobody else uses,
  uploaded while they are still coming, and the object under the pack's name only says which parts. Parts that
  no pack names are nothing.
- Memory is bounded whatever the order of the writes: a part is a run of whole writes, so no chunk lies across
  two of them; what does not run on is sent as it is.
- Parts are deleted only when the object that would name them was certainly not created.
"""

from __future__ import annotations

import bisect
import json
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sublet.core.checkpoints.checkpoint import (
    ALIGN,
    CHUNK_BYTES,
    MAX_PARTS,
    MAX_STATE_BYTES,
    ByteSpan,
    aligned,
)
from sublet.core.errors import NotDurable
from sublet.store.buckets.client import BucketClient
from sublet.store.buckets.failure import BucketFailed

PART_BYTES = 16 << 20
#: Uploads at once, for one pack.
UPLOADS = 6
WHOLE, PARTS = b"sublet pack 1 whole\n", b"sublet pack 1 parts\n"
HEADER = len(WHOLE)
MAX_INDEX_BYTES = 64 << 20
#: What is read first of an unknown pack: the index of most that are in parts fits into it.
FIRST_BYTES = 16 << 10


def pack_path(pack: str) -> str:
    return f"packs/{pack}.pack"


def part_path(draft: str, start: int) -> str:
    return f"parts/{draft}/{start:020d}"


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Where the bytes of a pack are."""

    size: int
    draft: str = ""  # '': in the object itself
    parts: tuple[ByteSpan, ...] = ()

    def index(self) -> bytes:
        body = {"draft": self.draft, "parts": [[p.offset, p.size] for p in self.parts], "size": self.size}
        return PARTS + json.dumps(body, separators=(",", ":")).encode()

    def where(self, at: int, size: int) -> list[tuple[str, int, int]] | None:
        """Object, offset in it and length, in order; '' is the pack's own. None: not all of it is there."""
        if at + size > self.size:
            return None
        if not self.draft:
            return [("", HEADER + at, size)] if size else []
        found = []
        number = bisect.bisect_right(self.parts, at, key=lambda p: p.offset) - 1
        while size:
            if (
                not 0 <= number < len(self.parts)
                or not self.parts[number].offset <= at < self.parts[number].end
            ):
                return None
            part = self.parts[number]
            length = min(size, part.end - at)
            found.append((part_path(self.draft, part.offset), at - part.offset, length))
            at, size, number = at + length, size - length, number + 1
        return found


def read_layout(data: bytes, object_size: int) -> PackLayout | None:
    """None unless the object is one of ours, with every number in range."""
    if data.startswith(WHOLE):
        return PackLayout(object_size - HEADER)
    if not data.startswith(PARTS):
        return None
    try:
        body: Any = json.loads(data[HEADER:])
        draft, size = body["draft"], _number(body["size"])
        parts = tuple(ByteSpan(_number(at), _number(length)) for at, length in body["parts"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if type(draft) is not str or len(draft) != 64 or not set(draft) <= set("0123456789abcdef"):
        return None
    if len(parts) > MAX_PARTS or any(a.end > b.offset for a, b in pairwise(parts)):
        return None
    return PackLayout(size, draft, parts)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_STATE_BYTES:
        raise ValueError(value)
    return value


class KnownLayouts:
    """How packs lie, which never changes while they are there. Used from several threads."""

    REMEMBERED = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts: dict[str, PackLayout] = {}

    def get(self, pack: str) -> PackLayout | None:
        with self._lock:
            return self._layouts.get(pack)

    def put(self, pack: str, layout: PackLayout) -> None:
        with self._lock:
            if len(self._layouts) >= self.REMEMBERED:
                self._layouts.clear()
            self._layouts[pack] = layout

    def forget(self, pack: str) -> bool:
        """Whether it was known."""
        with self._lock:
            return self._layouts.pop(pack, None) is not None


class PackReader:
    """The packs of one bucket."""

    def __init__(self, client: BucketClient, known: KnownLayouts | None = None) -> None:
        self._client = client
        self.known = known or KnownLayouts()

    def layout(self, pack: str) -> PackLayout | None:
        """None when it is not there, or is nothing we wrote."""
        known = self.known.get(pack)
        if known is not None:
            return known
        begun = self._client.beginning(pack_path(pack), FIRST_BYTES)
        if begun is None:
            return None
        data, size = begun
        if data.startswith(PARTS) and len(data) < size <= MAX_INDEX_BYTES:
            data = self._client.whole(pack_path(pack), MAX_INDEX_BYTES) or b""
        layout = read_layout(data, size)
        if layout is not None:
            self.known.put(pack, layout)
        return layout

    def read(self, pack: str, at: int, into: memoryview) -> bool:
        if self._read(pack, at, into):
            return True
        # It may have been set aside and written anew, in other parts, by somebody else.
        return self.known.forget(pack) and self._read(pack, at, into)

    def _read(self, pack: str, at: int, into: memoryview) -> bool:
        layout = self.layout(pack)
        places = layout.where(at, into.nbytes) if layout is not None else None
        if places is None:
            return False
        done = 0
        for path, start, length in places:
            data = self._client.part(path or pack_path(pack), start, length)
            if data is None or len(data) != length:
                return False
            into[done : done + length] = data
            done += length
        return True


@dataclass(slots=True, eq=False)
class _WriteRun:
    """Writes that lie one behind the other."""

    start: int
    end: int
    pieces: deque[bytes] = field(default_factory=deque)

    @property
    def size(self) -> int:
        return self.end - self.start


class BucketDraft:
    """Implements `ports.store.PackDraft`."""

    def __init__(self, name: str, client: BucketClient, reader: PackReader, size: int) -> None:
        self._name = name
        self._client = client
        self._reader = reader
        self._small = size <= PART_BYTES
        self._id = secrets.token_hex(32)
        self._lock = threading.Lock()
        self._open: list[_WriteRun] = []
        self._sent: dict[int, int] = {}  # start: size, of parts whose upload has begun
        self._there: set[int] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._uploads: list[Future[None]] = []
        self._room = threading.BoundedSemaphore(UPLOADS)
        self._failure = ""
        self._over = False
        self._keep = False  # the parts belong to a pack, or may do

    # writing

    def write(self, at: int, data: memoryview) -> None:
        for start in range(0, data.nbytes, PART_BYTES):
            piece = bytes(data[start : start + PART_BYTES])  # the caller's memory is its own again
            with self._lock:
                self._check()
                full = self._place(at + start, piece)
            for run in full:
                self._send(run)

    def _check(self) -> None:
        if self._failure:
            raise NotDurable(f"{self._name} did not take it: {self._failure}")
        if self._over:
            raise NotDurable(f"{self._name} did not take it: the pack was given up")

    def _place(self, at: int, piece: bytes) -> list[_WriteRun]:
        """Put the piece behind or before a run it continues, or begin a new one. Returns the runs that must
        be sent."""
        end = at + len(piece)
        self._small = self._small and end <= aligned(PART_BYTES, ALIGN)
        full: list[_WriteRun] = []
        for run in self._open:
            if at != run.end and end != run.start:
                continue
            if run.size + len(piece) > PART_BYTES and not self._small:
                full.append(run)
                continue
            if at == run.end:
                run.pieces.append(piece)
                run.end = end
            else:
                run.pieces.appendleft(piece)
                run.start = at
            break
        else:
            self._open.append(_WriteRun(at, end, deque([piece])))
        while not self._small and sum(r.size for r in self._open if r not in full) > 2 * PART_BYTES:
            full.append(max((r for r in self._open if r not in full), key=lambda r: r.size))
        for run in full:
            self._open.remove(run)
            self._sent[run.start] = run.size
        return full

    def _send(self, run: _WriteRun) -> None:
        self._room.acquire()  # waits here for the slowest of them
        with self._lock:
            if self._over or self._failure:
                self._room.release()
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(UPLOADS, thread_name_prefix="sublet-upload")
            self._uploads.append(self._pool.submit(self._upload, run))

    def _upload(self, run: _WriteRun) -> None:
        try:
            if self._failure or self._over:
                return
            data = b"".join(run.pieces)
            run.pieces.clear()
            path = part_path(self._id, run.start)
            if not self._client.create(path, data):
                raise BucketFailed("a part exists already with other bytes", lasting=True)
            with self._lock:
                self._there.add(run.start)
                late = self._over and not self._keep
            if late:
                self._delete([run.start])
        except Exception as e:
            with self._lock:
                self._failure = self._failure or (str(e) if isinstance(e, OSError) else type(e).__name__)
        finally:
            self._room.release()

    # publishing

    def publish(self, pack: str, pieces: Sequence[ByteSpan]) -> None:
        end = pieces[-1].end if pieces else 0
        try:
            with self._lock:
                self._check()
                whole = not self._sent and end <= PART_BYTES
                rest = [] if whole else self._open
                if not whole:
                    self._open = []
                    self._sent.update((run.start, run.size) for run in rest)
            if whole:
                self._publish(pack, self._whole(end), end)
                return
            for run in rest:
                self._send(run)
            for upload in list(self._uploads):
                upload.result()
            with self._lock:
                self._check()
            parts = tuple(ByteSpan(at, self._sent[at]) for at in sorted(self._there))
            layout = PackLayout(end, self._id, parts)
            self._check_layout(layout, pieces)
            self._publish(pack, layout.index(), end, layout)
        except OSError as e:
            raise NotDurable(f"{self._name} did not take it: {e.strerror or e}") from None
        finally:
            self.discard()

    def _whole(self, end: int) -> bytearray:
        body = bytearray(HEADER + end)
        body[:HEADER] = WHOLE
        for run in self._open:
            at = run.start
            for piece in run.pieces:
                cut = piece[: max(0, end - at)]
                body[HEADER + at : HEADER + at + len(cut)] = cut
                at += len(piece)
        return body

    def _check_layout(self, layout: PackLayout, pieces: Sequence[ByteSpan]) -> None:
        twice = any(a.end > b.offset for a, b in pairwise(layout.parts))
        if twice or any(layout.where(p.offset, p.size) is None for p in pieces):
            raise NotDurable(
                f"{self._name} did not take it: the pack was not written whole, or written twice"
            )

    def _publish(self, pack: str, body: bytes | bytearray, end: int, ours: PackLayout | None = None) -> None:
        self._keep = ours is not None  # from here on it may happen at any time, whatever we are told
        if not self._client.create(pack_path(pack), body):
            self._keep = False
            self._reader.known.forget(pack)
            if not self._same(pack, body, end, ours):
                # A bad copy must not pass for the one that was written (C1), nor be written over (C2).
                raise NotDurable(
                    f"{self._name} did not take it: pack {pack[:12]} exists already with other bytes"
                )

    def _same(self, pack: str, body: bytes | bytearray, end: int, ours: PackLayout | None) -> bool:
        there = self._reader.layout(pack)
        if there is None or there.size != end:
            return False
        buffer, mine = memoryview(bytearray(CHUNK_BYTES)), memoryview(bytearray(CHUNK_BYTES))
        for at in range(0, end, CHUNK_BYTES):
            size = min(CHUNK_BYTES, end - at)
            if not self._reader.read(pack, at, buffer[:size]):
                return False
            if ours is None:
                mine = memoryview(body)[HEADER + at : HEADER + at + size]
            elif not self._read_ours(ours, at, mine[:size]):
                return False
            if buffer[:size] != mine[:size]:
                return False
        return True

    def _read_ours(self, ours: PackLayout, at: int, into: memoryview) -> bool:
        done = 0
        for path, start, length in ours.where(at, into.nbytes) or []:
            data = self._client.part(path, start, length) or b""
            into[done : done + len(data)] = data
            done += len(data)
        return done == into.nbytes

    # giving up

    def discard(self) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            self._open.clear()
            pool, there = self._pool, sorted(self._there)
        if pool is not None:
            pool.shutdown(wait=False)
        if not self._keep:
            self._delete(there)

    def _delete(self, starts: Sequence[int]) -> None:
        """What cannot be deleted now is found by a sweep: no pack names it."""
        with suppress(OSError):
            for start in starts:
                self._client.delete(part_path(self._id, start), patience=0.0)
