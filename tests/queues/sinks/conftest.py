"""One place per test. What it offers is in `rig.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.queues.sinks.rig import BucketPlace, FolderPlace, FunctionPlace, Place, PostgresPlace, SqlitePlace
from tests.store.servers import Servers

KINDS = ("sqlite", "postgres", "sqlalchemy-sqlite", "sqlalchemy-postgres", "dir", "s3", "function")


@pytest.fixture(scope="session")
def object_stores() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def make_place(kind: str, folder: Path, request: pytest.FixtureRequest) -> Place:
    if kind == "s3":
        return BucketPlace(kind, request.getfixturevalue("object_stores")["moto"])
    if "postgres" in kind:
        return PostgresPlace(kind, request.getfixturevalue("postgres_server"))
    if kind == "dir":
        return FolderPlace(folder)
    return FunctionPlace() if kind == "function" else SqlitePlace(kind, folder)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found = make_place(request.param, tmp_path, request)
    yield found
    found.end()


@pytest.fixture
def postgres(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PostgresPlace]:
    found = make_place("postgres", tmp_path, request)
    assert isinstance(found, PostgresPlace)
    yield found
    found.end()
