"""One start of a program, until it ends or is disturbed.

Rules of this file:
- A life is a process of a session of its own; only it and what it started are signalled, by number.
- It is disturbed when it says that it has come so far, and a random moment later.
- Its output goes to files: nothing is lost with a reader.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from proof.matrix.case import Case

_POLL_S = 0.02
#: Set when the whole trial is to end: no process is left behind.
interrupted = threading.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    kind: str  # 'kill', 'kill all', 'notice' or 'revoke'
    mark: int  # the number of the progress line of plain Python at which it is due
    later_s: float


@dataclass(slots=True)
class Life:
    number: int
    seconds: float = 0.0
    code: int | None = None
    disturbed: str = ""
    late: str = ""  # why it was disturbed otherwise than planned
    lines: list[str] = field(default_factory=list)
    cut: str = ""  # a last line without an end
    errors: str = ""
    first_mark_s: float | None = None
    last_mark_s: float | None = None
    first_mark: int | None = None
    furthest: int = -1


class Marks:
    """How far the program is by what it prints. They are learnt from plain Python, and do not change after that."""

    def __init__(self, case: Case) -> None:
        self.case, self.learning = case, True
        self.at: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self.at)

    def of(self, line: str) -> int | None:
        position = self.case.position(line)
        if position is not None and self.learning:
            self.at.setdefault(position, len(self.at))
        return None if position is None else self.at.get(position)


class Output:
    """The growing file of a stream. A progress bar that is drawn over itself is many lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def new_lines(self) -> list[str]:
        *whole, self._rest = re.split(rb"\r?\n|\r", self._rest + self._file.read())
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> str:
        return self._rest.decode(errors="replace")

    def close(self) -> None:
        self._file.close()


def live(
    command: list[str],
    folder: Path,
    environment: dict[str, str],
    logs: Path,
    number: int,
    marks: Marks,
    limit_s: float,
    disturbance: Disturbance | None = None,
    revoke: Callable[[], str] | None = None,
) -> Life:
    """Start it and wait; `revoke` takes its lease back and says what went wrong with that, if anything did."""
    logs.mkdir(parents=True, exist_ok=True)
    out, err = logs / f"{number}.out", logs / f"{number}.err"
    life = Life(number)
    with out.open("wb") as stdout, err.open("wb") as stderr:
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        streams = Output(out), Output(err)
        try:
            _watch(process, life, streams, marks, began, limit_s, disturbance, revoke)
        finally:
            _end_session(process)
            life.seconds = time.monotonic() - began
            life.code = process.returncode
            _note(life, streams, marks, began)
            life.cut = streams[0].rest()
            for stream in streams:
                stream.close()
    life.errors = err.read_text(errors="replace")
    return life


def _watch(
    process: subprocess.Popen[bytes],
    life: Life,
    streams: tuple[Output, Output],
    marks: Marks,
    began: float,
    limit_s: float,
    disturbance: Disturbance | None,
    revoke: Callable[[], str] | None,
) -> None:
    due: float | None = None
    while process.poll() is None:
        now = time.monotonic()
        _note(life, streams, marks, began)
        if now - began > limit_s or interrupted.is_set():
            life.late = f"it was not over after {limit_s:.0f} s" if due is None else "it did not leave"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return
        if disturbance and not life.disturbed:
            if due is None and life.furthest >= disturbance.mark:
                due = now + disturbance.later_s
            if due is not None and now >= due:
                _disturb(process, life, disturbance, revoke)
                limit_s = min(limit_s, now - began + 90)
        time.sleep(_POLL_S)


def _disturb(
    process: subprocess.Popen[bytes], life: Life, disturbance: Disturbance, revoke: Callable[[], str] | None
) -> None:
    life.disturbed = disturbance.kind
    with contextlib.suppress(ProcessLookupError):
        if disturbance.kind == "kill":
            process.kill()
        elif disturbance.kind == "kill all":
            os.killpg(process.pid, signal.SIGKILL)
        elif disturbance.kind == "notice":
            process.send_signal(signal.SIGTERM)
        elif revoke is not None and (wrong := revoke()):
            life.late = wrong
            process.send_signal(signal.SIGTERM)


def _note(life: Life, streams: tuple[Output, Output], marks: Marks, began: float) -> None:
    """What is printed is compared; where it is may also be said on standard error, as loggers and progress bars do."""
    printed = streams[0].new_lines()
    life.lines += printed
    for line in [*printed, *streams[1].new_lines()]:
        at = marks.of(line)
        if at is None:
            continue
        life.last_mark_s = time.monotonic() - began
        if life.first_mark_s is None:
            life.first_mark_s, life.first_mark = life.last_mark_s, at
        life.furthest = max(life.furthest, at)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """What it started and left behind ends with it, a moment later: workers of a loader see by themselves that it is gone."""
    if process.poll() is None:
        process.kill()
    process.wait()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
