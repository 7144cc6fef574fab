"""A tenant's storage quota as a save meets it: real states, a real ledger, and no way round it by trying again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sublet.core.checkpoints.retention import Retention
from sublet.core.errors import QuotaReached
from tests.store.rig import JOB, Shelf

MEGABYTE = 1 << 20


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path, replicas=1)
    yield shelf
    shelf.close()


def a_state(*parts: int) -> dict[str, np.ndarray]:
    """Each part is a chunk of its own: 9 MiB of one number."""
    return {f"part{n}": np.full(9 * MEGABYTE, value, np.uint8) for n, value in enumerate(parts)}


def stored(shelf: Shelf) -> int:
    return shelf.rig.ledger.stored_bytes("ada")


def limit(shelf: Shelf, size: int) -> None:
    shelf.rig.ledger.set_tenant("ada", max_storage_bytes=size, actor="op")


def on_disk(shelf: Shelf) -> int:
    return sum(path.stat().st_size for path in shelf.files("packs"))


def test_a_version_counts_with_what_the_one_before_did_not_have(shelf: Shelf) -> None:
    first = shelf.save(a_state(1, 2), 0)
    assert stored(shelf) == first.bytes_written >= 18 * MEGABYTE
    shelf.save(a_state(1, 2), 1)
    assert stored(shelf) == first.bytes_written
    other = shelf.open()  # a process that has not saved the one before
    other.save(JOB, a_state(1, 3), expected_version=2, lease=shelf.lease)
    added = stored(shelf) - first.bytes_written
    assert 9 * MEGABYTE <= added < 12 * MEGABYTE
    assert on_disk(shelf) >= stored(shelf) >= 27 * MEGABYTE


def test_a_save_over_the_quota_is_refused_however_often_it_is_tried(shelf: Shelf) -> None:
    """And nothing of what the tries wrote stays behind: nobody would be charged for it."""
    limit(shelf, 30 * MEGABYTE)
    shelf.save(a_state(1, 2), 0)
    before, files = stored(shelf), sorted(shelf.files("packs") + shelf.files("manifests"))
    for store in (shelf.store, shelf.store, shelf.open()):
        with pytest.raises(QuotaReached, match="untouched"):
            store.save(JOB, a_state(3, 4), expected_version=1, lease=shelf.lease)
        assert (shelf.version, stored(shelf)) == (1, before)
        assert sorted(shelf.files("packs") + shelf.files("manifests")) == files
    assert shelf.load()["part0"][0] == 1
    shelf.open().save(JOB, a_state(1, 5), expected_version=1, lease=shelf.lease)
    assert shelf.version == 2


def test_the_store_that_was_refused_saves_again_when_there_is_room(shelf: Shelf) -> None:
    """It knew which packs had its bytes, and they are gone."""
    limit(shelf, 30 * MEGABYTE)
    shelf.save(a_state(1, 2), 0)
    with pytest.raises(QuotaReached):
        shelf.save(a_state(3, 4), 1)
    limit(shelf, 90 * MEGABYTE)
    shelf.save(a_state(3, 4), 1)
    loaded = shelf.open().load(JOB)
    assert [loaded[part][0] for part in ("part0", "part1")] == [3, 4]


def test_a_sweep_makes_room_again(shelf: Shelf) -> None:
    limit(shelf, 60 * MEGABYTE)
    for version in range(3):
        shelf.save(a_state(2 * version, 2 * version + 1), version)
    with pytest.raises(QuotaReached):
        shelf.save(a_state(8, 9), 3)
    shelf.store.sweep(keep=Retention(last=1), older_than_us=0, nobody_is_saving=True)
    assert 18 * MEGABYTE <= stored(shelf) < 20 * MEGABYTE
    shelf.save(a_state(8, 9), 3)
    assert shelf.load()["part1"][0] == 9


def test_what_a_dropped_version_left_behind_still_counts(shelf: Shelf) -> None:
    """The version that stays needs nearly all that the dropped one was charged with."""
    for version in range(4):
        shelf.save(a_state(1, 2, 100 + version), version)
    shelf.store.sweep(keep=Retention(last=1), older_than_us=0, nobody_is_saving=True)
    assert stored(shelf) >= 27 * MEGABYTE


def test_a_fork_and_a_rollback_count_with_all_they_need(shelf: Shelf) -> None:
    shelf.save(a_state(1), 0)
    one = stored(shelf)
    shelf.save(a_state(2), 1)
    shelf.store.fork(JOB, "team/fork", 1)
    assert stored(shelf) == 3 * one
    shelf.store.rollback(JOB, 1)
    assert stored(shelf) == 4 * one
    shelf.store.sweep(keep=Retention(last=1), older_than_us=0, nobody_is_saving=True)
    assert stored(shelf) == 2 * one
