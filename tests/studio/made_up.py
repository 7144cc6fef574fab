"""A service that only answers: dashboards no ledger would easily hold (500 leases, hostile texts), and cuts
on demand.

Rules of this file:
- It speaks the page's part of the HTTP interface and decides nothing. Whatever a real service can show is
  tested with a real one.
- It listens on the loopback, with the page's real files and the policy they must live with.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.forked import SOURCE

PAGE = SOURCE / "sublet" / "studio" / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TOKEN = "sublet_0123456789abcdef_" + "ab" * 32
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
GIB = 2**30


class MadeUp:
    """What the service says, and what it was told."""

    def __init__(self, dashboard: dict[str, Any]) -> None:
        self.dashboard = dashboard
        self.told: list[tuple[str, str, Any]] = []
        self.streams: list[str] = []  # Last-Event-ID of each that was opened
        self.dashboards = 0
        self.refuse = False
        self.port = 0
        self._changed = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        service = self

        class Handler(_Handler):
            made_up = service

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """As a crash: streams end in the middle."""
        server, self._server = self._server, None
        assert server is not None
        with self._changed:
            self._changed.notify_all()
        server.shutdown()
        server.server_close()

    def happened(self, kind: str = "lease.granted") -> None:
        with self._changed:
            self.dashboard["id"] += 1
            self.dashboard["at"] = time.time()
            event = {
                "id": self.dashboard["id"],
                "at": time.time(),
                "kind": kind,
                "tenant": "",
                "subject": "",
                "body": {},
            }
            self._events.append(event)
            self._changed.notify_all()

    def follow(self, after: int) -> Iterator[bytes]:
        mine = self._server
        while self._server is mine:
            with self._changed:
                found = [e for e in self._events if e["id"] > after]
                if not found:
                    self._changed.wait(0.5)
            for event in found:
                after = event["id"]
                noun = event["kind"].partition(".")[0]
                yield f"id: {after}\nevent: {noun}\ndata: {json.dumps(event)}\n\n".encode()
            if not found:
                yield b": beat\n\n"


class _Handler(BaseHTTPRequestHandler):
    made_up: MadeUp
    protocol_version = "HTTP/1.0"  # a stream ends with its connection

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/" or path.startswith("/page/"):
            file = PAGE / ("index.html" if path == "/" else path.removeprefix("/page/"))
            if not file.is_file() or file.parent != PAGE:
                self.send_error(404)
                return
            self._answer(200, file.read_bytes(), TYPES[file.suffix], policy=True)
        elif not self._let_in():
            pass
        elif path == "/v1/me":
            self._json(200, self.made_up.dashboard["me"])
        elif path == "/v1/dashboard":
            self.made_up.dashboards += 1
            self._json(200, self.made_up.dashboard | {"at": time.time()})
        elif path == "/v1/usage":
            self._json(200, {"rows": []})
        elif path == "/v1/neighbours":
            self._json(200, {"neighbours": self.made_up.dashboard["neighbours"]})
        elif path == "/v1/events":
            self._stream()
        else:
            self._refused(404, "not_found", "there is nothing at this address")

    def _stream(self) -> None:
        last = self.headers.get("Last-Event-ID", "")
        self.made_up.streams.append(last)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(OSError):
            for piece in self.made_up.follow(int(last or 0)):
                self.wfile.write(piece)

    def do_POST(self) -> None:
        self._change()

    do_DELETE = do_PATCH = do_POST

    def _change(self) -> None:
        if not self._let_in():
            return
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.made_up.told.append((self.command, self.path, body))
        if self.made_up.refuse:
            self._refused(
                409, "stale", "<img src=x onerror=alert(1)> it has changed meanwhile; nothing was done"
            )
        else:
            self._json(200, (self.made_up.dashboard["sessions"] or [{}])[0])

    def _let_in(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._refused(401, "unauthorized", "the token is not known")
        return False

    def _refused(self, status: int, code: str, message: str) -> None:
        self._json(
            status, {"code": code, "message": message, "remedy": "look again, then try again", "id": "r1"}
        )

    def _json(self, status: int, value: Any) -> None:
        self._answer(status, json.dumps(value).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str, *, policy: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY if policy else "default-src 'none'")
        self.end_headers()
        self.wfile.write(body)


def a_dashboard(
    *, leases: int = 6, devices: int = 2, operator: bool = True, words: str = ""
) -> dict[str, Any]:
    """A studio in the middle of its day; `words` stands wherever a text of somebody's may stand."""
    now = time.time()
    tenants = [words or name for name in ("ada", "ben", "cleo", "dmitri", "eve")]
    tiers = ("interactive", "batch", "spot")
    each = max(1, -(-leases // devices))
    rows = []
    for i in range(leases):
        state = "revoking" if i % 50 == 49 else "active"
        rows.append(
            {
                "id": f"L{i:020x}",
                "tenant": tenants[i % 5],
                "state": state,
                "reason": "revoked" if state == "revoking" else None,
                "detail": words or ("maintenance at noon" if state == "revoking" else f"idle for {i % 60}s"),
                "tier": tiers[i % 3],
                "exclusivity": "shared",
                "vram_bytes": GIB,
                "asked_bytes": GIB,
                "count": 1,
                "devices": [f"lab1-gpu{i % devices}"],
                "job": words or f"studio/{tenants[i % 5]}/resnet-{i}",
                "joined_at": now - 60 - i,
                "granted_at": now - 55 - i % 3000,
                "ends_at": now + 30 + i,
                "expires_at": now + 30 + i,
                "session_id": f"S{i:020x}",
            }
        )
    sessions = [_session(row, i, now, words) for i, row in enumerate(rows)]
    if sessions:
        sessions += _waiting_ones(sessions[0], now, words)
    return {
        "at": now,
        "id": 1000,
        "me": {"tenant": tenants[0], "scope": "operator" if operator else "user", "weight": 100},
        "devices": [
            {
                "id": f"lab1-gpu{d}",
                "class": words or "NVIDIA A100-SXM4-80GB",
                "host": "lab1",
                "capacity_bytes": (each + 4) * GIB,
                "free_bytes": (each + 4) * GIB - sum(GIB for r in rows if r["devices"] == [f"lab1-gpu{d}"]),
                "state": "quarantined" if d == 1 else "ready",
                "note": (words or "teardown of lease L7 was not proven") if d == 1 else "",
                "leases": [
                    {name: r[name] for name in ("id", "tenant", "tier", "state", "vram_bytes")}
                    for r in rows
                    if r["devices"] == [f"lab1-gpu{d}"]
                ],
            }
            for d in range(devices)
        ],
        "leases": rows,
        "sessions": sessions,
        "waitlist": [
            {
                "lease_id": f"Lwait{i}",
                "tenant": tenants[i],
                "tier": "batch",
                "vram_bytes": 4 * GIB,
                "position": i + 1,
                "eta_seconds": 90.0 if i else None,
                "reason": words or "no device has 4 GiB free; ada's lease ends first",
                "joined_at": now - 20,
            }
            for i in range(2)
        ],
        "timeline": [
            {
                "lease_id": r["id"],
                "tenant": r["tenant"],
                "device": r["devices"][0],
                "from": r["granted_at"],
                "to": None if i % 4 else min(now, r["granted_at"] + 50),
                "tier": r["tier"],
                "state": r["state"] if i % 4 else "ended",
                "reason": "" if i % 4 else ("preempted" if i % 8 else "released"),
                "detail": words or ("" if i % 4 else "somebody more important came"),
            }
            for i, r in enumerate(rows)
        ],
        "tenants": [
            {
                "name": name,
                "gpu_seconds": 1234.5 * (i + 1),
                "cost": f"{i}.8573",
                "live": i,
                "waiting": 0,
                "weight": 100,
                "quotas": {"max_leases": i, "max_vram_bytes": 32 * GIB, "gpu_seconds_per_day": 7200.0},
            }
            for i, name in enumerate(dict.fromkeys(tenants))
        ],
        "neighbours": [
            {
                "tenant": name,
                "held_share": 0.6 - i / 10,
                "fair_share": 0.2,
                "waited_seconds": 3.0,
                "caused_wait_seconds": 40.0,
                "calls": 12,
                "errors": i,
                "noisy": i == 0,
                "reason": words or ("" if i else "others waited 40s while it held 60 %"),
            }
            for i, name in enumerate(dict.fromkeys(tenants))
        ],
        "jobs": [
            {
                "job": words or "spot-resnet",
                "tenant": tenants[0],
                "goodput": 0.93,
                "step": 1200,
                "version": 7,
                "committed_at": now - 5,
            }
        ],
        "queues": [
            {
                "name": words or "prompts",
                "ready": 12,
                "delayed": 0,
                "leased": 3,
                "done": 900,
                "dead": 1,
                "paused": False,
            }
        ],
        "quarantine": [
            {
                "id": "lab1-gpu1",
                "state": "quarantined",
                "capacity_bytes": 80 * GIB,
                "note": words or "not proven",
            }
        ],
        "receipts": [
            {
                "lease_id": f"Lend{i}",
                "tenant": tenants[i],
                "devices": ["lab1-gpu0"],
                "settled_at": now - 10 * i,
                "proven": i != 1,
                "ladder": ("term", "kill")[i % 2],
                "containment": "cgroup",
                "freed_bytes": GIB,
                "scrubbed_bytes": GIB,
                "duration_seconds": 0.042,
                "detail": words or "",
            }
            for i in range(3)
        ],
    }


def _session(row: dict[str, Any], number: int, now: float, words: str) -> dict[str, Any]:
    return {
        "id": row["session_id"],
        "name": words or (f"notebook {number}" if number % 2 else ""),
        "tenant": row["tenant"],
        "status": row["state"],
        "reason": row["reason"],
        "detail": row["detail"],
        "vram_bytes": GIB,
        "granted_bytes": GIB,
        "count": 1,
        "tier": row["tier"],
        "ttl_seconds": 300.0,
        "warm_seconds": 300.0,
        "checkpoint": words,
        "lease_id": row["id"],
        "epoch": number,
        "devices": row["devices"],
        "host": "lab1",
        "opened_at": row["joined_at"],
        "active_at": now,
        "expires_at": row["expires_at"],
        "wait": None,
        "offer": None,
        "usage": {
            "gpu_seconds": 1.5,
            "cost": "0.0123",
            "wait_seconds": 0.2,
            "launches": 3,
            "errors": 0,
            "calls": 2,
            "leases": 1,
        },
        "version": 1,
    }


def _waiting_ones(like: dict[str, Any], now: float, words: str) -> list[dict[str, Any]]:
    empty = {"lease_id": "", "devices": [], "granted_bytes": 0, "expires_at": None}
    offer = {
        "vram_bytes": GIB // 2,
        "until": now + 45,
        "price_per_hour": "2.50",
        "preemption_odds": 0.12,
        "sentence": words or "512 MiB now, or 4 GiB in about 4 m",
    }
    wait = {"position": 2, "eta_seconds": 240.0, "reason": words or "no device has 4 GiB free"}
    return [
        like | empty | {"id": "Swaiting", "status": "waiting", "vram_bytes": 4 * GIB, "wait": wait},
        like
        | empty
        | {"id": "Soffered", "status": "offered", "vram_bytes": 4 * GIB, "offer": offer, "wait": wait},
        like
        | empty
        | {
            "id": "Ssuspended",
            "status": "suspended",
            "reason": "preempted",
            "detail": words or "batch had to go",
        },
    ]
