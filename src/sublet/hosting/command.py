"""A command on this host: starting its supervisor, and this process's end of it.

Rules of this file:
- The supervisor is a new program, not a fork: the run has threads, and a fork of one of them is nobody.
- The command's standard streams are the run's own, handed through untouched.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sublet import inside
from sublet.core.errors import BadInput, Misconfigured, WorkerLost
from sublet.core.exits import NOT_EXECUTABLE_CODE, NOT_FOUND_CODE
from sublet.core.lease import Holder
from sublet.core.notice import Notice
from sublet.hosting.channel import pair, receive_with_fds, send_with_fds
from sublet.hosting.processes import ended
from sublet.ports.command import Left
from sublet.ports.ledger import LeaseKey
from sublet.ports.worker import Call, Part, Screen, Sink
from sublet.runs import RunFolder

SUPERVISOR = (sys.executable, "-m", "sublet.hosting.command_supervisor")
START_SECONDS = 60.0
END_WAIT_US = 7_000_000


def find_executable(name: str, path: str) -> tuple[str, int]:
    """The file a shell would run and 0, or '' and the code a shell would leave with. Before a lease is asked for."""
    if not name:
        return "", NOT_FOUND_CODE
    places = [name] if "/" in name else [os.path.join(p or ".", name) for p in path.split(os.pathsep)]
    seen = False
    for place in places:
        if os.path.isfile(place):
            if os.access(place, os.X_OK):
                return place, 0
            seen = True
        elif os.path.isdir(place) and "/" in name:
            seen = True
    return "", NOT_EXECUTABLE_CODE if seen else NOT_FOUND_CODE


class LocalCommand:
    """Implements `ports.command.Command`."""

    here = True
    host_lost = ""

    def __init__(
        self,
        run: RunFolder,
        accounts: Path,
        host: str,
        executable: str,
        command: Sequence[str],
        grace_us: int,
        *,
        folder: str | None = None,
        links: Mapping[str, int] | None = None,
        streams: Mapping[str, Any] | None = None,
    ) -> None:
        """`folder` is where the command starts, if not here. `links` are descriptors it is handed, by the variable that tells it the
        number; the caller keeps its own. `streams` are standard ones as `subprocess` takes them, where they are not the run's own."""
        self._run = run
        self._executable, self._command = executable, list(command)
        self._folder, self._links = folder, dict(links or {})
        self._page = run.new_page()
        self._lock = threading.Lock()
        self._left: Left | None = None
        accounts.mkdir(parents=True, exist_ok=True)
        ours, theirs = pair()
        self._control = ours
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), str(accounts), str(run.path), str(grace_us)]
            self._process = subprocess.Popen(
                [*SUPERVISOR, *arguments],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                **(streams or {}),
            )
        ours.settimeout(START_SECONDS)
        try:
            hello, _ = receive_with_fds(ours)
        except TimeoutError:
            hello = b""
        ours.settimeout(None)
        if not hello:
            self._process.kill()
            self._process.wait()
            raise Misconfigured(
                "the supervisor of the command could not start", remedy=f"see {run.path / 'supervisor.err'}"
            )
        facts = json.loads(hello)
        self._holder = Holder(host=host, pid=facts["pid"], started=facts["started"])
        self._supervisor_fd = os.pidfd_open(facts["pid"])
        self.command_pid: int = facts["command_pid"]
        self._containment: str = facts["containment"]

    @property
    def holder(self) -> Holder:
        return self._holder

    @property
    def containment(self) -> str:
        return self._containment

    @property
    def launches(self) -> int:
        return 0  # it is not called

    @property
    def ending(self) -> str:
        left = self._left
        if left is not None:
            return left.why or "the command has left"
        if self._supervisor_fd < 0:
            return "it was ended"
        return "its supervisor was killed" if ended(self._supervisor_fd, 0) else ""

    # the lease's side; also called by the keeper's threads

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        inside.write_deadline(self._page, stop_us)
        self._order({"stop_us": stop_us, "kill_us": kill_us, "answer": confirm})
        if not confirm:
            return
        said = json.loads(receive_with_fds(self._control)[0] or b"{}")
        if said.get("left"):  # one that began before its lease may leave at this very moment
            self._left = _as_left(said)
        if said.get("obeyed") is not True:
            raise WorkerLost("the command's supervisor ended before it began", begun=False)

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        terms = {
            "executable": self._executable,
            "command": self._command,
            "environment": dict(environment),
            "folder": self._folder,
            "links": list(self._links),
        }
        fd = os.memfd_create("sublet-terms", os.MFD_CLOEXEC)
        try:
            os.write(fd, json.dumps(terms).encode())
            os.lseek(fd, 0, os.SEEK_SET)
            send_with_fds(self._control, json.dumps({"begin": True}).encode(), [fd, *self._links.values()])
        except OSError as e:
            raise WorkerLost("the command's supervisor ended before it began", begun=False) from e
        finally:
            os.close(fd)

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise BadInput("a command is not called; it runs")

    def call_many(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[tuple[bool, Any]]:
        raise BadInput("a command is not called; it runs")

    def call_shown(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        screen: Screen,
        answer: Callable[[Any], Any],
    ) -> Any:
        raise BadInput("a command is not called; it runs")

    def call_sealed(self, target: str, parts: Sequence[Part], sink: Sink) -> tuple[bool, list[memoryview]]:
        raise BadInput("a command is not called; it runs")

    def interrupt(self) -> None:
        raise BadInput("a command is not called; it runs")

    def warn(self) -> None:
        inside.write_warned(self._page)

    def end(self, why: str) -> None:
        """Returns when everything of it is gone, or did not go in time."""
        inside.write_deadline(self._page, 0)
        self._order({"end": why})
        if self._supervisor_fd < 0 or not ended(self._supervisor_fd, END_WAIT_US):
            return
        self.left()
        self._process.wait()
        fd, self._supervisor_fd = self._supervisor_fd, -1
        os.close(fd)
        self._control.close()  # a run may start its command thousands of times

    # the run's side

    def entrust(self, key: LeaseKey) -> None:
        self._run.write_key(key, self._holder.pid, self._holder.started)

    def drain(self, notice: Notice) -> None:
        self._order({"drain_us": notice.deadline_us})

    def fileno(self) -> int:
        return self._control.fileno()

    def left(self) -> Left | None:
        with self._lock:
            while self._left is None and self._control.fileno() >= 0:
                poller = select.poll()
                poller.register(self._control.fileno(), select.POLLIN)
                if not poller.poll(0):
                    break
                message, _ = receive_with_fds(self._control)
                if not message:
                    ended(self._supervisor_fd, END_WAIT_US)
                    self._left = Left(code=None, why="its supervisor was killed")
                    break
                said = json.loads(message)
                if said.get("left"):
                    self._left = _as_left(said)
            return self._left

    def steps(self) -> tuple[int, int]:
        return inside.read_steps(self._page)

    def _order(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # gone: `left` says so
            self._control.send(json.dumps(order).encode(), socket.MSG_NOSIGNAL)


def _as_left(said: dict[str, Any]) -> Left:
    status = said["status"]
    code = status if status is None or status >= 0 else 128 - status
    if said["killed"]:
        code = 137
    return Left(code=code, why=said["why"], killed=said["killed"], lease_over=said["lease_over"])
