from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator

import pytest

from sublet.testing.postgres import PostgresServer
from sublet.testing.ray_cluster import PYTHON, Cluster, running
from tests.conftest import need


def _has_ray() -> bool:
    if not os.path.exists(PYTHON):
        return False
    found = subprocess.run(
        [PYTHON, "-c", "import importlib.util as u; raise SystemExit(u.find_spec('ray') is None)"],
        check=False,
        timeout=60,
    )
    return found.returncode == 0


def fresh_ledger(server: PostgresServer) -> str:
    return f"{server.url}&sublet_schema=ray_{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def with_ray() -> None:
    """A cluster takes half a minute and both cores to come up: `make proof` tries it, not `make test`."""
    if not os.environ.get("SUBLET_NODE_LOSSES"):
        pytest.skip("a cluster of Ray is a part of make proof; SUBLET_NODE_LOSSES=1 tries it here")
    need(_has_ray(), "Ray (make setup puts it into .venv/ray)")


@pytest.fixture(scope="session")
def two_nodes(with_ray: None, postgres_server: PostgresServer) -> Iterator[Cluster]:
    """The head is `z`, so that a lease goes to `a` first."""
    with running(fresh_ledger(postgres_server), {"z": "host:1x1GiB", "a": "host:1x1GiB"}) as cluster:
        yield cluster
