"""A command on a Ray node, as the run that looks after it sees it.

Rules of this file:
- The run stays where its user started it; the command is a real one of the node's, with its own supervisor there.
- What the command writes appears here byte by byte, in the order of each stream; where both streams are one file here, they are one pipe
  there, and the order is that of the writes. Whoever does not read here makes the command wait there.
- That it left is said after its last byte was written here.
- Its node is lost, or confirms no renewal: then its end was not seen, and its lease is over. Nobody's failure.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayError

from sublet.core.errors import BadInput, WorkerLost
from sublet.core.notice import Notice
from sublet.placement.agent import Event
from sublet.placement.node_command import STDERR, STDOUT
from sublet.placement.worker import LOOK_SECONDS, RayWorker, words
from sublet.ports.command import Left
from sublet.ports.ledger import LeaseKey
from sublet.ports.worker import Part, Sink
from sublet.wiring import CLOCK

#: At a deadline the node's supervisor ends the command; so long is waited to hear what became of it.
LAST_WORDS_US = 3_000_000


def one_stream() -> bool:
    """Do standard output and standard error of this process end in the same place?"""
    try:
        out, err = os.fstat(STDOUT), os.fstat(STDERR)
    except OSError:
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


class RayCommand(RayWorker):
    """Implements `ports.command.Command`."""

    def __init__(self, agent: Any, facts: Mapping[str, Any], received_us: int) -> None:
        super().__init__(agent, facts, received_us)
        self._key: LeaseKey | None = None
        self._left: Left | None = None
        self._steps = (0, 0)
        self._ended_us: int | None = None
        self._closing, self._closed = threading.Lock(), False
        self._rung, self._ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def ending(self) -> str:
        left = self._left
        return (left.why or "the command has left") if left is not None else super().ending

    # the lease's side

    def entrust(self, key: LeaseKey) -> None:
        self._key = key

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        assert self._key is not None, "a command is entrusted with its lease before it begins"
        waiting = self._asked(
            partial(self._agent.begin_command.remote, self._number, self._key, dict(environment)), begun=False
        )
        threading.Thread(target=self._follow, args=(waiting,), name="sublet-follows", daemon=True).start()

    def end(self, why: str) -> None:
        super().end(why)
        with self._closing:
            if not self._closed:
                self._closed = True
                os.close(self._rung)
                os.close(self._ring)

    # the run's side

    def drain(self, notice: Notice) -> None:
        if not self._connected():
            return
        with contextlib.suppress(RayError):
            self._agent.drain.remote(
                self._number, notice.source, notice.reason, notice.deadline_us + self._ahead_us
            )

    def fileno(self) -> int:
        return self._rung

    def left(self) -> Left | None:
        return self._left

    def steps(self) -> tuple[int, int]:
        return self._steps

    def _follow(self, waiting: Any) -> None:
        seen = 0
        try:
            while self._left is None:
                first, events = self._news(waiting)
                for event in events[seen - first :]:
                    seen += 1
                    self._heard(event)
                if self._left is None:
                    waiting = self._asked(partial(self._agent.more.remote, self._number, 0, seen))
        except WorkerLost as e:
            self._leave(Left(code=None, why=self._ending or e.message, lease_over=e.with_host))
        except BaseException as e:  # the run waits for nothing else
            self._leave(Left(code=None, why=f"it could not be followed: {type(e).__name__}: {e}"))

    def _news(self, waiting: Any) -> tuple[int, list[Event]]:
        while True:
            try:
                if ray.wait([waiting], timeout=LOOK_SECONDS)[0]:
                    return ray.get(waiting)  # type: ignore[no-any-return]
            except GetTimeoutError:
                pass
            except RayError as e:
                raise self._lost(f"its node was lost: {words(e)}", host_gone=True) from e
            self._look()

    def _look(self) -> None:
        """Does it make sense to wait?"""
        if self.ending:
            now = CLOCK.monotonic_us()
            self._ended_us = self._ended_us or now
            if now - self._ended_us >= LAST_WORDS_US or not self._connected():
                raise WorkerLost(self._ending, with_host=self._host_gone)

    def _heard(self, event: Event) -> None:
        if event[0] == "out":
            self._write(event[1], event[2])
        elif event[0] == "steps":
            self._steps = event[1], event[2]
        elif event[0] == "left":
            self._leave(Left(**event[1]))
        elif event[0] == "lost":
            raise self._lost(event[1], begun=event[2], host_gone=event[3])

    def _write(self, stream: int, data: bytes) -> None:
        """As the command itself would have: a reader that is slow is waited for, one that is gone ends the stream there too."""
        rest = memoryview(data)
        poller = select.poll()
        poller.register(stream, select.POLLOUT)
        try:
            while rest:
                if not poller.poll(LOOK_SECONDS * 1000):
                    self._look()
                    continue
                with contextlib.suppress(BlockingIOError):
                    rest = rest[os.write(stream, rest[: select.PIPE_BUF]) :]
        except OSError:
            with contextlib.suppress(RayError):
                self._agent.deafen.remote(self._number, stream)

    def _leave(self, left: Left) -> None:
        self._left = self._left or left
        with self._closing:
            if not self._closed:
                os.write(self._ring, b"!")

    # it is not called

    def call_sealed(self, target: str, parts: Sequence[Part], sink: Sink) -> NoReturn:
        raise BadInput("a command is not called; it runs")

    def _trip(self, *_: Any, **__: Any) -> NoReturn:
        raise BadInput("a command is not called; it runs")
