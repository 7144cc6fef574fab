"""A command on a Ray node, as the run that looks after it sees it.

Rules of this file:
- The run stays where its user started it; the command is an ordinary one on the node, with its own supervisor
  there.
- What the command writes appears here byte by byte, in the order of each stream. Where both streams are one
  file here they are one pipe there, in the order of the writes. A slow reader here makes the command wait
  there.
- That it left is reported after its last byte was written here.
- When its node is lost, or confirms no renewal, its end was not seen and its lease is over. That is nobody's
  failure.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from ray.exceptions import RayError

from sublet.core.errors import WorkerLost
from sublet.core.notice import Notice
from sublet.placement.agent import Event
from sublet.placement.node_command import STDERR, STDOUT
from sublet.placement.process import LOOK_SECONDS, RayProcess
from sublet.ports.ledger import LeaseKey
from sublet.ports.worker import CommandExit
from sublet.wiring import CLOCK

#: How long to wait for the node's report after a deadline, at which its supervisor ends the command.
LAST_WORDS_US = 3_000_000


def one_stream() -> bool:
    """Whether standard output and standard error of this process end in the same place."""
    try:
        out, err = os.fstat(STDOUT), os.fstat(STDERR)
    except OSError:
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


class RayCommand(RayProcess):
    """Implements `ports.worker.Command`."""

    def __init__(self, agent: Any, facts: Mapping[str, Any], received_us: int) -> None:
        super().__init__(agent, facts, received_us)
        self._key: LeaseKey | None = None
        self._left: CommandExit | None = None
        self._steps, self._unfinished = (0, 0), False
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

    def left(self) -> CommandExit | None:
        return self._left

    def steps(self) -> tuple[int, int]:
        return self._steps

    def unfinished(self) -> bool:
        return self._unfinished

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
            self._leave(CommandExit(code=None, why=self._ending or e.message, lease_over=e.with_host))
        except BaseException as e:  # the run waits for nothing else
            self._leave(CommandExit(code=None, why=f"it could not be followed: {type(e).__name__}: {e}"))

    def _check_waiting(self) -> None:
        """Wait a while for what the command wrote last, after it ended."""
        if self.ending:
            now = CLOCK.monotonic_us()
            self._ended_us = self._ended_us or now
            if now - self._ended_us >= LAST_WORDS_US or not self._connected():
                raise WorkerLost(self._ending, with_host=self._host_gone)

    def _heard(self, event: Event) -> None:
        if event[0] == "out":
            self._write(event[1], event[2])
        elif event[0] == "steps":
            self._steps, self._unfinished = (event[1], event[2]), event[3]
        elif event[0] == "left":
            self._leave(CommandExit(**event[1]))
        elif event[0] == "lost":
            raise self._lost(event[1], begun=event[2], host_gone=event[3])

    def _write(self, stream: int, data: bytes) -> None:
        """Write as the command itself would have: a slow reader is waited for, and a closed one ends the
        stream there too."""
        rest = memoryview(data)
        poller = select.poll()
        poller.register(stream, select.POLLOUT)
        try:
            while rest:
                if not poller.poll(LOOK_SECONDS * 1000):
                    self._check_waiting()
                    continue
                with contextlib.suppress(BlockingIOError):
                    rest = rest[os.write(stream, rest[: select.PIPE_BUF]) :]
        except OSError:
            with contextlib.suppress(RayError):
                self._agent.deafen.remote(self._number, stream)

    def _leave(self, left: CommandExit) -> None:
        self._left = self._left or left
        with self._closing:
            if not self._closed:
                os.write(self._ring, b"!")
