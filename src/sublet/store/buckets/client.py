"""Requests to a bucket: retried, bounded in time, and speaking plainly when they fail.

Rules of this file:
- Every request ends: there is a limit on each attempt, and one on all of them together. A bucket that failed
  is left alone for a few seconds, and then asked by one thread while the others wait: a save or a load waits
  for it once, not at every object.
- A create whose answer was lost may have happened. The next attempt then finds the name taken, and the bytes
  decide whether it was ours.
- The client library's threads do not survive a fork: in the child it would hang for ever, so it is refused
  there.
- Each attempt runs in a thread of its own, which can be left behind, because a server that was stopped
  neither answers nor refuses. What happens after that counts as a lost answer.
- `away` is reported after some seconds of trouble, and only if a small question gets no answer either: a slow
  upload is not an outage.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from sublet.store.buckets.connection import BucketConnection, BucketTimeouts
from sublet.store.buckets.failure import BucketFailed, explain, status_of

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
#: How long a bucket that failed is left alone.
REST_SECONDS = 5.0
#: Not the process's own generator: a training whose bucket was away must draw the same numbers as without.
_jitter = random.Random()

_used_by = 0  # the process whose threads the client has


@dataclass(frozen=True, slots=True)
class BucketObject:
    path: str
    size: int
    changed: datetime


class _Attempt:
    """One request under way. Nobody has to wait for its end."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._over = threading.Event()
        self._outcome: Any = None
        self._failure: BaseException | None = None
        self.answered = False

    def begin(self) -> None:
        try:
            threading.Thread(target=self._run, name="sublet-request", daemon=True).start()
        except RuntimeError:
            self._run()  # no room for another thread: then here, and nobody can leave it

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            self._outcome = work()
        except BaseException as e:
            self._failure = e
        self.answered = True
        self._over.set()

    def wait(self, seconds: float) -> bool:
        self._over.wait(max(0.0, seconds))
        return self.answered

    def leave(self) -> None:
        """Whoever waits goes on without an answer."""
        self._over.set()

    @property
    def left(self) -> bool:
        return self._over.is_set() and not self.answered

    def result(self) -> Any:
        failure, self._failure = self._failure, None
        if failure is None:
            return self._outcome
        try:
            raise failure
        finally:
            del failure  # it knows the frames it came through, and through them the caller's memory


