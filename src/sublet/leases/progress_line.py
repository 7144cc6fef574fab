"""The progress line of a run or a worker: where it is, what is safe, how long the lease lasts.

Rules of this file:
- On a terminal one line is drawn over and over, a few times a second; elsewhere a whole line is written now
  and then.
- Whatever the stream does, work goes on: a closed or full standard error costs the line, not the run.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import TextIO

from sublet.core.values import SECOND_US, format_duration

_REDRAW_US = SECOND_US // 8
_REPEAT_US = 30 * SECOND_US
_BAR = 16


class _Line:
    """Draws and redraws a line, whatever its text."""

    def __init__(self, out: TextIO | None, job: str) -> None:
        self._out = out
        self._job = job
        self._live = False
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no stream at all
            self._live = out is not None and out.isatty()
        self._next_at = 0
        self._drawn = 0

    @property
    def wanted(self) -> bool:
        return self._out is not None

    def due(self, now: int) -> bool:
        return self._out is not None and now >= self._next_at

    def say(self, text: str) -> None:
        """Write a message that stays, on a line of its own."""
        if self._out is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._out.write(f"{self._erased()}{self._job}: {text}\n")
            self._out.flush()

    def _draw(self, now: int, parts: list[str]) -> None:
        self._next_at = now + (_REDRAW_US if self._live else _REPEAT_US)
        self._write("  ".join(parts))

    def _write(self, line: str) -> None:
        assert self._out is not None
        with contextlib.suppress(OSError, ValueError):
            if self._live:
                line = line[: shutil.get_terminal_size().columns - 1]
                self._out.write(f"{self._erased()}{line}")
                self._drawn = len(line)
            else:
                self._out.write(f"{line}\n")
            self._out.flush()

    def _erased(self) -> str:
        erase, self._drawn = ("\r" + " " * self._drawn + "\r" if self._drawn else ""), 0
        return erase

    def close(self) -> None:
        if self._drawn and self._out is not None:
            with contextlib.suppress(OSError, ValueError):
                self._out.write("\n")
                self._out.flush()
            self._drawn = 0


def _bar(done: int, total: int) -> str:
    filled = min(_BAR, _BAR * done // total) if total else 0
    return f"[{'#' * filled}{'.' * (_BAR - filled)}]"


class ProgressLine(_Line):
    """Of a training run."""

    def show(
        self,
        now: int,
        *,
        step: int,
        total: int | None,
        committed: int,
        committed_ago_us: int | None,
        steps_per_s: float,
        goodput: float,
        lease_s: float,
        log: dict[str, float],
        notice: str = "",
    ) -> None:
        bar = f"{_bar(step, total)} {step:,}/{total:,}" if total is not None else f"step {step:,}"
        parts = [f"{self._job} {bar}"]
        parts += [f"{name} {value:.4g}" for name, value in list(log.items())[:3]]
        parts.append(f"{steps_per_s:.3g} steps/s" if steps_per_s < 1000 else f"{steps_per_s:,.0f} steps/s")
        parts.append(f"goodput {goodput:.1%}")
        safe = "nothing committed yet" if committed_ago_us is None else f"committed {committed:,}"
        if committed_ago_us is not None and committed < step:
            safe += f", {format_duration(committed_ago_us // SECOND_US * SECOND_US)} ago"
        parts.append(safe)
        if lease_s:
            parts.append(f"lease {format_duration(int(lease_s) * SECOND_US)}")
        if notice:
            parts.append(f"LEAVING: {notice}")
        self._draw(now, parts)


class WorkLine(_Line):
    """Of a worker at one queue or several: the bar is the queues', of all their workers; what is said to be
    done here is this one's."""

    def show(
        self,
        now: int,
        *,
        here: int,
        done: int,
        depth: int,
        per_s: float,
        failed: int,
        dead: int,
        refused: int,
        lease_s: float,
        doing: str = "",
    ) -> None:
        parts = [f"{self._job} {_bar(done, done + depth)} {done:,}/{done + depth:,}"]
        parts.append(f"{per_s:.3g}/s" if per_s < 1000 else f"{per_s:,.0f}/s")
        if depth and per_s:
            parts.append(f"ETA {format_duration(max(1, round(depth / per_s)) * SECOND_US)}")
        parts += [f"depth {depth:,}", f"done here {here:,}"]
        for count, word in ((failed, "failed"), (dead, "dead"), (refused, "refused")):
            if count:
                parts.append(f"{word} {count:,}")
        if lease_s:
            parts.append(f"lease {format_duration(int(lease_s) * SECOND_US)}")
        if doing:
            parts.append(doing)
        self._draw(now, parts)
