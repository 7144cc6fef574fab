"""Scrub: every copy of everything that is needed is looked at, and made good if asked."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from sublet.core.checkpoints.retention import Retention
from sublet.core.errors import NotFound
from sublet.store.save.packing import digest
from tests.store.rig import JOB, Shelf, damage
from tests.store.upkeep.test_lineage import a_state, filled, versions


@pytest.fixture
def three(quick: Shelf) -> Shelf:
    for number in range(1, 4):
        quick.save(a_state(number), number - 1)
    return quick


def test_all_is_well(three: Shelf) -> None:
    three.store.fork(JOB, "fork", 1)
    before = {p: p.read_bytes() for p in three.published()}
    seen: list[tuple[str, int, int]] = []
    done = three.open().scrub(progress=lambda *told: seen.append(told))
    assert done.whole
    assert (done.found, done.left, done.unreadable) == ([], [], [])
    assert done.copies == 3 * (4 + 3)
    assert done.bytes > 3 * (1 << 20)
    assert seen[-1][1] == seen[-1][2] > 0
    assert {p: p.read_bytes() for p in three.published()} == before


def test_without_repair_nothing_is_changed(three: Shelf) -> None:
    pack, manifest, other = three.files("packs")[0], three.files("manifests")[1], three.files("manifests")[2]
    pack.write_bytes(b"x" * pack.stat().st_size)
    manifest.unlink()
    other.write_bytes(b"x")
    before = {p: p.read_bytes() for p in three.files()}
    done = three.open().scrub()
    assert {p: p.read_bytes() for p in three.files()} == before
    assert not done.whole
    assert {(c.kind, c.name, c.state) for c in done.left} == {
        ("pack", pack.stem, "bad"),
        ("manifest", manifest.stem, "missing"),
        ("manifest", other.stem, "bad"),
    }
    assert done.found == done.left


def test_what_is_bad_is_replaced(three: Shelf) -> None:
    rng = random.Random(7)
    good = {p: p.read_bytes() for p in three.published()}
    for path in three.files("packs")[:3] + three.files("manifests")[:3]:  # all of the first replica
        damage(path, rng)
    done = three.open().scrub(repair=True)
    assert len(done.found) == 6
    assert done.left == []
    assert done.whole
    assert {p: p.read_bytes() for p in three.published()} == good
    assert three.open().scrub().found == []


def test_a_pack_that_is_bad_everywhere_is_made_whole_from_its_parts(quick: Shelf) -> None:
    quick.save({"a": np.full(1 << 20, 1, np.uint8), "b": np.full(1 << 20, 2, np.uint8)}, 0)
    for number, path in enumerate(quick.files("packs")):
        data = bytearray(path.read_bytes())
        data[(1 << 20) * (number % 2)] ^= 1
        path.unlink()
        path.write_bytes(data)
    done = quick.open().scrub(repair=True)
    assert (len(done.found), done.left, done.whole) == (3, [], True)
    assert (quick.load()["a"] == 1).all()


def test_what_is_lost_is_said_and_the_rest_is_mended(three: Shelf) -> None:
    own = next(iter(set(three.store.manifest(JOB, 2).packs) - set(three.store.manifest(JOB, 1).packs)))
    for replica in three.replicas:
        replica.remove("pack", own)
    three.files("manifests")[0].unlink()
    done = three.open().scrub(repair=True)
    assert not done.whole
    assert len(done.health.lost) == 1
    assert {(c.kind, c.name) for c in done.left} == {("pack", own)}
    assert filled(three.load()) == 3
    lost = digest(three.store.manifest(JOB, 1).to_bytes())
    for replica in three.replicas:
        replica.remove("manifest", lost)
    done = three.open().scrub()
    assert not done.whole
    assert JOB in done.unreadable[0]


def test_a_version_without_a_manifest_is_not_whole(three: Shelf) -> None:
    lost = digest(three.store.manifest(JOB, 1).to_bytes())
    for replica in three.replicas:
        replica.remove("manifest", lost)
    done = three.open().scrub()
    assert (done.left, len(done.unreadable), done.whole) == ([], 1, False)


def test_a_replica_that_is_gone(three: Shelf) -> None:
    three.lose(2)
    done = three.open().scrub()
    assert {c.replica for c in done.left} == {f"dir:{three.folders[2]}"}
    three.replicas[2].check()
    assert three.open().scrub(repair=True).whole
    assert len(three.files("packs")) == 9


def test_one_job(three: Shelf) -> None:
    three.open().save("other", {"x": np.full(10, 1)}, expected_version=0, lease=three.lease)
    (pack,) = three.store.manifest("other").packs
    (three.folders[0] / "packs" / f"{pack}.pack").unlink()
    assert three.open().scrub(JOB).whole
    assert not three.open().scrub("other").whole
    assert not three.open().scrub().whole
    with pytest.raises(NotFound):
        three.open().scrub("nothing")


def test_what_was_dropped_is_nobody_s_business(three: Shelf) -> None:
    three.store.sweep(keep=Retention(last=1))
    assert versions(three) == [3]
    gone = {p.stem for p in three.files("packs")} - set(three.store.manifest(JOB).packs)
    for path in three.files("packs"):
        if path.stem in gone:
            path.write_bytes(b"")
    assert three.open().scrub().whole


def test_the_rate_is_kept(three: Shelf) -> None:
    begun = time.monotonic()
    done = three.open().scrub(bytes_per_second=8 << 20)
    took = time.monotonic() - begun
    assert took >= done.bytes / (8 << 20) * 0.95
    assert took < 60


def test_memory_stays_at_a_chunk_or_two(quick: Shelf) -> None:
    state: dict[str, Any] = {str(n): np.full(8 << 20, n, np.uint8) for n in range(8)}
    quick.save(state, 0)
    for path in quick.files("packs")[:2]:
        path.write_bytes(path.read_bytes()[:-1])
    store = quick.open()
    tracemalloc.start()
    try:
        done = store.scrub(repair=True)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(done.found), done.whole) == (2, True)
    assert most < 24 << 20
