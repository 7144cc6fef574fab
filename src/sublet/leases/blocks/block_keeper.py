"""The block keeper: renews the block leases of this process while it lives.

Rules of this file:
- One thread. When to renew and when to give up is `core.leasing.renewal`, as for a GPU lease; a block counts
  as used while its object exists, so one that was forgotten without a release runs out.
- A renewal that fails is tried again until the block's own deadline. After that `Block.check` refuses,
  whatever happens here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from dataclasses import dataclass, replace

from sublet.core.errors import SubletError
from sublet.core.leasing.renewal import RenewalAction, Tenure, next_move
from sublet.leases.blocks.block import Block
from sublet.ports.clock import Clock


@dataclass(slots=True)
class _KeptBlock:
    block: weakref.ref[Block]
    tenure: Tenure


class BlockKeeper:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, int], _KeptBlock] = {}
        self._changed = threading.Condition()
        self._started = False
        self.pid = os.getpid()

    def keep(self, block: Block) -> None:
        key = (block.locator, block.epoch)
        tenure = Tenure(
            ttl_us=block.ttl_us, sent_at=block.sent_at, seed=int(block.locator[1:], 16), worked=True
        )
        block.on_release(lambda: self._forget(key))
        with self._changed:
            self._kept[key] = _KeptBlock(weakref.ref(block), tenure)
            if not self._started:
                self._started = True
                threading.Thread(target=self._loop, name="sublet-block-keeper", daemon=True).start()
            self._changed.notify_all()

    def _forget(self, key: tuple[str, int]) -> None:
        with self._changed:
            self._kept.pop(key, None)
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                due, wake_at = self._decide(self._clock.monotonic_us())
                if not due:
                    pause = None if wake_at is None else (wake_at - self._clock.monotonic_us()) / 1e6
                    if pause is None or pause > 0:
                        self._changed.wait(pause)
            for kept in due:
                self._renew(kept)
            due = []

    def _decide(self, now: int) -> tuple[list[_KeptBlock], int | None]:
        """What is due, and when to look again."""
        due: list[_KeptBlock] = []
        wake_at: int | None = None
        for key, kept in list(self._kept.items()):
            block = kept.block()
            if block is None or block.is_over:
                del self._kept[key]
                continue
            if block.sent_at > kept.tenure.sent_at:  # renewed by hand
                kept.tenure = replace(kept.tenure, sent_at=block.sent_at, attempt=0)
            # There is nobody to warn: a block is used from where an error can be raised.
            move = next_move(replace(kept.tenure, warned=True), now)
            if move.todo is RenewalAction.STOP:
                del self._kept[key]
            elif move.todo is RenewalAction.RENEW:
                due.append(kept)
            else:
                wake_at = move.at if wake_at is None else min(wake_at, move.at)
        return due, wake_at

    def _renew(self, kept: _KeptBlock) -> None:
        block = kept.block()
        if block is None:
            return
        sent_at = self._clock.monotonic_us()
        with contextlib.suppress(SubletError, OSError):
            block.extend(max(10_000, block.ttl_us // 20))
            kept.tenure = replace(kept.tenure, ttl_us=block.ttl_us, sent_at=sent_at, attempt=0)
            return
        kept.tenure = replace(
            kept.tenure, attempt=kept.tenure.attempt + 1, tried_at=self._clock.monotonic_us()
        )
