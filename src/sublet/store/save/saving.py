"""A save under way: its thread, its outcome, and the part of a state that is copied while training goes on.

Rules of this file:
- A program that comes to its end waits for its last save; whoever asks for the outcome gets it, or what went
  wrong.
- Only what an optimizer owns is copied late: its parameters and its own state, which nothing but its step
  writes to. The step waits for the copy. Whatever else changed them meanwhile makes the save fail, not the
  checkpoint wrong.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from sublet.core.checkpoints.checkpoint import ChunkEntry, Layout
from sublet.core.errors import BadInput, Misconfigured, Unsavable
from sublet.store.arena import address_of
from sublet.store.replicas.quorum import SaveTimings
from sublet.store.slots import Slot
from sublet.store.tree import TakenState

#: torch counts the writes to a tensor here, and nowhere that is public.
_count_of_writes = attrgetter("_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    version: int
    digest: str
    bytes_written: int
    bytes_shared: int
    #: Who confirmed it when; those that were late are written down there when they have caught up.
    account: SaveTimings = field(default_factory=SaveTimings, compare=False, repr=False)

    @property
    def quorum_seconds(self) -> float:
        """The time from the beginning until enough replicas had it."""
        return self.account.quorum_seconds


class PendingSave:
    """A save under way."""

    def __init__(self, work: Callable[[], Saved]) -> None:
        self._outcome: Saved | BaseException | None = None
        # Not a daemon: a program that comes to its end waits for its last save.
        self._thread = threading.Thread(target=self._run, args=(work,), name="sublet-save")
        self._runs = threading.Event()
        self._began = time.monotonic()
        self.seconds = 0.0  # from the beginning until its outcome was known

    def begin(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as e:
            raise Misconfigured(
                f"the save was not begun: {e}; nothing was written",
                remedy="let the process have more threads (ulimit -u, pids of its container), or use save()",
            ) from e

    def has_begun(self) -> bool:
        """Also if whoever began it was interrupted there."""
        return self._runs.wait(1)

    def _run(self, work: Callable[[], Saved]) -> None:
        self._runs.set()
        try:
            self._outcome = work()
        except BaseException as e:
            self._outcome = e
        self.seconds = time.monotonic() - self._began

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over, whatever its outcome."""
        self._thread.join(timeout)
        return self.done

    def result(self, timeout: float | None = None) -> Saved:
        """Wait for it. Raises what went wrong, or `TimeoutError` when it is still under way."""
        if not self.wait(timeout):
            raise TimeoutError("the save is still under way")
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


class Owned:
    """The part of a state that optimizers own, copied behind the next forward and backward passes."""

    def __init__(self, optimizers: Any) -> None:
        self._optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        self._tensors: list[Any] = []
        for optimizer in self._optimizers:
            if not hasattr(optimizer, "register_step_pre_hook") or not hasattr(optimizer, "param_groups"):
                raise BadInput(
                    f"overlap= takes torch optimizers, not {type(optimizer).__name__}",
                    remedy="leave it out: the state is then copied before save_behind returns",
                )
            for group in optimizer.param_groups:
                self._tensors += group["params"]
            for own in optimizer.state.values():
                self._tensors += [value for value in own.values() if hasattr(value, "untyped_storage")]
        self._versions: list[int] = []
        self._copy: Callable[[], None] = lambda: None
        self._is_copied = threading.Event()
        self._hooks: list[Any] = []
        self._pid = os.getpid()

    def split(self, taken: TakenState) -> tuple[list[int], list[int]]:
        """The storages that must be copied now, and those that may wait because all of their bytes are owned.
        What shares a storage with a parameter may be written to by anybody."""
        parts: dict[int, set[tuple[int, int]]] = {}
        sizes: dict[int, int] = {}
        for tensor in self._tensors:
            if tensor.device.type == "cpu" and _is_dense(tensor):
                storage, first = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
                sizes[storage.data_ptr()] = storage.nbytes()
                parts.setdefault(storage.data_ptr(), set()).add((first, first + tensor.nbytes))
        owned = {at for at, spans in parts.items() if _reach(spans) >= sizes[at]}
        now: list[int] = []
        later: list[int] = []
        for number, memory in enumerate(taken.storages):
            mine = memory.nbytes and address_of(memory) in owned
            (later if mine else now).append(number)
        return now, later

    def leave(
        self,
        slot: Slot,
        taken: TakenState,
        layout: Layout,
        later: Sequence[int],
        entries: Callable[[list[bool]], list[ChunkEntry | None]],
    ) -> None:
        """Remember what will be copied later, and how often it was written to."""
        self._versions = self._writes()

        def copy() -> None:
            dirty = slot.arena.take(taken.storages, layout, all_new=False, only=later)
            slot.entries = entries(dirty)

        self._copy = copy

    def _writes(self) -> list[int]:
        return [_count_of_writes(t) for t in self._tensors]

    def finish_before_steps(self) -> None:
        """Hold optimizer steps back until the copy is made."""
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._hold_back))

    def _hold_back(self, *_: Any) -> None:
        if self._pid == os.getpid():  # a forked child has its own parameters, and nobody who copies them
            self._is_copied.wait()

    def copied(self) -> None:
        """Copy now, in the save's thread. Raises `Unsavable` if torch counted a write before the step."""
        try:
            self._copy()
            changed = self._writes() != self._versions
        finally:
            self._copy = lambda: None  # it knows the whole state, which may be freed
            self._is_copied.set()
        if changed:
            raise Unsavable(
                "a parameter or the optimizer's state was written to while it was being copied, and not by "
                "the optimizer's step",
                remedy="leave overlap= out, or change parameters only between optimizer.step() and "
                "save_behind()",
            )

    def let_steps_go(self) -> None:
        """Remove the hooks; called by the training thread between steps, because a hook cannot remove
        itself."""
        while self._hooks:
            self._hooks.pop().remove()


def _is_dense(tensor: Any) -> bool:
    """Whether the tensor has every byte from its first to its last exactly once."""
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(tensor.numel() == reach)


def _reach(spans: set[tuple[int, int]]) -> int:
    """How far the spans go from the beginning without a gap."""
    end = 0
    for first, last in sorted(spans):
        if first > end:
            break
        end = max(end, last)
    return end
