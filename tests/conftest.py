"""Shared fixtures. A missing real part skips on a laptop and fails in CI (`CI=true`)."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from sublet.testing.postgres import PostgresServer, find_binaries
from tests.seeds import NEW_CASES

# A server that a test starts is forked, and gRPC would ask its threads to stand still for that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

#: Fixtures that many folders use: a home with its warden, and a CUDA driver made of C.
pytest_plugins = ["tests.homes", "tests.devices.cuda_shim"]

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

#: Random cases of a property: this many times as many. `make proof` says more.
MORE_EXAMPLES = int(os.environ.get("SUBLET_MORE_EXAMPLES", "1"))

# How long one case takes says more about who else uses the machine than about the rule.
settings.register_profile(
    "crowded", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not NEW_CASES
)
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


#: What pyproject.toml installs for Python 3.11 only: with another Python even CI does without.
ONLY_FOR_3_11 = {"torch", "torchdata", "transformers", "accelerate", "lightning"}


def need(present: bool, what: str) -> None:
    if present:
        return
    if IN_CI and not (what in ONLY_FOR_3_11 and sys.version_info >= (3, 12)):
        pytest.fail(f"{what} is missing, and CI needs it")
    pytest.skip(f"{what} is missing", allow_module_level=True)


def needed(module: str) -> Any:
    """The module; where it is missing, as `need` does."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        need(False, (e.name or module).partition(".")[0])


def repository(*parts: str) -> Path:
    """A file or folder beside `tests/` in a clone. Who tries an installed wheel has only the tests."""
    path = Path(__file__).parents[1].joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{'/'.join(parts)} is in a clone only", allow_module_level=True)
    return path


def _skipped(report: Any, where: Path, error: BaseException | None) -> Any:
    """A file or test that imports what is not installed: as if it had said `needed`."""
    if isinstance(error, pytest.Collector.CollectError):
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and report.outcome == "failed":
        package = (error.name or "").partition(".")[0]
        try:
            need(package in ("sublet", "tests"), package)
        except pytest.skip.Exception as skip:
            report.outcome, report.longrepr = "skipped", (str(where), 0, f"Skipped: {skip}")
        except pytest.fail.Exception:
            pass  # as it was
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    return _skipped(report, collector.path, report.call.excinfo and report.call.excinfo.value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    return _skipped((yield), item.path, call.excinfo and call.excinfo.value)


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
