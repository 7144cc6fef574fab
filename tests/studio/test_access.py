"""Who may do what: by enumeration of everything there is, and not by a list somebody keeps."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from sublet.core.errors import InvariantBroken
from sublet.core.studio.token import Scope
from sublet.studio.edge.app import description, make_routes
from sublet.studio.edge.auth import Access, StudioRoute, terms_of
from sublet.studio.tokens import new_token
from tests.homes import wait_until
from tests.ledger.rig import Rig
from tests.studio.running import Running, add_session, give_lease

OPEN_TO_ALL = {"/healthz", "/readyz", "/metrics", "/openapi.json", "/", "/page/{name}"}
OPERATORS = {
    ("POST", "/v1/leases/{lease_id}/revoke"),
    ("POST", "/v1/devices/{device_id}/drain"),
    ("POST", "/v1/devices/{device_id}/quarantine"),
    ("POST", "/v1/devices/{device_id}/clear"),
    ("GET", "/v1/tenants"),
    ("POST", "/v1/tenants"),
    ("PATCH", "/v1/tenants/{name}"),
    ("GET", "/v1/neighbours"),
    ("GET", "/v1/prices"),
    ("PUT", "/v1/prices"),
    ("DELETE", "/v1/prices"),
}
FILLING = {"number": "1", "call": "c1", "name": "x"}


def every_route(studio: Running) -> list[tuple[str, str, Access]]:
    app = make_routes(studio.service)
    return [
        (method, route.path_format, terms_of(route.endpoint).opens)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    ]


def filled(path: str, **values: str) -> str:
    return re.sub(r"{(\w+)}", lambda m: {**FILLING, **values}.get(m[1], "x"), path)


def body_for(method: str, path: str) -> dict[str, Any]:
    """A body each route accepts, so that only who asks can be wrong."""
    if path == "/v1/sessions" and method == "POST":
        return {"body": {"vram": "1GB"}}
    if path.endswith("/run"):
        return {"body": {"code": "1"}}
    if path == "/v1/tenants":
        return {"body": {"name": "newone"}} if method == "POST" else {}
    if path == "/v1/tenants/{name}":
        return {"body": {"weight": 5}}
    if path == "/v1/prices" and method == "PUT":
        return {"body": {"device_class": "host", "per_gpu_hour": "1.00"}}
    return {"raw": b""} if method in ("POST", "PUT") else {}


def query_for(method: str, path: str) -> str:
    if path.endswith("/calls"):
        return "?call=c1"
    return "?device_class=host" if (method, path) == ("DELETE", "/v1/prices") else ""


def test_every_route_says_who_may_use_it(studio_here: Running) -> None:
    found = every_route(studio_here)
    assert len(found) > 40
    for method, path, opens in found:
        wanted = (
            Access.ANYBODY
            if path in OPEN_TO_ALL
            else Access.OPERATOR
            if (method, path) in OPERATORS
            else Access.USER
        )
        assert opens is wanted, (method, path)
    described = description(make_routes(studio_here.service))
    listed = {(m.upper(), p): o["x-opens"] for p, item in described["paths"].items() for m, o in item.items()}
    for method, path, opens in found:
        if path not in ("/openapi.json", "/", "/page/{name}"):
            assert listed[method, path] == opens.value
    assert not studio_here.service.embedded or json.dumps(described)


def test_a_route_without_terms_cannot_be_added(studio_here: Running) -> None:
    router = APIRouter(route_class=type("R", (StudioRoute,), {"service": studio_here.service}))
    with pytest.raises(InvariantBroken):

        @router.get("/v1/forgotten")
        async def forgotten() -> None: ...


def test_nothing_without_a_token_and_nothing_of_operators_for_users(
    studio_here: Running, sqlite: Rig
) -> None:
    session = add_session(studio_here.ledger, _tenant(studio_here, "ann"))
    user = studio_here.token("ann")
    old = sqlite.dump(without=("pool",))
    for method, path, opens in every_route(studio_here):
        if opens is Access.ANYBODY:
            continue
        address = filled(path, session_id=session) + query_for(method, path)
        said = studio_here.ask(method, address, None, **body_for(method, path))
        assert said.status == 401, (method, path, said.body)
        if opens is Access.OPERATOR:
            said = studio_here.ask(method, address, user, **body_for(method, path))
            assert (said.status, said.code) == (403, "forbidden"), (method, path, said.body)
    assert sqlite.dump(without=("pool",)) == old


def _tenant(studio: Running, name: str) -> str:
    studio.token(name)
    return name


def test_metrics_are_the_operators(studio_here: Running) -> None:
    assert studio_here.ask("GET", "/metrics").status == 401
    assert studio_here.ask("GET", "/metrics", studio_here.token("ann")).status == 403
    said = studio_here.ask("GET", "/metrics", studio_here.operator)
    assert said.status == 200
    assert b"sublet_sessions{" in said.body


def test_three_tenants_and_every_object_and_every_verb(studio: Running, rig: Rig) -> None:
    """Threat 1: of somebody else's things there is nothing: the same answer as for what never was, and no row
    is changed."""
    names = ("ann", "bob", "cleo")
    objects = {}
    for name in names:
        tenant = _tenant(studio, name)
        session = add_session(studio.ledger, tenant, checkpoint="mine", name=f"secret-of-{name}")
        objects[name] = {"session_id": session, "lease_id": give_lease(studio.ledger, session, tenant)}
    absent = {"session_id": "S" + "0" * 20, "lease_id": "L" + "0" * 20}
    routes = [
        (m, p)
        for m, p, opens in every_route(studio)
        if opens is Access.USER and ("{session_id}" in p or "{lease_id}" in p)
    ]
    assert len(routes) == 13
    before = rig.dump(without=("pool",))
    for (asking, owner), (method, path) in itertools.product(itertools.permutations(names, 2), routes):
        more = {**body_for(method, path)}
        theirs = studio.ask(
            method, filled(path, **objects[owner]) + query_for(method, path), studio.token(asking), **more
        )
        never = studio.ask(
            method, filled(path, **absent) + query_for(method, path), studio.token(asking), **more
        )
        assert theirs.status == never.status == 404, (method, path, theirs.body)
        strip = {"id"}
        assert {k: v for k, v in theirs.json.items() if k not in strip} == {
            k: v for k, v in never.json.items() if k not in strip
        }
    assert rig.dump(without=("pool",)) == before
    # Of lists, dashboards and exports: only one's own.
    lists = [
        "/v1/sessions", "/v1/sessions?open=false&tenant=bob", "/v1/leases", "/v1/leases?live=false", "/v1/waitlist", "/v1/receipts",
        "/v1/jobs", "/v1/queues", "/v1/timeline", "/v1/dashboard", "/v1/devices", "/v1/usage?by=session", "/v1/usage?by=tenant",
        "/v1/usage?by=job&format=csv", "/v1/checkpoints", "/v1/me",
    ]  # fmt: skip
    for name, path in itertools.product(names, lists):
        said = studio.ask("GET", path, studio.token(name))
        assert said.status == 200, (path, said.body)
        for other in names:
            if other != name:
                assert not any(word.encode() in said.body for word in (other, *objects[other].values())), (
                    name,
                    path,
                )
    for name in names:
        assert objects[name]["session_id"].encode() in studio.ask("GET", "/v1/sessions", studio.operator).body


def test_the_tenant_comes_from_the_token_alone(studio_here: Running, sqlite: Rig) -> None:
    """Threat 2: nothing a request says makes it somebody else's."""
    _tenant(studio_here, "bob")
    token = studio_here.token("ann")
    for extra in (
        "tenant",
        "epoch",
        "expires_at",
        "scope",
        "price",
        "admin",
        "host",
        "lease_id",
        "cost",
        "version",
        "__proto__",
    ):
        for value in ("bob", 1, True, None, {"a": 1}):
            said = studio_here.ask("POST", "/v1/sessions", token, {"vram": "1GB", extra: value})
            assert (said.status, said.code) == (422, "bad_input"), extra
    assert sqlite.sql("SELECT count(*) FROM studio_session") == [(0,)]
    headers = {"X-Tenant": "bob", "X-Forwarded-User": "bob", "Cookie": "tenant=bob"}
    said = studio_here.ask("POST", "/v1/sessions?tenant=bob", token, {"vram": "1GB"}, headers=headers)
    assert said.status == 201
    assert sqlite.sql("SELECT tenant FROM studio_session") == [("ann",)]


