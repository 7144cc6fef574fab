"""Attacks over HTTP, with a token of one's own: other tenants' objects, operators' routes, names that are paths.

Each is one request. The judge looks for what must not come; its control is the same request by whoever it
belongs to.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Facts = Mapping[str, Any]
NEIGHBOUR, INTRUDER, OPERATOR = "red-neighbour", "red-intruder", "red-operator"


@dataclass(frozen=True)
class Said:
    status: int
    body: str

    @property
    def fine(self) -> bool:
        return 200 <= self.status < 300


def ask(
    port: int,
    method: str,
    path: str,
    token: str = "",
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    source: str = "127.0.0.1",
) -> Said:
    """An answer's beginning: a stream is not waited for."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30, source_address=(source, 0))
    try:
        own = dict(headers or {})
        if token:
            own["Authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            own["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        elif method in ("POST", "PUT"):
            data = b""
        connection.request(method, path, data, own)
        said = connection.getresponse()
        if "event-stream" in (said.getheader("Content-Type") or ""):
            found = b""
            while len(found) < 4096 and (line := said.readline()):
                found += line
                if b"data:" in line:
                    break
            return Said(said.status, found.decode(errors="replace"))
        return Said(said.status, said.read(1 << 20).decode(errors="replace"))
    finally:
        connection.close()


@dataclass(frozen=True)
class HttpAttack:
    name: str
    sentence: str
    method: str
    path: str
    body: Any = None
    marker: str = ""  # of the facts: what must be in the answer to call it a success
    owner: str = "neighbour"  # whose token succeeds with it
    headers: Mapping[str, str] | None = None
    #: What the owner asks instead, where the attack is in how it is asked.
    control: Callable[[Facts], tuple[str, str, Any]] | None = None
    needs_session: bool = False
    also: int = 0  # a status that is a success too

    def tried(self, facts: Facts, token: str, *, as_owner: bool = False) -> str:
        method, path, body = self.method, self.path, self.body
        if as_owner and self.control is not None:
            method, path, body = self.control(facts)
        said = ask(facts["port"], method, path.format(**facts), token, _filled(body, facts), self.headers)
        marked = not self.marker or str(facts[self.marker]) in said.body
        succeeded = (said.fine and marked) or said.status == self.also
        return f"{said.status}: {said.body[:120]}" if succeeded else ""


def _filled(body: Any, facts: Facts) -> Any:
    if isinstance(body, dict):
        return {k: v.format(**facts) if isinstance(v, str) else v for k, v in body.items()}
    return body


def _object(
    name: str, sentence: str, method: str, path: str, body: Any = None, marker: str = ""
) -> HttpAttack:
    return HttpAttack(name, sentence, method, path, body, marker, needs_session=True)


_SESSION = "/v1/sessions/{session}"
HTTP_ATTACKS = (
    _object("session looked at", "look at another tenant's session by its id", "GET", _SESSION),
    _object("session kept", "keep another tenant's session alive", "POST", f"{_SESSION}/touch"),
    _object("state read", "read what another tenant's session saved", "GET", f"{_SESSION}/state"),
    _object(
        "call attached",
        "listen to another tenant's call",
        "POST",
        f"{_SESSION}/calls?call={{call}}",
        None,
        "output",
    ),
    _object("code run", "run code in another tenant's session", "POST", f"{_SESSION}/run", {"code": "1"}),
    HttpAttack(
        "code stopped",
        "stop what runs in another's session",
        "POST",
        f"{_SESSION}/interrupt",
        needs_session=True,
        also=409,  # it was let through: nothing runs
    ),
    _object("lease looked at", "look at another tenant's lease", "GET", "/v1/leases/{lease}"),
    _object("checkpoint read", "read a checkpoint by its name", "GET", "/v1/checkpoints/{checkpoint}"),
    _object("sessions listed", "find another's session in the list", "GET", "/v1/sessions", None, "session"),
    _object("leases listed", "find another's lease in the list", "GET", "/v1/leases", None, "lease"),
    _object("checkpoints listed", "find another's checkpoint", "GET", "/v1/checkpoints", None, "checkpoint"),
    _object("jobs listed", "find another's job", "GET", "/v1/jobs", None, "checkpoint"),
    _object("timeline", "find another's lease on the devices", "GET", "/v1/timeline", None, "lease"),
    _object("dashboard", "find another's session in the snapshot", "GET", "/v1/dashboard", None, "session"),
    _object("usage", "find what another used", "GET", "/v1/usage", None, "tenant"),
    _object("events", "hear of another's leases as they happen", "GET", "/v1/events?after=0", None, "tenant"),
    HttpAttack(
        "who am I",
        "pass for another by a header",
        "GET",
        "/v1/me",
        None,
        "tenant",
        headers={"X-Tenant": NEIGHBOUR, "X-Forwarded-User": NEIGHBOUR, "X-Sublet-Tenant": NEIGHBOUR},
    ),
    HttpAttack("tenants listed", "list every tenant", "GET", "/v1/tenants", owner="operator"),
    HttpAttack("tenant added", "add a tenant", "POST", "/v1/tenants", {"name": "extra{n}"}, owner="operator"),
    HttpAttack(
        "own quota raised",
        "raise one's own weight",
        "PATCH",
        "/v1/tenants/{own}",
        {"weight": 1},
        owner="operator",
    ),
    HttpAttack(
        "price set",
        "make everything cheap",
        "PUT",
        "/v1/prices",
        {"device_class": "host", "per_gpu_hour": "1.00"},
        owner="operator",
    ),
    HttpAttack("prices listed", "read the price list", "GET", "/v1/prices", owner="operator"),
    HttpAttack("neighbours", "learn who has more than its share", "GET", "/v1/neighbours", owner="operator"),
    HttpAttack("metrics", "read the service's counters", "GET", "/metrics", owner="operator"),
    HttpAttack(
        "device drained",
        "take a device out of service",
        "POST",
        "/v1/devices/{device}/drain",
        owner="operator",
    ),
    HttpAttack(
        "device cleared",
        "put a device back",
        "POST",
        "/v1/devices/{device}/clear",
        owner="operator",
        control=lambda facts: ("GET", "/v1/tenants", None),
    ),
    HttpAttack(
        "token in the address",
        "give another's token where logs keep it",
        "GET",
        "/v1/me?token={token}",
        None,
        "tenant",
    ),
    HttpAttack(
        "tenant in the body",
        "open a session in another's name",
        "POST",
        "/v1/sessions",
        {"vram": "64MiB", "tenant": "{tenant}", "id": "S{n}"},
        control=lambda facts: ("POST", "/v1/sessions", {"vram": "64MiB", "id": "S{n}"}),
    ),
    HttpAttack(
        "path as a checkpoint",
        "climb from a checkpoint's name to another tenant's",
        "GET",
        "/v1/checkpoints/..%2F..%2F{tenant}%2F{checkpoint}",
        needs_session=True,
        control=lambda facts: ("GET", "/v1/checkpoints/{checkpoint}", None),
    ),
    HttpAttack(
        "path as a page",
        "climb from a page's name to a file",
        "GET",
        "/page/..%2F..%2F..%2F..%2Fetc%2Fpasswd",
        control=lambda facts: ("GET", "/", None),
    ),
    HttpAttack(
        "path as a session",
        "climb from a session's id",
        "GET",
        "/v1/sessions/..%2Ftenants",
        owner="operator",
        control=lambda facts: ("GET", "/v1/tenants", None),
    ),
    HttpAttack(
        "name that is a path",
        "open a session whose checkpoint is a path",
        "POST",
        "/v1/sessions",
        {"vram": "64MiB", "checkpoint": "../../{tenant}/x"},
        control=lambda facts: (
            "POST",
            "/v1/sessions",
            {"vram": "64MiB", "checkpoint": "plain"},
        ),
    ),
    HttpAttack(
        "tenant's name that is a path",
        "look at another tenant by a path",
        "GET",
        "/v1/queues/..%2Ftenants",
        owner="operator",
        control=lambda facts: ("GET", "/v1/queues", None),
    ),
    _object("session ended", "end another tenant's session", "DELETE", _SESSION),
)
