"""This process's end of the socket to a supervisor of its own: a worker's or a command's.

Rules of this file:
- An order to a supervisor that is gone is dropped: the next caller is told that it ended.
- Its pidfd tells that it ended; what it said last tells why. One that was killed without a word after the end
  it was told was killed by its own timer: on a crowded machine that may come before its report.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from typing import Any

from sublet.core.errors import NotIsolated
from sublet.core.leasing.lease import Holder
from sublet.processes.channel.channel import receive_with_fds
from sublet.processes.ladder import ended

START_SECONDS = 60.0


class SupervisorLink:
    holder: Holder
    containment: str

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self._pid_fd = -1
        self._ends_us: int | None = None

    def greet(self, host: str) -> dict[str, Any]:
        """Wait for the supervisor's first message and return it; {} when it could not start. Raises
        `NotIsolated` when it refuses the tenant."""
        self.control.settimeout(START_SECONDS)
        try:
            hello, _ = receive_with_fds(self.control)
        except TimeoutError:
            hello = b""
        self.control.settimeout(None)
        if not hello:
            return {}
        facts: dict[str, Any] = json.loads(hello)
        if "refused" in facts:
            raise NotIsolated(facts["refused"], remedy=facts["remedy"])
        self.holder = Holder(host=host, pid=facts["pid"], started=facts["started"])
        self.containment = facts["containment"]
        self._pid_fd = os.pidfd_open(facts["pid"])
        return facts

    @property
    def watched(self) -> bool:
        """Whether the supervisor's end can be seen: it was greeted, and not forgotten."""
        return self._pid_fd >= 0

    def ended(self, wait_us: int = 0) -> bool:
        return self.watched and ended(self._pid_fd, wait_us)

    def order(self, order: dict[str, Any]) -> None:
        self._ends_us = order.get("deadline_us", order.get("kill_us", self._ends_us))
        with contextlib.suppress(OSError):
            self.control.send(json.dumps(order).encode(), socket.MSG_NOSIGNAL)

    def answer(self) -> dict[str, Any]:
        """Wait for its next message; {} when it is gone."""
        return json.loads(receive_with_fds(self.control)[0] or b"{}")  # type: ignore[no-any-return]

    def obeyed(self, wait_ms: int) -> bool:
        """Whether it said that it sent the interrupt, so that none can hit a later call. False: it said
        something else, or nothing."""
        with contextlib.suppress(OSError, ValueError):
            if self.readable(wait_ms) and b'"obeyed"' in self.control.recv(4096, socket.MSG_PEEK):
                self.control.recv(4096)
                return True
        return False

    def readable(self, wait_ms: int = 0) -> bool:
        poller = select.poll()
        poller.register(self.control.fileno(), select.POLLIN)
        return bool(poller.poll(wait_ms))

    def why_ended(self) -> str:
        """What the supervisor said last, in words."""
        last: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            while True:
                message = self.control.recv(4096, socket.MSG_DONTWAIT)
                if not message:
                    break
                last = json.loads(message)
        if last.get("ended"):
            return str(last["ended"])
        status = last.get("status")
        if status is None:
            return self.why_killed()
        if status > 128:
            return f"it was killed by signal {status - 128}"
        if status < 0:
            return f"it was killed by signal {-status}"
        return f"it exited with code {status}"

    def why_killed(self) -> str:
        """Why a supervisor is gone that did not say why."""
        if self._ends_us is not None and time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000 >= self._ends_us:
            return "its lease ran out"
        return "its supervisor was killed"

    def forget(self) -> None:
        """Stop watching for its end."""
        if self._pid_fd >= 0:
            fd, self._pid_fd = self._pid_fd, -1
            os.close(fd)
