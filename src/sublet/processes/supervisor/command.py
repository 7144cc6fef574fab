"""A command on this host: starting its supervisor, and this process's end of it.

Rules of this file:
- The supervisor is a new program, not a fork: the run has threads, and a fork would copy only one of them.
- The command's standard streams are the run's own, passed through untouched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sublet.core.errors import Misconfigured, WorkerLost
from sublet.core.leasing.lease import Holder
from sublet.core.notice import Notice
from sublet.machine import lease_environment
from sublet.machine.private_files import make_private_folder
from sublet.machine.run_folder import RunFolder
from sublet.ports.ledger import LeaseKey
from sublet.ports.worker import CommandExit
from sublet.processes.channel.channel import pair, send_with_fds
from sublet.processes.supervisor.link import SupervisorLink

SUPERVISOR = (sys.executable, "-m", "sublet.processes.supervisor.command_supervisor")
END_WAIT_US = 7_000_000


class LocalCommand:
    """Implements `ports.worker.Command`."""

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
        """`folder` is where the command starts, if not here. `links` are descriptors to pass, by the variable
        that holds their number; the caller keeps its own. `streams` replace the run's own, as `subprocess`
        takes them."""
        self._run = run
        self._executable, self._command = executable, list(command)
        self._folder, self._links = folder, dict(links or {})
        self._page = run.new_page()
        self._lock = threading.Lock()
        self._left: CommandExit | None = None
        make_private_folder(accounts)
        ours, theirs = pair()
        self._supervisor = SupervisorLink(ours)
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), str(accounts), str(run.path), str(grace_us)]
            self._process = subprocess.Popen(
                [*SUPERVISOR, *arguments],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                **(streams or {}),
            )
        facts = self._supervisor.greet(host)
        if not facts:
            self._process.kill()
            self._process.wait()
            raise Misconfigured(
                "the supervisor of the command could not start", remedy=f"see {run.path / 'supervisor.err'}"
            )
        self.command_pid: int = facts["command_pid"]

    @property
    def holder(self) -> Holder:
        return self._supervisor.holder

    @property
    def containment(self) -> str:
        return self._supervisor.containment

    @property
    def ending(self) -> str:
        left = self._left
        if left is not None:
            return left.why or "the command has left"
        if not self._supervisor.watched:
            return "it was ended"
        return self._supervisor.why_killed() if self._supervisor.ended() else ""

    # the lease's side; also called by the keeper's threads

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        lease_environment.write_deadline(self._page, stop_us)
        self._supervisor.order({"stop_us": stop_us, "kill_us": kill_us, "answer": confirm})
        if not confirm:
            return
        said = self._supervisor.answer()
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
            send_with_fds(
                self._supervisor.control, json.dumps({"begin": True}).encode(), [fd, *self._links.values()]
            )
        except OSError as e:
            raise WorkerLost("the command's supervisor ended before it began", begun=False) from e
        finally:
            os.close(fd)

    def warn(self) -> None:
        lease_environment.write_warned(self._page)

    def end(self, why: str) -> None:
        """Returns when everything of it is gone, or did not go in time."""
        lease_environment.write_deadline(self._page, 0)
        self._supervisor.order({"end": why})
        if not self._supervisor.ended(END_WAIT_US):
            return
        self.left()
        self._process.wait()
        self._supervisor.forget()
        self._supervisor.control.close()  # a run may start its command thousands of times

    # the run's side

    def entrust(self, key: LeaseKey) -> None:
        self._run.write_key(key, self.holder.pid, self.holder.started)

    def drain(self, notice: Notice) -> None:
        self._supervisor.order({"drain_us": notice.deadline_us})

    def fileno(self) -> int:
        return self._supervisor.control.fileno()

    def left(self) -> CommandExit | None:
        with self._lock:
            while self._left is None and self.fileno() >= 0 and self._supervisor.readable():
                said = self._supervisor.answer()
                if not said:
                    self._supervisor.ended(END_WAIT_US)
                    self._left = CommandExit(code=None, why=self._supervisor.why_killed())
                elif said.get("left"):
                    self._left = _as_left(said)
            return self._left

    def steps(self) -> tuple[int, int]:
        return lease_environment.read_steps(self._page)

    def unfinished(self) -> bool:
        return lease_environment.read_unfinished(self._page)


def _as_left(said: dict[str, Any]) -> CommandExit:
    status = said["status"]
    code = status if status is None or status >= 0 else 128 - status
    if said["killed"]:
        code = 137
    return CommandExit(code=code, why=said["why"], killed=said["killed"], lease_over=said["lease_over"])
