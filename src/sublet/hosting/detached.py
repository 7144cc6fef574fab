"""Starting a process that outlives the one that starts it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def spawn_detached(
    command: Sequence[str], environment: Mapping[str, str], log: Path, folder: str = "/"
) -> int:
    """In a session of its own, a child of init and not of ours; its pid. What it prints goes into the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as lines:
        # The shell starts it, says its pid and leaves: a teardown that ends this process's tree must not find it there.
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
