"""A command under a drill: started in a session of its own, signalled as a whole, its output kept.

Rules of this file:
- A signal goes to the process group of the command and to those of its leases' holders, because a machine
  that goes takes all of them.
- It is ended, and waited for, however the drill ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sublet.core.errors import BadInput


class DrilledCommand:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with open(log, "ab") as output:
            try:
                self._process = subprocess.Popen(
                    list(command),
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as e:
                raise BadInput(
                    f"{command[0][:200]!r} cannot be started: {e.strerror}",
                    remedy="write the command as it runs in a shell, after --",
                ) from e

    @property
    def exit_code(self) -> int | None:
        """As a shell shows it; None while it runs. Its pid stays taken until `end`, so that no signal can
        reach a stranger."""
        if self._process.returncode is None:
            found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            return found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status
        return self._process.returncode if self._process.returncode >= 0 else 128 - self._process.returncode

    def signal(self, number: int, holders: Iterable[int] = ()) -> None:
        groups = {self._process.pid} if self._process.returncode is None else set()
        for pid in holders:
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(pid))
        groups.discard(os.getpgid(0))  # never ourselves
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def end(self) -> None:
        """Kill whatever is left of it, also in its process group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def last_lines(log: Path, count: int = 5) -> str:
    try:
        text = log.read_bytes()[-4000:].decode(errors="replace")
    except OSError:
        return ""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])
