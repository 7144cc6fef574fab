"""One ledger per test, on either engine. What it offers is in `rig.py`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.ledger.schema import versions
from sublet.machine import failpoints
from tests.in_memory import in_memory
from tests.ledger.rig import ENGINES, Rig, postgres_rig, sqlite_rig


@pytest.fixture
def sqlite() -> Iterator[Rig]:
    with in_memory() as folder:
        rig = sqlite_rig(folder)
        yield rig
        rig.close()


@pytest.fixture
def postgres(postgres_server: Any) -> Iterator[Rig]:
    rig, schema = postgres_rig(postgres_server.url)
    rig.schema = schema
    yield rig
    rig.close()
    schema.hand_on()


@pytest.fixture(params=ENGINES)
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    failpoints.disarm()
    yield
    failpoints.disarm()


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_next_release(monkeypatch, tmp_path / "schema")


def make_next_release(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on the schema is that of an imagined later release, which has two migrations."""
    for engine in ("sqlite", "postgres"):
        later = folder / "migrations" / engine
        later.mkdir(parents=True)
        shutil.copy(str(versions.FOLDER / f"{engine}.sql"), folder)
        (later / "0003_note_by_text.sql").write_text("CREATE INDEX note_by_text ON note (text);")
        (later / "0002_note.sql").write_text(
            "CREATE TABLE note (text TEXT NOT NULL); ALTER TABLE head ADD COLUMN note TEXT NOT NULL DEFAULT '';"
        )
    monkeypatch.setattr(versions, "FOLDER", folder)
