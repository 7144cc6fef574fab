"""One ledger per test, on either engine. What it offers is in `rig.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet import failpoints

from .rig import ENGINES, Rig, postgres_rig, sqlite_rig


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Rig]:
    rig = sqlite_rig(tmp_path)
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
