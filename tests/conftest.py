"""Shared fixtures. A missing real part skips on a laptop and fails in CI (`CI=true`)."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from sublet.testing.postgres import PostgresServer, find_binaries

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

#: Random cases of a property: this many times as many. `make proof` says more.
MORE_EXAMPLES = int(os.environ.get("SUBLET_MORE_EXAMPLES", "1"))

# How long one case takes says more about who else uses the machine than about the rule.
settings.register_profile("crowded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("crowded")


def pytest_collection_finish() -> None:
    """The tests themselves stay until the end: whatever looks for garbage, and some do for each cell they run, need not look through them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So does what the tests of a file have imported."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def need(present: bool, what: str) -> None:
    if present:
        return
    if IN_CI:
        pytest.fail(f"{what} is missing, and CI needs it")
    pytest.skip(f"{what} is missing")


def needed(module: str) -> Any:
    """The module; where it is missing, as `need` does."""
    return importlib.import_module(module) if IN_CI else pytest.importorskip(module)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        need(False, "psycopg")
    need(find_binaries() is not None, "a PostgreSQL server")
    server = PostgresServer()
    server.start()
    yield server
    server.stop()
