"""A server that says what it was told to: for what a real studio never does (redirects, nonsense, certificates of its own)."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ME = {"tenant": "ann", "scope": "user"}


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False  # hang up instead of answering
    cut_after: int = -1  # of the body


def said(value: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), headers)


def error(status: int, code: str, message: str = "no", remedy: str = "", **headers: str) -> Answer:
    return said({"code": code, "message": message, "remedy": remedy, "id": "r1"}, status, **headers)


@dataclass
class Canned:
    url: str
    asked: list[Asked]
    answers: Callable[[Asked], Answer]


@contextlib.contextmanager
def canned(answers: Callable[[Asked], Answer], *, tls: ssl.SSLContext | None = None) -> Iterator[Canned]:
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = Asked(self.command, self.path, dict(self.headers.items()), body)
            asked.append(request)
            answer = answers(request)
            if answer.cut:
                self.close_connection = True
                self.connection.close()
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if answer.cut_after >= 0:
                self.wfile.write(answer.body[: answer.cut_after])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(answer.body)

        do_GET = do_POST = do_PUT = do_DELETE = _do

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True).start()
    scheme = "https" if tls else "http"
    try:
        yield Canned(f"{scheme}://127.0.0.1:{server.server_address[1]}", asked, answers)
    finally:
        server.shutdown()
        server.server_close()
