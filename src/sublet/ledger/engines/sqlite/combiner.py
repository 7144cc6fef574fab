"""Many threads of one process, one transaction: a savepoint each, one fsync together.

Rules of this file:
- It knows threads, not databases: the engine commits a batch and makes it durable.
- A write that fails does not affect the others of its batch.
- While one batch is being synced the next is being written.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sublet.core.errors import Disconnected, SubletError
from sublet.ledger.tx import Tx

T = TypeVar("T")

#: The most jobs of one transaction: enough to share an fsync, few enough to hold the lock only shortly.
MOST = 128


class PendingWrite:
    __slots__ = ("done", "durable", "error", "result", "rings", "work")

    def __init__(self, work: Callable[[Tx], Any], durable: bool) -> None:
        self.work = work
        self.durable = durable
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.rings: set[str] = set()


class Combiner:
    def __init__(
        self,
        commit: Callable[[list[PendingWrite]], None],
        sync: Callable[[], None],
        ring: Callable[[set[str]], None],
    ) -> None:
        self._commit = commit
        self._sync = sync
        self._ring = ring
        self._jobs: queue.SimpleQueue[PendingWrite | None] = queue.SimpleQueue()
        self._to_sync: queue.SimpleQueue[list[PendingWrite] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=loop, name=f"sublet-ledger-{name}", daemon=True)
            for name, loop in (("writer", self._write_loop), ("syncer", self._sync_loop))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[Tx], T], durable: bool) -> T:
        job = PendingWrite(work, durable)
        self._jobs.put(job)
        while not job.done.wait(1):
            if not self._threads[1].is_alive() and not job.done.is_set():
                raise Disconnected("the ledger was closed")  # it came after the last batch
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[no-any-return]

    def stop(self) -> None:
        self._jobs.put(None)

    def _next_batch(self) -> tuple[list[PendingWrite], bool]:
        """Returns the writes that wait now, and whether to stop after them."""
        first = self._jobs.get()
        if first is None:
            return [], True
        batch = [first]
        while len(batch) < MOST:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return batch, True
            batch.append(job)
        return batch, False

    def _write_loop(self) -> None:
        stopping = False
        while not stopping:
            batch, stopping = self._next_batch()
            if batch:
                try:
                    self._commit(batch)
                except BaseException as e:
                    for job in batch:
                        job.error = e
                self._to_sync.put(batch)
        self._to_sync.put(None)

    def _sync_loop(self) -> None:
        while (batch := self._to_sync.get()) is not None:
            waiting = [job for job in batch if job.durable]
            for job in batch:
                if not job.durable:
                    job.done.set()
            if waiting:
                try:
                    self._sync()
                except SubletError as e:
                    for job in waiting:
                        job.error = job.error or e
                for job in waiting:
                    job.done.set()
            rings: set[str] = set().union(*(job.rings for job in batch))
            if rings:
                self._ring(rings)
