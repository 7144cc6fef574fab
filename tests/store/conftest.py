"""One store per test. What it offers is in `rig.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.machine import failpoints
from tests.in_memory import in_memory
from tests.store.rig import Shelf
from tests.store.servers import Servers


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    """Three replicas on the disk."""
    made = Shelf(tmp_path)
    yield made
    made.close()


@pytest.fixture
def quick() -> Iterator[Shelf]:
    """Three replicas in memory."""
    with in_memory() as folder:
        made = Shelf(folder)
        yield made
        made.close()


@pytest.fixture(scope="session")
def object_stores() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    failpoints.disarm()
    yield
    failpoints.disarm()
