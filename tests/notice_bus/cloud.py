"""A metadata service on loopback that answers as a test says, and a listener that keeps what it heard."""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sublet.core.notice import Notice
from sublet.ports.notices import NoticeSource
from sublet.processes.clock import HostClock

CLOCK = HostClock()


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes = b""


@dataclass(frozen=True)
class Said:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    date: float | None = None  # the service's calendar, if not ours; -1 for none
    raw: bytes | None = None  # instead of anything HTTP


class Cloud:
    """`answer` may be changed at any time, and may block."""

    def __init__(self, answer: Callable[[Asked], Said], trust: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.over = threading.Event()
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def _any(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                asked = Asked(
                    self.command,
                    self.path,
                    {k.lower(): v for k, v in self.headers.items()},
                    self.rfile.read(length),
                )
                cloud.asked.append(asked)
                said = cloud.answer(asked)
                with contextlib.suppress(OSError):
                    if said.raw is not None:
                        self.wfile.write(said.raw)
                        return
                    self.send_response_only(said.status)
                    if said.date != -1:
                        self.send_header("Date", formatdate(said.date or time.time(), usegmt=True))
                    for name, value in said.headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(said.body)))
                    self.end_headers()
                    self.wfile.write(said.body)

            do_GET = do_PUT = do_POST = _any

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        scheme = "http"
        if trust is not None:
            self._server.socket = trust.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.base = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def paths(self) -> list[str]:
        return [asked.path for asked in list(self.asked)]

    def hang(self, _: Asked) -> Said:
        """Until the test is over."""
        self.over.wait(20)
        return Said(500)

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Listener:
    """Runs a source's `watch` and keeps what it raised, with when."""

    def __init__(self, source: NoticeSource) -> None:
        self.source = source
        self.heard: list[tuple[float, Notice]] = []
        self.failure: BaseException | None = None
        self.stop = threading.Event()
        self._more = threading.Condition()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.source.watch(self._raised, self.stop)
        except BaseException as e:
            self.failure = e

    def _raised(self, notice: Notice) -> None:
        with self._more:
            self.heard.append((time.monotonic(), notice))
            self._more.notify_all()

    def first(self, seconds: float = 10.0) -> Notice:
        with self._more:
            assert self._more.wait_for(lambda: self.heard, seconds), f"nothing was heard; {self.failure!r}"
        return self.heard[0][1]

    def nearest(self) -> Notice:
        return min((notice for _, notice in self.heard), key=lambda n: n.deadline_us)

    def close(self) -> None:
        self.stop.set()
        self.thread.join(5)
        assert not self.thread.is_alive(), "the watch did not stop"
        assert self.failure is None, self.failure


@contextlib.contextmanager
def serving(answer: Callable[[Asked], Said], trust: ssl.SSLContext | None = None) -> Iterator[Cloud]:
    cloud = Cloud(answer, trust)
    try:
        yield cloud
    finally:
        cloud.close()


@contextlib.contextmanager
def listening(source: NoticeSource) -> Iterator[Listener]:
    listener = Listener(source)
    try:
        yield listener
    finally:
        listener.close()


def seconds_left(notice: Notice) -> float:
    return (notice.deadline_us - CLOCK.monotonic_us()) / 1e6