@pytest.mark.parametrize(
    ("method", "path", "good"),
    [
        ("POST", "/v1/sessions", {"vram": "1GB"}),
        ("POST", "/v1/tenants", {"name": "newone"}),
        ("PATCH", "/v1/tenants/ann", {"weight": 50}),
        ("PUT", "/v1/prices", {"device_class": "host", "per_gpu_hour": "2.50"}),
        ("POST", "/v1/devices/node-a-gpu0/drain", {"note": "soon"}),
    ],
)
def test_schemas_are_closed(studio_here: Running, method: str, path: str, good: dict[str, Any]) -> None:
    _tenant(studio_here, "ann")
    operator = studio_here.operator
    assert studio_here.ask(method, path, operator, {**good, "surprise": 1}).status == 422
    for name, value in good.items():
        wrong: list[Any] = [[], {}, True, 1.5, "\x07", "x" * 5000]
        wrong += ["1"] if isinstance(value, int) else []
        for bad in wrong:
            said = studio_here.ask(method, path, operator, {**good, name: bad})
            assert said.status == 422, (name, bad, said.body)
    assert studio_here.ask(method, path, operator, good).status in (200, 201)


def test_a_revoked_token_counts_at_once(studio: Running) -> None:
    token = studio.token("ann")
    assert studio.ask("GET", "/v1/me", token).status == 200
    studio.ledger.revoke_token(token.split("_")[1], actor="test")
    said = studio.ask("GET", "/v1/me", token)
    assert (said.status, said.code) == (401, "token_revoked")


