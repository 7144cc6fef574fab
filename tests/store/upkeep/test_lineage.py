"""What lies behind a head: history, tags, rollback, fork."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from sublet.core.checkpoints import checkpoint
from sublet.core.checkpoints.retention import Retention
from sublet.core.checkpoints.versions import KeptVersion
from sublet.core.errors import (
    BadInput,
    Damaged,
    HeadMoved,
    Misconfigured,
    NotDurable,
    NotFound,
    QuorumNotReached,
)
from sublet.machine import failpoints
from sublet.machine.failpoints import FailpointHit
from sublet.store.save.packing import digest
from tests.store.rig import JOB, Shelf


def a_state(fill: int) -> dict[str, Any]:
    """1 MiB that never changes, in a chunk of its own, and a little that does."""
    return {"a": np.full(1 << 20, 7, np.uint8), "b": np.full(100, fill, np.uint8)}


def filled(state: Any) -> int:
    assert (state["a"] == 7).all()
    (value,) = set(state["b"].tolist())
    return int(value)


@pytest.fixture
def six(quick: Shelf) -> Shelf:
    for number in range(1, 7):
        quick.save(a_state(number), number - 1)
    return quick


def keep(shelf: Shelf, last: int, every: int = 0) -> None:
    """Retention alone: nothing is old enough to be deleted."""
    shelf.store.sweep(keep=Retention(last=last, every=every))


def versions(shelf: Shelf, name: str = JOB) -> list[int]:
    return [m.version for m in shelf.open().history(name)]


# --- history -------------------------------------------------------------------------------------------------


def test_history_ends_at_the_floor_and_goes_on_with_what_is_kept(six: Shelf) -> None:
    six.store.tag(JOB, 1, "first")
    keep(six, last=2, every=3)
    assert versions(six) == [6, 5, 3, 1]
    for version in (6, 5, 3, 1):
        assert filled(six.load(version=version)) == version
    assert filled(six.load(version="first")) == 1
    for gone in (2, 4, 0, 7, "second", "1"):
        with pytest.raises(NotFound):
            six.load(version=gone)
    six.save(a_state(7), 6)
    assert versions(six) == [7, 6, 5, 3, 1]


def test_a_version_is_listed_once_whatever_its_tags(six: Shelf) -> None:
    for name in ("a", "b"):
        six.store.tag(JOB, 5, name)
    assert versions(six) == [6, 5, 4, 3, 2, 1]
    keep(six, last=1)
    assert versions(six) == [6, 5]


def test_a_hole_in_the_chain_does_not_hide_what_is_kept(six: Shelf) -> None:
    six.store.tag(JOB, 2, "best")
    lost = digest(six.store.manifest(JOB, 4).to_bytes())
    for replica in six.replicas:
        replica.remove("manifest", lost)
    assert versions(six) == [6, 5, 2]
    with pytest.raises(NotFound):
        six.load(version=4)
    assert filled(six.load(version="best")) == 2


def test_what_was_walked_only_in_part_is_walked_again(six: Shelf) -> None:
    """Or a hole in the chain would be overlooked the second time, and what it refers to deleted."""
    lost = digest(six.store.manifest(JOB, 4).to_bytes())
    for replica in six.replicas:
        replica.remove("manifest", lost)
    lineage, walked = six.open().lineage, set[str]()
    for _ in range(2):
        with pytest.raises(Damaged):
            list(lineage.chain(six.store.versions(JOB), walked=walked))


def test_a_manifest_carries_its_tenant(six: Shelf) -> None:
    assert {m.tenant for m in six.open().history(JOB)} == {"ada"}


# --- tags ----------------------------------------------------------------------------------------------------


def test_tags(six: Shelf) -> None:
    six.store.tag(JOB, 2, "best")
    assert filled(six.load(version="best")) == 2
    six.store.tag(JOB, "best", "copy")
    six.store.tag(JOB, 4, "best")
    assert (filled(six.load(version="best")), filled(six.load(version="copy"))) == (4, 2)
    six.store.untag(JOB, "best")
    with pytest.raises(NotFound):
        six.load(version="best")
    keep(six, last=1)
    assert versions(six) == [6, 2]
    with pytest.raises(NotFound):
        six.store.tag(JOB, 4, "late")
    for bad in ("3", "", "a b"):
        with pytest.raises(BadInput):
            six.store.tag(JOB, 6, bad)
    with pytest.raises(NotFound):
        six.store.untag(JOB, "best")


# --- rollback ------------------------------------------------------------------------------------------------


def test_a_rollback_is_a_new_version_with_an_old_state(six: Shelf) -> None:
    packs = six.files("packs")
    moved = six.store.rollback(JOB, 2)
    assert (moved.version, moved.source, moved.step, moved.name) == (7, 2, 2, JOB)
    assert six.files("packs") == packs, "no bytes were copied"
    assert filled(six.load()) == 2
    assert versions(six) == [7, 6, 5, 4, 3, 2, 1]
    head, old = six.store.manifest(JOB), six.store.manifest(JOB, 6)
    assert (head.parent, head.step, head.chunks) == (
        digest(old.to_bytes()),
        2,
        six.store.manifest(JOB, 2).chunks,
    )
    assert (head.name, head.tenant, head.epoch) == (JOB, "ada", old.epoch)
    # The process that held the state goes on only after it has looked.
    with pytest.raises(HeadMoved) as caught:
        six.save(a_state(8), 6)
    assert caught.value.version == 7
    saved = six.save(a_state(8), 7)
    assert saved.bytes_shared >= 1 << 20
    assert filled(six.load()) == 8
    assert six.rig.ledger.head(JOB).step == 3  # type: ignore[union-attr]
    assert six.rig.faults() == []


def test_steps_after_it_can_run_again(six: Shelf) -> None:
    before = six.rig.sql("SELECT count(*) FROM effect")[0][0]
    moved = six.store.rollback(JOB, 2)
    assert moved.forgotten == 4
    assert six.rig.sql("SELECT count(*) FROM effect")[0][0] == before - 4


def test_back_and_forth(six: Shelf) -> None:
    six.store.tag(JOB, 3, "good")
    assert six.store.rollback(JOB, "good").source == 3
    assert six.store.rollback(JOB, 6).version == 8
    assert filled(six.load()) == 6
    assert six.store.rollback(JOB, 7).step == 3
    assert filled(six.load()) == 3
    with pytest.raises(BadInput, match="already"):
        six.store.rollback(JOB, 9)
    for gone in (0, 10, "bad"):
        with pytest.raises(NotFound):
            six.store.rollback(JOB, gone)
    assert six.version == 9


def test_a_version_that_was_dropped_meanwhile_is_not_rolled_back_to(six: Shelf) -> None:
    """Retention comes between the look and the move; the move looks again, and finds it gone."""
    other = six.open()
    armed = iter([True])

    def drop(**more: Any) -> None:
        if next(armed, False):
            other.sweep(keep=Retention(last=1))

    real = six.store._replicas.put_manifest

    def put(data: bytes) -> Any:
        drop()
        return real(data)

    six.store._replicas.put_manifest = put  # type: ignore[method-assign]
    with pytest.raises(NotFound):
        six.store.rollback(JOB, 2)
    assert six.version == 6
    assert filled(six.load()) == 6


def test_a_save_that_comes_between_is_rolled_back_too(six: Shelf) -> None:
    other = six.open()
    armed = iter([True])
    real = six.store._replicas.put_manifest

    def put(data: bytes) -> Any:
        if next(armed, False):
            other.save(JOB, a_state(7), expected_version=6, lease=six.lease)
        return real(data)

    six.store._replicas.put_manifest = put  # type: ignore[method-assign]
    moved = six.store.rollback(JOB, 2)
    assert (moved.version, moved.source) == (8, 2)
    assert versions(six)[:2] == [8, 7]


@pytest.mark.parametrize("place", ["adopt_before_head", "before_commit"])
def test_nothing_of_a_rollback_that_died(six: Shelf, place: str) -> None:
    failpoints.arm(place, "raise")
    with pytest.raises(FailpointHit):
        six.store.rollback(JOB, 2)
    failpoints.disarm()
    assert (six.version, filled(six.load())) == (6, 6)
    left = {p.stem for p in six.files("manifests")}
    moved = six.store.rollback(JOB, 2)
    assert moved.digest not in left, "what a sweep may be deleting does not come back under its name"


def test_a_rollback_needs_its_packs_on_a_quorum(six: Shelf) -> None:
    """C1 holds for a head that is moved by hand too."""
    packs = six.store.manifest(JOB, 2).packs
    for replica in six.replicas[1:]:
        for pack in packs:
            replica.remove("pack", pack)
    assert six.store.rollback(JOB, 2).version == 7
    assert all(replica.has_pack(pack) for replica in six.replicas for pack in packs), "copied first"
    six.lose(0)
    six.lose(1)
    with pytest.raises(QuorumNotReached):
        six.store.rollback(JOB, 3)
    assert six.version == 7


def test_a_rollback_that_took_too_long_is_given_up(six: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LONGEST_SAVE_US", -1)
    with pytest.raises(NotDurable, match="so long"):
        six.store.rollback(JOB, 2)
    assert six.version == 6


def test_rollbacks_race(six: Shelf) -> None:
    stores = [six.open() for _ in range(4)]
    moved: list[int] = []
    problems: list[BaseException] = []

    def work(store: Any, source: int) -> None:
        try:
            moved.append(store.rollback(JOB, source).version)
        except BaseException as e:
            problems.append(e)

    threads = [threading.Thread(target=work, args=(s, n)) for n, s in enumerate(stores, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [p for p in problems if not isinstance(p, HeadMoved)]
    assert sorted(moved) == list(range(7, 7 + len(moved)))
    assert six.version == 6 + len(moved)
    assert len(versions(six)) == six.version


# --- fork ----------------------------------------------------------------------------------------------------


def test_a_fork_shares_everything_and_goes_its_own_way(six: Shelf) -> None:
    packs = six.files("packs")
    moved = six.store.fork(JOB, "team/other", 3)
    assert (moved.name, moved.version, moved.source, moved.step) == ("team/other", 1, 3, 3)
    assert six.files("packs") == packs
    other = six.open()
    assert filled(other.load("team/other")) == 3
    assert versions(six, "team/other") == [1]
    saved = other.save("team/other", a_state(9), expected_version=1, lease=six.lease)
    assert saved.bytes_shared >= 1 << 20
    assert (filled(six.open().load("team/other")), filled(six.load())) == (9, 6)
    head = six.rig.ledger.head("team/other")
    assert head is not None
    assert (head.step, head.tenant) == (4, "ada")
    assert six.rig.faults() == []
    assert six.store.fork(JOB, "newest").source == 6
    for name in ("team/other", JOB):
        with pytest.raises(HeadMoved, match="already"):
            six.store.fork(JOB, name)
    for name in ("../x", ""):
        with pytest.raises(BadInput):
            six.store.fork(JOB, name)
    with pytest.raises(NotFound):
        six.store.fork("nothing", "x")


def test_a_fork_outlives_what_it_came_from(six: Shelf) -> None:
    six.store.fork(JOB, "fork", 1)
    keep(six, last=1)
    six.open().sweep(older_than_us=0, nobody_is_saving=True)
    assert filled(six.open().load("fork")) == 1
    assert filled(six.load()) == 6
    with pytest.raises(NotFound):
        six.load(version=1)


@pytest.mark.parametrize("verb", ["load", "repair", "scrub"])
def test_repairing_one_job_keeps_what_its_forks_need_of_a_pack(quick: Shelf, verb: str) -> None:
    """Both share one pack, each wants chunks of it that the other does not; every copy of it is bad somewhere."""
    big = {"a": np.full(1 << 20, 1, np.uint8), "c": np.full(1 << 20, 3, np.uint8)}
    quick.save(big, 0)
    quick.store.fork(JOB, "fork")
    quick.save({**big, "c": np.full(1 << 20, 4, np.uint8)}, 1)
    other = quick.open()
    other.save("fork", {**big, "a": np.full(1 << 20, 5, np.uint8)}, expected_version=1, lease=quick.lease)
    quick.store.sweep(keep=Retention(last=1))
    (shared,) = set(quick.store.manifest(JOB).packs) & set(other.manifest("fork").packs)
    for replica in quick.replicas:
        path = replica.path / "packs" / f"{shared}.pack"
        data = bytearray(path.read_bytes())
        assert len(data) == 2 << 20
        data[0] ^= 1 if replica is not quick.replicas[0] else 0
        path.unlink()
        path.write_bytes(data)
    if verb == "load":
        assert (quick.load()["a"] == 1).all(), "a read repairs on the way"
    elif verb == "repair":
        quick.open().repair(JOB)
    else:
        quick.open().scrub(JOB, repair=True)
    assert (quick.open().load("fork")["c"] == 3).all()
    for replica in quick.replicas[1:]:  # each by itself
        held = bytearray(1 << 20)
        assert replica.read_pack(shared, 1 << 20, memoryview(held))
        assert set(held) == {3}


# --- whose replica it is -------------------------------------------------------------------------------------


def test_a_replica_belongs_to_one_ledger(quick: Shelf, tmp_path: Any) -> None:
    quick.save(a_state(1), 0)
    mine = quick.folders[0] / "owner.json"
    assert quick.rig.ledger.identity().id in mine.read_text()
    stranger = Shelf(tmp_path)
    try:
        stranger.replicas[1] = quick.replicas[1]
        stranger.folders[1] = quick.folders[1]
        store = stranger.open()
        for verb in (
            lambda: store.save(JOB, a_state(1), expected_version=0, lease=stranger.lease),
            lambda: store.sweep(),
            lambda: store.rebuild(),
        ):
            with pytest.raises(Misconfigured, match="another ledger"):
                verb()
        assert stranger.version == 0
    finally:
        stranger.close()
    assert filled(quick.load()) == 1


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"\xff", b'{"ledger": 3}', b'{"ledger": "x"}', None])
def test_a_damaged_mark_stops_a_sweep_and_no_save(quick: Shelf, damage: bytes | None) -> None:
    quick.save(a_state(1), 0)
    mark = quick.folders[0] / "owner.json"
    flipped = bytearray(mark.read_bytes())
    flipped[-10] ^= 1
    mark.write_bytes(bytes(flipped) if damage is None else damage)
    store = quick.open()
    store.save(JOB, a_state(2), expected_version=1, lease=quick.lease)
    with pytest.raises(Misconfigured, match="mark is damaged"):
        store.sweep()
    store.rebuild(take_over=True)
    store.sweep()


def test_every_version_of_another_job_is_its_own(six: Shelf) -> None:
    """A row that names a manifest nobody has is said to be damaged, and is no version of anything else."""
    six.rig.ledger.tag(
        JOB, KeptVersion(version=5, digest="ab" * 32, step=5, tag="odd"), expected_sweeps=0, actor="x"
    )
    with pytest.raises(Damaged):
        six.load(version="odd")
    assert versions(six) == [6, 5, 4, 3, 2, 1]
