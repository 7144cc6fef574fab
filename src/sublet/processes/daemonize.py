"""Starting a process that outlives the one that starts it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def spawn_detached(
    command: Sequence[str], environment: Mapping[str, str], log: Path, folder: str = "/"
) -> int:
    """Start a command in a session of its own, as a child of init, and return its pid. Its output goes into
    the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as lines:
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


def last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][-300:] if lines else "no message"
