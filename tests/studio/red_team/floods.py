"""Floods of one tenant, each bounded in size and time, and what its neighbour feels meanwhile.

A flood runs in a process of its own (`python -m tests.studio.red_team.floods NAME`, its facts as JSON on
standard input): in the one that measures it would hold up the neighbour by itself.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.studio.red_team.over_http import ask

SECONDS = 4.0
_PAUSE = 0.05
#: Limits of an address are not those of a tenant: the neighbour comes from another one.
_ELSEWHERE = "127.0.0.2"


@dataclass
class Felt:
    """How long the neighbour's requests took, in seconds, and which were not answered as they must be."""

    took: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def p99(self) -> float:
        return sorted(self.took)[max(0, int(len(self.took) * 0.99) - 1)] if self.took else float("inf")


@contextmanager
def feeling(port: int, token: str, session: str) -> Iterator[Felt]:
    """The neighbour goes on with its own: a look at itself, and a line of code in its session."""
    felt, over = Felt(), threading.Event()

    def go_on() -> None:
        while not over.is_set():
            began = time.monotonic()
            try:
                me = ask(port, "GET", "/v1/me", token, source=_ELSEWHERE)
                ran = ask(
                    port,
                    "POST",
                    f"/v1/sessions/{session}/run",
                    token,
                    {"code": "print(6 * 7)"},
                    source=_ELSEWHERE,
                )
                felt.took.append(time.monotonic() - began)
                if not me.fine or '"text":"42' not in ran.body:
                    felt.wrong.append(f"{me.status} {ran.status} {ran.body[:100]}")
            except (OSError, http.client.HTTPException) as e:
                felt.wrong.append(f"{type(e).__name__}: {e}")
            over.wait(_PAUSE)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield felt
    finally:
        over.set()
        thread.join(60)


def _again(work: Callable[[], Any], threads: int, seconds: float = SECONDS) -> None:
    """By this many at once, as fast as they are answered."""
    until = time.monotonic() + seconds

    def repeat() -> None:
        while time.monotonic() < until:
            try:
                work()
            except (OSError, http.client.HTTPException):
                time.sleep(0.02)

    started = [threading.Thread(target=repeat) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60)


Facts = Mapping[str, Any]


def _opens(facts: Facts) -> None:
    body = {"vram": "64MiB", "wait": "1s"}
    _again(lambda: ask(facts["port"], "POST", "/v1/sessions", facts["token"], body), 4)


def _usage(facts: Facts) -> None:
    _again(lambda: ask(facts["port"], "GET", "/v1/usage?days=366", facts["token"]), 4)


def _refused(facts: Facts) -> None:
    _again(lambda: ask(facts["port"], "GET", "/v1/sessions", "not-a-token"), 4)


def _garbage(facts: Facts) -> None:
    def send() -> None:
        with socket.create_connection(("127.0.0.1", facts["port"]), 5) as sock:
            sock.sendall(b"\x00\xff GET / HTTP/9.9\r\n" + b"x" * 40_000 + b"\r\n\r\n")
            sock.recv(1000)

    _again(send, 4)


def _deep_json(facts: Facts) -> None:
    text = b"[" * 50_000

    def send() -> None:
        head = f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {facts['token']}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", facts["port"]), 5) as sock:
            sock.sendall(head.encode() + text)
            sock.recv(1000)

    _again(send, 4)


def _unread(facts: Facts, path: str, method: str = "GET", body: Any = None) -> socket.socket:
    """A request whose answer is never read, by a window of a few kilobytes."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", facts["port"]))
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {facts['token']}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def _streams(facts: Facts) -> None:
    with ExitStack() as stack:
        for _ in range(60):
            with contextlib.suppress(OSError):
                stack.enter_context(_unread(facts, "/v1/events?after=0"))
        time.sleep(SECONDS)


def _code(facts: Facts, code: str) -> None:
    ask(facts["port"], "POST", f"/v1/sessions/{facts['session']}/run", facts["token"], {"code": code})


def _slow_reader(facts: Facts) -> None:
    body = {"code": "for _ in range(64): print('x' * (1 << 20))"}
    with _unread(facts, f"/v1/sessions/{facts['session']}/run", "POST", body):
        time.sleep(SECONDS)
    with contextlib.suppress(OSError, http.client.HTTPException):
        ask(facts["port"], "POST", f"/v1/sessions/{facts['session']}/interrupt", facts["token"])


def _small_frames(facts: Facts) -> None:
    _code(facts, "import os\nfor _ in range(50_000): os.write(1, b'x')")


def _processors(facts: Facts) -> None:
    _code(
        facts,
        f"""
import os, signal, time
until = time.monotonic() + {SECONDS}
pids = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        while time.monotonic() < until:
            pass
        os._exit(0)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
""",
    )


#: name: (sentence, what it does)
FLOODS: dict[str, tuple[str, Callable[[Facts], None]]] = {
    "opens": ("open sessions as fast as it goes", _opens),
    "usage": ("ask for a year of usage as fast as it goes", _usage),
    "refused tokens": ("guess tokens as fast as it goes", _refused),
    "garbage": ("send what is no request", _garbage),
    "deep JSON": ("send JSON of fifty thousand levels", _deep_json),
    "streams": ("hold sixty streams of events and read none", _streams),
    "slow reader": ("print 64 MiB and read nothing of it", _slow_reader),
    "small frames": ("write fifty thousand times one byte", _small_frames),
    "processors": ("compute in eight processes", _processors),
}


if __name__ == "__main__":
    FLOODS[sys.argv[1]][1](json.load(sys.stdin))