def test_an_expired_token(studio_here: Running, sqlite: Rig) -> None:
    _tenant(studio_here, "ann")
    new = new_token()
    studio_here.ledger.add_token(new.id, new.digest, "ann", actor="test", lifetime_us=60_000_000)
    assert studio_here.ask("GET", "/v1/me", new.text).status == 200
    sqlite.advance(61_000_000)
    wait_until(lambda: studio_here.ask("GET", "/v1/me", new.text).status != 200)
    said = studio_here.ask("GET", "/v1/me", new.text)
    assert (said.status, said.code) == (401, "token_expired")


def test_operators_see_and_do(studio: Running) -> None:
    session = add_session(studio.ledger, _tenant(studio, "ann"))
    lease = give_lease(studio.ledger, session, "ann")
    operator = studio.operator
    assert studio.ask("GET", f"/v1/leases/{lease}", operator).json["tenant"] == "ann"
    revoked = studio.ask("POST", f"/v1/leases/{lease}/revoke", operator, {"reason": "noon", "grace": "30s"})
    assert revoked.json["state"] == "revoking"
    assert studio.ask("GET", f"/v1/sessions/{session}", studio.token("ann")).json["detail"] == "noon"
    assert (
        studio.ask("POST", "/v1/devices/node-a-gpu0/quarantine", operator, {"note": "loud"}).json["state"]
        == "quarantined"
    )
    assert studio.ask("GET", "/v1/dashboard", operator).json["quarantine"][0]["note"] == "loud"
    assert studio.ask("POST", "/v1/devices/node-a-gpu0/clear", operator).json["state"] == "ready"
    assert studio.ask("POST", "/v1/devices/nope/clear", operator).status == 404
    said = studio.ask(
        "PATCH",
        "/v1/tenants/ann",
        operator,
        {"max_vram_bytes": "32GB", "gpu_seconds_per_day": "2h", "max_sessions": 1},
    )
    assert said.json["quotas"]["max_vram_bytes"] == 32 * 10**9
    assert said.json["quotas"]["gpu_seconds_per_day"] == 7200
    full = studio.ask("POST", "/v1/sessions", studio.token("ann"), {"vram": "1GB"})
    assert (full.status, full.code) == (409, "quota_reached")
    assert studio.ask("PATCH", "/v1/tenants/nobody", operator, {"weight": 1}).status == 404
    assert (
        studio.ask("PUT", "/v1/prices", operator, {"device_class": "host", "per_gpu_hour": "2.50"}).status
        == 200
    )
    assert studio.ask("GET", "/v1/prices", operator).json["prices"][0]["per_gpu_hour"] == "2.500000"
    assert studio.ask("DELETE", "/v1/prices?device_class=host", operator).status == 200
    assert studio.ask("GET", "/v1/neighbours", operator).status == 200
    assert studio.token("ann", Scope.USER)


def test_a_removed_tenants_name_is_not_given_away(studio: Running) -> None:
    """T1: over HTTP as on the command line."""
    operator = studio.token("operator", Scope.OPERATOR)
    assert studio.ask("POST", "/v1/tenants", operator, {"name": "brief"}).status == 201
    studio.ledger.remove_tenant("brief", actor="test")
    refused = studio.ask("POST", "/v1/tenants", operator, {"name": "brief"})
    assert refused.status == 422
    assert "the name brief is reserved" in refused.json["message"]
    back = studio.ask("POST", "/v1/tenants", operator, {"name": "brief", "returning": True})
    assert back.status == 201
