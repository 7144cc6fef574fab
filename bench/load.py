"""A load generator of its own process: keep-alive connections over raw sockets, one request in flight on each.

Rules of this file:
- It does as little as it can, so that what is measured is the server: a request is bytes made once, an answer is read to its
  Content-Length and looked at only for its status.
- Told on standard input which subject and for how long; says on standard output what came of it, both as lines of JSON.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

READ_BYTES = 1 << 16


class Answers:
    """One connection: what of the current answer has come."""

    __slots__ = ("begun", "data", "missing", "sock")

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data = b""
        self.missing = -1  # not known before the headers are there
        self.begun = 0.0

    def ask(self, request: bytes) -> None:
        self.data, self.missing = b"", -1
        self.begun = time.perf_counter()
        self.sock.sendall(request)

    def whole(self) -> bool:
        found = self.sock.recv(READ_BYTES)
        if not found:
            raise ConnectionError("the server closed the connection")
        if self.missing >= 0:
            self.missing -= len(found)
            return self.missing <= 0
        self.data += found
        head, end, body = self.data.partition(b"\r\n\r\n")
        if not end:
            return False
        if not head.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(self.data[:400].decode("latin-1"))
        place = head.lower().index(b"content-length:") + 15
        self.missing = int(head[place:].split(b"\r\n", 1)[0]) - len(body)
        return self.missing <= 0


def measured(port: int, requests: list[bytes], connections: int, seconds: float) -> dict[str, object]:
    """Requests a second, and how long each took in microseconds."""
    poll = select.epoll()
    lines = [Answers(port) for _ in range(connections)]
    by_number = {line.sock.fileno(): line for line in lines}
    try:
        for number, line in enumerate(lines):
            poll.register(line.sock, select.EPOLLIN)
            line.ask(requests[number % len(requests)])
        begun, count, took = time.perf_counter(), len(lines), list[int]()
        until = begun + seconds
        while (now := time.perf_counter()) < until:
            for number, _ in poll.poll(1.0):
                line = by_number[number]
                if line.whole():
                    took.append(round((time.perf_counter() - line.begun) * 1e6))
                    line.ask(requests[count % len(requests)])
                    count += 1
        return {"rate": len(took) / (now - begun), "took_us": took}
    finally:
        poll.close()
        for line in lines:
            line.sock.close()


def main() -> None:
    for text in sys.stdin:
        asked = json.loads(text)
        requests = [request.encode("latin-1") for request in asked["requests"]]
        found = measured(asked["port"], requests, asked["connections"], asked["seconds"])
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
