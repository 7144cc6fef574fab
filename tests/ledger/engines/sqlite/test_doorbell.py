"""Wake-ups by file, with inotify and where a user has no instance of it left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.ledger.engines.sqlite import doorbell


@pytest.fixture(params=["inotify", "none left"])
def bell(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[doorbell.FileBell]:
    if request.param == "none left":
        monkeypatch.setattr(doorbell._libc, "inotify_init1", lambda flags: -1)
    made = doorbell.FileBell(str(tmp_path / "bells"))
    yield made
    made.close()


def test_a_ring_wakes_whoever_listens_and_nobody_else(bell: doorbell.FileBell, tmp_path: Path) -> None:
    folder = str(tmp_path / "bells")
    bell.listen("pool")
    bell.listen("lease:a")
    assert not bell.wait(1000)
    doorbell.ring(folder, {"lease:b"})
    assert not bell.wait(50_000)
    for topic in ("pool", "lease:a", "pool"):
        time.sleep(0.02)  # longer than the file system's clock is coarse
        threading.Timer(0.05, doorbell.ring, (folder, {topic})).start()
        assert bell.wait(10_000_000), topic
        assert not bell.wait(1000), "once for each ring"
    bell.unlisten("lease:a")
    bell.wait(0)  # inotify says that it no longer watches
    doorbell.ring(folder, {"lease:a"})
    assert not bell.wait(50_000)


def test_a_ring_before_the_wait_is_not_lost(bell: doorbell.FileBell, tmp_path: Path) -> None:
    bell.listen("pool")
    time.sleep(0.02)
    doorbell.ring(str(tmp_path / "bells"), {"pool"})
    assert bell.wait(0)
