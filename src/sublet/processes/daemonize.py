"""Starting a process that outlives the one that starts it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sublet.machine.private_files import make_private_folder, open_private


def spawn_detached(
    command: Sequence[str], environment: Mapping[str, str], log: Path, folder: str = "/"
) -> int:
    """Start a command in a session of its own, as a child of init, and return its pid. Its output goes into
    the log."""
    make_private_folder(log.parent)
    with os.fdopen(open_log(log), "ab") as lines:
        # The shell starts it, prints its pid and exits, so that a teardown of this process's tree does not
        # find it.
        done = subprocess.run(
            ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=lines,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            check=True,
        )
    return int(done.stdout)


def open_log(log: Path) -> int:
    try:
        return open_private(log, os.O_WRONLY | os.O_APPEND)
    except OSError:  # a link, which an operator may have put there on purpose
        return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][-300:] if lines else "no message"
