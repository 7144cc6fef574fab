from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.queues.brokers.servers import Places


@pytest.fixture(scope="session")
def places() -> Iterator[Places]:
    running = Places()
    try:
        yield running
    finally:
        running.close()