class _OpenRequests:
    """The requests under way. All of them can be left at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[_Attempt] = set()
        self.leaving = threading.Event()

    @contextmanager
    def began(self, attempt: _Attempt) -> Iterator[None]:
        with self._lock:
            if self.leaving.is_set():
                raise BucketFailed(_NOT_AWAITED)
            self._under_way.add(attempt)
        try:
            attempt.begin()
            yield
        finally:
            with self._lock:
                self._under_way.discard(attempt)

    def leave(self) -> None:
        self.leaving.set()
        with self._lock:
            for attempt in self._under_way:
                attempt.leave()


class BucketClient:
    """The few requests that are made. Used from several threads."""

    def __init__(
        self, connection: BucketConnection, limits: BucketTimeouts, requests: _OpenRequests | None = None
    ) -> None:
        """A client that shares `requests` with another is a hurried one: it never waits longer than its
        limits."""
        self.limits = limits
        self.where = connection.where
        self._connection = connection
        self._obstore, self._errors, self._store = connection.library, connection.errors, connection.store
        self._knocking = threading.Lock()
        self._down = ""  # what it said when it failed last
        self._failures = 0
        self._next_try = 0.0
        self._trouble: tuple[str, float] | None = None  # what it said, and since when it said nothing else
        self._hurried = requests is not None
        self._requests = requests or _OpenRequests()

    # requests

    def create(self, path: str, data: bytes | bytearray, *, patience: float | None = None) -> bool:
        """True: it is there with exactly these bytes. False: something else is. Never writes over
        anything."""

        def attempt() -> bool:
            try:
                self._obstore.put(self._store, path, data, mode="create", use_multipart=False)
                return True
            except self._errors.AlreadyExistsError:
                there = self._whole(path, len(data))
                if there is None:
                    raise _RetryRequest from None  # removed since, or two writers race for it
                return there == data

        try:
            return self._persist(attempt, patience)
        except FileNotFoundError:
            raise BucketFailed("there is no such bucket", lasting=True) from None

    def part(self, path: str, start: int, length: int) -> bytes | None:
        """A part of the object: shorter than asked for if it ends before; None if it is not there."""
        found = self.beginning(path, length, start=start)
        return found[0] if found is not None else None

    def beginning(self, path: str, most: int, *, start: int = 0) -> tuple[bytes, int] | None:
        """The first bytes of the object from `start` on, and its size."""

        def attempt() -> tuple[bytes, int]:
            try:
                answer = self._obstore.get(self._store, path, options={"range": (start, start + most)})
                return bytes(answer.bytes()), int(answer.meta["size"])
            except self._errors.BaseError as e:
                if status_of(e) == "416":
                    return b"", 0  # it ends before
                raise

        return self._missing_is_none(attempt)

    def whole(self, path: str, most: int) -> bytes | None:
        """The object, or its first `most` bytes and one more: no more than that is read."""
        return self._missing_is_none(lambda: self._whole(path, most))

    def _whole(self, path: str, most: int) -> bytes | None:
        try:
            answer = self._obstore.get(self._store, path)
            if answer.meta["size"] > most + 1:
                return bytes(self._obstore.get_range(self._store, path, start=0, length=most + 1))
            return bytes(answer.bytes())
        except FileNotFoundError:
            return None

    def look(self, path: str) -> BucketObject | None:
        return self._missing_is_none(lambda: _found(self._obstore.head(self._store, path)))

    def list(self, folder: str) -> Iterator[BucketObject]:
        """All of them or an error: a part of a listing would pass for the whole."""

        def attempt() -> list[BucketObject]:
            try:
                return [_found(o) for batch in self._obstore.list(self._store, folder) for o in batch]
            except FileNotFoundError:
                return []  # Azurite, of a container that is not there

        yield from self._persist(attempt)

    def copy(self, source: str, target: str) -> bool:
        """False when the source is not there."""

        def attempt() -> bool:
            self._obstore.copy(self._store, source, target)
            return True

        return self._missing_is_none(attempt) is not None

    def delete(self, path: str, *, patience: float | None = None) -> None:
        def attempt() -> bool:
            self._obstore.delete(self._store, path)
            return True

        self._missing_is_none(attempt, patience)

    # patience

    def _missing_is_none(self, attempt: Callable[[], T], patience: float | None = None) -> T | None:
        try:
            return self._persist(attempt, patience)
        except FileNotFoundError:
            return None

    def _persist(self, attempt: Callable[[], T], patience: float | None = None) -> T:
        self._check_fork()
        # Unless there is a hurry, a slow answer is waited for as long as the library itself waits.
        hurry = self._hurried or patience is not None
        patience = self._patience(patience)
        begun = time.monotonic()
        ends = begun + (max(patience, self.limits.connect_seconds) if hurry else math.inf)
        pause, tries = FIRST_PAUSE_SECONDS, 0
        while True:
            tries += 1
            try:
                result = self._answered(attempt, ends)
                self._is_there()
                return result
            except FileNotFoundError:
                self._is_there()
                raise
            except _RetryRequest:
                said = "its name is taken and it is not there"
            except _Silent:
                said = self._troubled("no answer in time")
            except self._errors.BaseError as e:
                said, lasting = explain(e)
                if lasting:
                    self._trouble = None  # it answered
                    raise BucketFailed(said, lasting=True) from None
                self._troubled(said)
            now = time.monotonic()
            if now + pause - begun > patience:
                self._went_down(said)
                often = f" ({tries} times in {now - begun:.0f} s)" if tries > 1 else ""
                raise BucketFailed(said + often) from None
            if self._requests.leaving.wait(pause * _jitter.uniform(0.5, 1.0)):
                raise BucketFailed(f"{said}, and {_NOT_AWAITED}")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _answered(self, attempt: Callable[[], T], ends: float) -> T:
        """Its outcome. `_Silent` when there is none by then; `BucketFailed` when it was not waited for."""
        asked = _Attempt(attempt)
        with self._requests.began(asked):
            seconds = self.limits.connect_seconds
            while not asked.wait(min(seconds, ends - time.monotonic())):
                if asked.left:
                    trouble = self._trouble
                    raise BucketFailed(f"{trouble[0]}, and {_NOT_AWAITED}" if trouble else _NOT_AWAITED)
                if time.monotonic() >= ends:
                    raise _Silent
                self._look_for_it()
        found: T = asked.result()
        return found

    # being there, or away

    @property
    def away(self) -> str:
        """What is wrong, once that has lasted for some seconds; '' as long as it answers."""
        trouble = self._trouble
        if trouble is None or time.monotonic() - trouble[1] < self.limits.connect_seconds:
            return ""
        return trouble[0]

    def _is_there(self) -> None:
        self._down, self._failures, self._trouble = "", 0, None

    def _troubled(self, said: str) -> str:
        trouble = self._trouble
        self._trouble = (said, trouble[1] if trouble is not None else time.monotonic())
        return said

    def _look_for_it(self) -> None:
        """A request takes long: ask something small, to learn whether the bucket is away or only slow. One
        thread asks at a time."""
        if not self._knocking.acquire(blocking=False):
            return
        began = time.monotonic()
        knock = _Attempt(self._knock)
        try:
            with self._requests.began(knock):
                if not knock.wait(self.limits.connect_seconds):
                    raise _Silent
            knock.result()
            self._trouble = None
        except BucketFailed:
            pass  # nobody waits any longer
        except FileNotFoundError:
            self._trouble = None
        except _Silent:
            self._troubled_since("no answer", began - self.limits.connect_seconds)
        except self._errors.BaseError as e:
            said, lasting = explain(e)
            if not lasting:
                self._troubled_since(said, began - self.limits.connect_seconds)
        finally:
            self._knocking.release()

    def _knock(self) -> None:
        """A small question with a short limit: any answer will do."""
        self._obstore.head(self._connection.quick_store, "probe/knock")

    def _troubled_since(self, said: str, since: float) -> None:
        self._trouble = self._trouble or (said, since)

    def give_up(self) -> None:
        """Whoever waits for an answer stops waiting, and nothing more is asked, until `take_up`."""
        self._requests.leave()

    def take_up(self) -> None:
        self._requests.leaving.clear()

    def ask_again(self) -> None:
        """The next question is asked: how long it was to be left alone was a guess, and somebody waits."""
        self._failures, self._next_try = 0, 0.0

    def hurried(self, seconds: float) -> BucketClient:
        """The same bucket for callers that can also ask elsewhere: they wait this long at most, and what it
        did not answer to them does not count against it for the others."""
        limits = replace(self.limits, patience_seconds=seconds)
        return BucketClient(self._connection, limits, self._requests)

    def _patience(self, asked: float | None) -> float:
        """For how long attempts are made. Raises at once while the bucket is left alone."""
        if asked:
            return asked
        if self._down:
            self._come_back()
        return self.limits.patience_seconds if asked is None else asked

    def _come_back(self) -> None:
        """Ask something small before the first real request after a failure."""
        with self._knocking:
            if not self._down:
                return
            if time.monotonic() < self._next_try:
                raise BucketFailed(f"{self._down}, a moment ago")
            try:
                self._knock()
            except FileNotFoundError:
                pass
            except self._errors.BaseError as e:
                said, lasting = explain(e)
                if not lasting:
                    self._went_down(said)
                    raise BucketFailed(said) from None
            self._is_there()

    def _went_down(self, said: str) -> None:
        rest = min(REST_SECONDS * 2**self._failures, self.limits.patience_seconds)
        self._failures = min(self._failures + 1, 10)
        self._down, self._next_try = said, time.monotonic() + rest

    def _check_fork(self) -> None:
        global _used_by
        with _fork_lock:
            if not _used_by:
                _used_by = os.getpid()
            if _used_by == os.getpid():
                return
        raise BucketFailed(
            "this process was forked from one that had used a bucket, which buckets do not survive; "
            "start it with multiprocessing's 'spawn', or open the bucket in the child only",
            lasting=True,
        )


_NOT_AWAITED = "it was not waited for any longer"


class _RetryRequest(Exception):
    """The attempt settled nothing."""


class _Silent(Exception):
    """No answer in the time there was."""


_fork_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_fork_lock=threading.Lock()))


def _found(meta: Any) -> BucketObject:
    return BucketObject(str(meta["path"]), int(meta["size"]), meta["last_modified"])
