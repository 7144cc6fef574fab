"""What the service logs: one JSON object a line, on standard error.

Rules of this file:
- A request's line has its id, method, route template (never the path as it came), status, milliseconds and
  tenant. It has no query string, header or body, so no token can get in. Error texts are searched for tokens
  before they are written.
- JSON is ASCII: a terminal escape arrives as \\u001b and steers nothing.
- Logging never blocks the service: lines wait in a bounded list for a thread, and lines that do not fit are
  counted.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode
_TOKEN = re.compile(r"sublet_[0-9a-f]{16}_[0-9a-f]{8,}")
_DSN = re.compile(r"(://[^/\s:@]*):[^@\s]*@")
LINES_MAX = 50_000
PAUSE_SECONDS = 0.1


def scrubbed(text: str) -> str:
    """The text without tokens and passwords."""
    return _DSN.sub(r"\1:***@", _TOKEN.sub("sublet_***", text))


def to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


class ServiceLog:
    def __init__(self, write: Callable[[str], None] = to_stderr) -> None:
        self._write = write
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def request(
        self, request_id: str, method: str, route: str, status: int, seconds: float, tenant: str, address: str
    ) -> None:
        # Every part is ours, or a name whose characters were checked, so no encoder is needed: this runs for
        # every request.
        self._put(
            f'{{"at":{time.time():.3f},"level":"info","what":"request","id":"{request_id}",'
            f'"method":"{method}","route":"{route}",'
            f'"status":{status},"ms":{seconds * 1000:.1f},"tenant":"{tenant}","from":"{address}"}}\n'
        )

    def event(self, what: str, *, level: str = "info", **fields: object) -> None:
        told = {name: scrubbed(value) if isinstance(value, str) else value for name, value in fields.items()}
        self._put(_encode({"at": round(time.time(), 3), "level": level, "what": what, **told}) + "\n")

    def failure(self, what: str, error: BaseException, **fields: object) -> None:
        trace = "".join(traceback.format_exception(error))[-4000:]
        self.event(
            what, level="error", error=f"{type(error).__name__}: {error}"[:1000], trace=trace, **fields
        )

    def _put(self, line: str) -> None:
        if len(self._lines) >= LINES_MAX:
            self._dropped += 1
            return
        self._lines.append(line)

    def _run(self) -> None:
        while not self._stopped.wait(PAUSE_SECONDS):
            self.flush()

    def flush(self) -> None:
        lines: list[str] = []
        while self._lines:
            lines.append(self._lines.popleft())
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            lines.append(
                _encode(
                    {
                        "at": round(time.time(), 3),
                        "level": "warning",
                        "what": "lines dropped",
                        "count": dropped,
                    }
                )
                + "\n"
            )
        if lines:
            try:
                self._write("".join(lines))
            except (OSError, ValueError):
                pass  # nobody reads the log any more: the service goes on

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(2)
        self.flush()


class LibraryLogHandler(logging.Handler):
    """Writes what libraries log into the service's log."""

    def __init__(self, log: ServiceLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._log.failure(record.name, error, message=record.getMessage()[:500])
        else:
            self._log.event(record.name, level=record.levelname.lower(), message=record.getMessage()[:500])
