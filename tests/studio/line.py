"""One operation on a session host's socket, as the service makes it."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sublet.core.studio import frames as framing
from sublet.settings import Settings
from sublet.studio.holder import finding


@dataclass
class Heard:
    """What came of a call."""

    frames: list[tuple[int, bytes]] = field(default_factory=list)
    read: int = 0  # bytes that count in offsets

    def text(self, kind: int = framing.OUT) -> str:
        return b"".join(data for k, data in self.frames if k == kind).decode()

    @property
    def shown(self) -> list[dict[str, Any]]:
        return [json.loads(data) for kind, data in self.frames if kind == framing.SHOW]

    @property
    def done(self) -> dict[str, Any]:
        return next(framing.read_head(data) for kind, data in self.frames if kind == framing.DONE)

    @property
    def failed(self) -> dict[str, Any]:
        return next(framing.read_head(data) for kind, data in self.frames if kind == framing.FAIL)

    @property
    def parts(self) -> list[bytes]:
        return [data for kind, data in self.frames if kind == framing.PART]


class Line:
    def __init__(self, settings: Settings, head: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
        self.sock: socket.socket = finding.connected(settings, timeout=120)
        self._reader = framing.FrameReader(framing.ANSWER_KINDS)
        self.heard = Heard()
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # refused before it was whole: why can be read
            for piece in framing.message(framing.HEAD, head, parts):
                self.sock.sendall(piece)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        while True:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return  # it was refused, and gone before it had read all: what it said came first
            if not data:
                return
            for kind, payload in self._reader.feed(data):
                if kind not in (framing.BEAT, framing.GAP):
                    self.heard.read += framing.HEADER.size + len(payload)
                self.heard.frames.append((kind, payload))
                yield kind, payload

    def all(self) -> Heard:
        for _ in self.frames():
            pass
        self.sock.close()
        return self.heard


def code(settings: Settings, session: str, text: str, *, tenant: str = "ann", call: str = "") -> Line:
    head = {
        "op": "call",
        "session": session,
        "tenant": tenant,
        "call": call or secrets.token_hex(8),
        "target": "code",
    }
    body = json.dumps({"code": text, "name": "<cell>"}).encode()
    return Line(settings, head, [body])


def attach(settings: Settings, session: str, call: str, after: int = 0, tenant: str = "ann") -> Line:
    return Line(
        settings,
        {"op": "call", "session": session, "tenant": tenant, "call": call, "after": after, "attach": True},
    )


def ask(settings: Settings, parts: Sequence[bytes] = (), **head: Any) -> Heard:
    return Line(settings, head, parts).all()
