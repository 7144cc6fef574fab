"""Requests nobody would think of, made from the service's own description: it never fails, never says what it
should not, changes nobody else's rows. SUBLET_FUZZ_REQUESTS says how many; `make proof` says more."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from sublet.studio.edge.app import description, make_routes
from sublet.studio.routes.calls import FRAMES_TYPE
from tests.conftest import needed
from tests.ledger.rig import Rig
from tests.studio.edge.test_wire import check_shape
from tests.studio.running import Running, add_session, give_lease

schemathesis = needed("schemathesis")
from schemathesis import GenerationMode  # noqa: E402

REQUESTS = int(os.environ.get("SUBLET_FUZZ_REQUESTS", "400"))
SEED = int(os.environ.get("SUBLET_FUZZ_SEED", "8"))
#: Of one route and kind, before the next one's turn.
EACH = 12
#: Endless by nature; it has tests of its own.
LEFT_OUT = {"/v1/events"}
OPERATORS = ("/v1/leases/{lease_id}/revoke", "/v1/tenants", "/v1/prices")


def operations(studio: Running) -> list[Any]:
    described = description(make_routes(studio.service))
    for item in described["paths"].values():
        for operation in item.values():
            operation["security"] = []  # who asks is the test's to choose
            content = operation.get("requestBody", {}).get("content", {})
            if FRAMES_TYPE in content:
                content["application/octet-stream"] = content.pop(FRAMES_TYPE)  # bytes that are no frames
    schema = schemathesis.openapi.from_dict(described)
    found = [result.ok() for result in schema.get_all_operations()]
    return [operation for operation in found if operation.path not in LEFT_OUT]


@pytest.mark.timeout(3600)
def test_whatever_is_asked(studio_here: Running, sqlite: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.studio.routes.sessions.WAIT_MOST_SECONDS", 0.05)
    studio = studio_here
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for name in ("ann", "bob"):
        studio.token(name)
    mine, theirs = add_session(studio.ledger, "ann", checkpoint="mine"), add_session(studio.ledger, "bob")
    give_lease(studio.ledger, mine, "ann")
    theirs_lease = give_lease(studio.ledger, theirs, "bob")
    before = rows_of(sqlite, "bob")
    every = operations(studio)
    assert len(every) > 40
    sent: dict[int, int] = {}
    real = {
        "session_id": [mine, theirs],
        "lease_id": [theirs_lease],
        "device_id": ["node-a-gpu0"],
        "name": ["ann", "mine"],
    }

    def check(case: Any, token: str) -> None:
        for name, values in real.items():
            if name in (case.path_parameters or {}) and rng.random() < 0.5:
                case.path_parameters[name] = rng.choice(values)
        answer = case.call(
            base_url=studio.url, headers={"Authorization": f"Bearer {token}"} if token else {}, timeout=30
        )
        sent[answer.status_code] = sent.get(answer.status_code, 0) + 1
        headers = {k.lower(): v[0] if isinstance(v, list) else v for k, v in answer.headers.items()}
        # 503: nobody attends these sessions.
        assert answer.status_code < 500 or answer.status_code == 503, (
            case.method,
            case.path,
            answer.content[:300],
        )
        assert "x-request-id" in headers or answer.status_code == 400
        if answer.status_code >= 400 and case.method != "HEAD":
            check_shape(answer.content, headers)
        assert not token or answer.status_code != 401

    left = [
        (operation, mode)
        for operation in every
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    ]
    round_seed = SEED
    while sum(sent.values()) < REQUESTS:
        round_seed += 1
        for operation, mode in list(left):
            token = rng.choice([studio.token("ann")] * 6 + [studio.operator] * 2 + [""])
            if operation.path.startswith(OPERATORS):
                token = studio.token("ann")  # an operator may, and then bob's rows would change
            if not ran(operation, mode, round_seed, lambda case, token=token: check(case, token)):
                left.remove((operation, mode))
            if sum(sent.values()) >= REQUESTS:
                break
    print(sum(sent.values()), "requests:", dict(sorted(sent.items())))
    assert (
        sum(n for status, n in sent.items() if status < 300) > REQUESTS / 20
    )  # some of it is what a client would send
    assert rows_of(sqlite, "bob") == before
    assert sqlite.faults() == []
    assert studio.ask("GET", "/healthz").status == 200
    assert '"what":"internal"' not in studio.log()


def ran(operation: Any, mode: Any, number: int, check: Any) -> bool:
    """False for what cannot be asked wrongly, because it takes nothing."""

    @seed(number)
    @settings(
        max_examples=EACH,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        check(case)

    try:
        run()
    except Unsatisfiable:
        return False
    return True


def rows_of(rig: Rig, tenant: str) -> dict[str, list[Any]]:
    """Everything there is of a tenant, but for its clock."""
    return {
        "sessions": rig.sql(
            "SELECT id, lease_id, ended_at, version, calls FROM studio_session WHERE tenant = ?", tenant
        ),
        "leases": rig.sql(
            "SELECT id, state, epoch, expires_at, deadline_at FROM lease WHERE tenant = ?", tenant
        ),
        "tokens": rig.sql("SELECT id, revoked_at, expires_at FROM token WHERE tenant = ?", tenant),
        "tenant": rig.sql("SELECT name, weight, max_leases FROM tenant WHERE name = ?", tenant),
    }
