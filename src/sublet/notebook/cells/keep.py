"""What a notebook keeps: snapshots taken inside a cell, saved in the background, and used after a loss.

Rules of this file:
- A snapshot counts once the store has committed it under the cell's lease. Until then neither the notebook's
  variables nor an error message mention it.
- One save runs at a time. Meanwhile only the newest snapshot waits, since each contains everything.
- A failed save is reported at the next point and at the end of the cell. Nothing is retried silently.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sublet.core.errors import NotDurable, SubletError, Unsavable
from sublet.notebook.cells.process_state import States, opened, put_opened
from sublet.training.capture import Captured


class KeepStore(Protocol):
    """What a notebook needs of a checkpoint store."""

    def save(self, name: str, state: Any, *, expected_version: int, lease: Any) -> Any: ...
    def load(self, name: str) -> Any: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptValues:
    """The last durable state."""

    values: Mapping[str, Any]
    random: States
    version: int
    saved_at: float  # seconds since 1970
    bytes_written: int

    @property
    def names(self) -> str:
        return ", ".join(self.values)


class KeptState:
    """What one notebook keeps, under one job name."""

    def __init__(self, job: str, store: Callable[[], KeepStore], version: Callable[[str], int]) -> None:
        self.job = job
        self._open = store
        self._store: KeepStore | None = None
        self._version = version
        self._lock = threading.Condition()
        self._waiting: tuple[Mapping[str, Any], States, Any] | None = None
        self._busy = False
        self._failed = ""
        self.last: KeptValues | None = None
        self.bytes_written = 0

    def save_behind(self, values: Mapping[str, Any], random: States, lease: Any) -> str:
        """Queues a snapshot; returns why an earlier one failed, or ''."""
        with self._lock:
            failed, self._failed = self._failed, ""
            self._waiting = (values, random, lease)
            if not self._busy:
                self._busy = True
                threading.Thread(target=self._work, name="sublet-keeps", daemon=True).start()
            return failed

    def settle(self, seconds: float | None = None) -> str:
        """Waits until no save runs, or so many seconds; returns why one failed, or ''."""
        with self._lock:
            self._lock.wait_for(lambda: not self._busy, seconds)
            failed, self._failed = self._failed, ""
            return failed

    def save(self, values: Mapping[str, Any], random: States, lease: Any) -> KeptValues:
        """Saves a snapshot, which is durable when this returns."""
        failed = self.settle()
        if failed:
            raise NotDurable(failed)
        return self._save(values, random, lease)

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None:
                    self._busy = False
                    self._lock.notify_all()
                    return
                values, random, lease = self._waiting
                self._waiting = None
            try:
                self._save(values, random, lease)
            except BaseException as e:  # whatever it is: somebody waits for this thread
                with self._lock:
                    self._failed = self._failed or _in_words(e)

    def _save(self, values: Mapping[str, Any], random: States, lease: Any) -> KeptValues:
        if self._store is None:
            self._store = self._open()
        captured = Captured(dict(values))
        own = {**captured.take_own(), "random": opened(random)}
        tree = captured.take([own])
        expected = self._version(self.job)
        try:
            saved = self._store.save(self.job, tree, expected_version=expected, lease=lease)
        except Unsavable as e:
            raise captured.explained(e) from None
        self.bytes_written += saved.bytes_written
        self.last = KeptValues(
            values=values,
            random=random,
            version=saved.version,
            saved_at=time.time(),
            bytes_written=saved.bytes_written,
        )
        return self.last

    def restore(self, space: dict[str, Any], job: str = "") -> tuple[str, ...]:
        """Put what was saved, perhaps by another kernel, into the notebook's variables, and its random states
        into the libraries in use; their names."""
        store = self._store or self._open()
        tree = store.load(job or self.job)
        saved = {**tree["state"], **tree["ranks"][0]["parts"]}
        missing = [name for name, value in saved.items() if name not in space and isinstance(value, dict)]
        parts = {name: space.get(name) for name in saved}
        for name in missing:
            parts[name] = {}
        captured = Captured(parts)
        captured.put(tree, 0, 1)
        space.update(parts)
        put_opened(captured.random_of(tree, 0, 1))
        return tuple(saved)

    def close(self) -> None:
        with contextlib.suppress(SubletError):
            self.settle()
            if self._store is not None:
                self._store.close()


def _in_words(error: BaseException) -> str:
    if isinstance(error, SubletError):
        return f"{error.message} ({error.remedy})"
    return f"{type(error).__name__}: {error}"
