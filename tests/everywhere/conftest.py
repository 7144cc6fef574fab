"""The two places. The embedded one is tried with every test run, the cluster as a part of `make proof`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.testing.postgres import PostgresServer
from sublet.testing.ray_cluster import PATIENT, PYTHON, Cluster, running
from tests.conftest import need
from tests.everywhere.place import Place, without_settings
from tests.placement.conftest import _has_ray, fresh_ledger
from tests.store.servers import Server, moto

#: The head, and two that do the work: the head of a cluster is not to be lost.
HEAD, HOSTS = "z", ("a", "b")


def has(python: str, *modules: str) -> bool:
    code = f"import importlib.util as u; raise SystemExit(not all(u.find_spec(m) for m in {modules!r}))"
    return subprocess.run([python, "-c", code], check=False, timeout=60).returncode == 0


def devices() -> str:
    """Real OpenCL on the CPU where it is installed, on a laptop and on a node alike."""
    return "opencl:all" if has(sys.executable, "pyopencl") else "host:1x4GiB"


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """SQLite, a folder, this machine's devices: nothing is set but where it lies."""
    home = tmp_path_factory.mktemp("embedded")
    environment = without_settings(os.environ) | {
        "SUBLET_HOME": str(home),
        "SUBLET_LEDGER": f"sqlite:{home}/ledger.db",
        "SUBLET_HOST": "here",
        "SUBLET_DEVICES": devices(),
        "SUBLET_PRELOAD": "none",
    }
    place = Place(sys.executable, environment)
    yield place
    place.leave()


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    with moto() as server:
        yield server


@pytest.fixture(scope="session")
def three_nodes(postgres_server: PostgresServer, s3: Server) -> Iterator[Cluster]:
    need(_has_ray(), "Ray (make setup puts it into .venv/ray)")
    need(has(PYTHON, "obstore", "IPython", "fastapi"), "what sublet needs beside Ray (make setup)")
    ledger = fresh_ledger(postgres_server)
    with running(ledger, {HEAD: "host:1x32MiB"} | dict.fromkeys(HOSTS, devices()), health=PATIENT) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def clustered(three_nodes: Cluster, s3: Server) -> Iterator[Place]:
    """PostgreSQL, S3 and three nodes of Ray: three settings, from a machine without any device."""
    environment = three_nodes.environment(SUBLET_STORE=s3.url("everywhere"), **s3.environment)
    Path(environment["SUBLET_HOME"]).mkdir(parents=True, exist_ok=True)
    place = Place(PYTHON, environment)
    yield place
    place.leave()


@pytest.fixture(scope="session", params=["embedded", "clustered"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "clustered" and not os.environ.get("SUBLET_NODE_LOSSES"):
        pytest.skip("a cluster is a part of make proof; SUBLET_NODE_LOSSES=1 tries it here")
    found: Place = request.getfixturevalue(request.param)
    return found
