"""The heads of a lost ledger come back from the replicas, and an existing head is never harmed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from sublet.core.checkpoints.retention import Retention
from sublet.core.errors import Misconfigured
from sublet.machine import failpoints
from sublet.store.save.packing import digest
from tests.in_memory import in_memory
from tests.store.rig import JOB, Shelf
from tests.store.upkeep.test_lineage import a_state, filled, versions


def make_old(shelf: Shelf) -> None:
    then = time.time() - 3 * 86400
    for path in shelf.files():
        os.utime(path, (then, then))


@pytest.fixture
def lost(quick: Shelf) -> Any:
    """A store of two jobs with history, and a new ledger that knows nothing."""
    for number in range(1, 7):
        quick.save(a_state(number), number - 1)
    quick.store.fork(JOB, "fork", 2)
    quick.store.tag(JOB, 1, "first")
    quick.store.sweep(keep=Retention(last=2, every=3), older_than_us=0, nobody_is_saving=True)
    assert versions(quick) == [6, 5, 3, 1]
    with in_memory() as folder:
        fresh = Shelf(folder)
        fresh.old = quick  # type: ignore[attr-defined]
        fresh.replicas, fresh.folders = quick.replicas, quick.folders
        fresh.store = fresh.open()
        yield fresh
        fresh.close()


def rebuild(shelf: Shelf, **over: Any) -> Any:
    return shelf.open().rebuild(**over)


def told(done: Any) -> dict[str, tuple[int, str]]:
    return {j.name: (j.version, j.action) for j in done.jobs}


def test_a_lost_ledger(lost: Shelf) -> None:
    with pytest.raises(Misconfigured, match="another ledger"):
        rebuild(lost)
    assert lost.rig.ledger.heads() == []
    planned = rebuild(lost, take_over=True, dry_run=True)
    assert lost.rig.ledger.heads() == []
    done = rebuild(lost, take_over=True)
    assert told(done) == told(planned) == {JOB: (6, "adopted"), "fork": (1, "adopted")}
    assert (done.manifests, done.unreadable, done.unreachable, done.tenants) == (5, 0, {}, [])
    assert [j.versions for j in done.jobs if j.name == JOB] == [(6, 5, 3, 1)]
    assert versions(lost) == [6, 5, 3, 1]
    for version in (6, 5, 3, 1):
        assert filled(lost.load(version=version)) == version
    assert filled(lost.open().load("fork")) == 2
    head = lost.rig.ledger.head(JOB)
    assert head is not None
    assert (head.step, head.tenant) == (6, "ada")
    # It is the replicas' ledger now: it saves, sweeps, and loses nothing.
    lost.save(a_state(7), 6)
    make_old(lost)
    lost.open().sweep()
    assert versions(lost) == [7, 6, 5, 3, 1]
    assert lost.rig.faults() == []
    assert told(rebuild(lost)) == {JOB: (7, "as it was"), "fork": (1, "as it was")}


def test_the_old_ledger_is_shut_out(lost: Shelf) -> None:
    rebuild(lost, take_over=True)
    old = lost.old  # type: ignore[attr-defined]
    for verb in (
        lambda: old.open().save(JOB, a_state(9), expected_version=6, lease=old.lease),
        lambda: old.open().sweep(),
    ):
        with pytest.raises(Misconfigured, match="another ledger"):
            verb()


def test_a_tenant_that_was_removed_is_not_brought_back(lost: Shelf) -> None:
    """T1: its name is reserved in this ledger; its manifests are left where they are."""
    for held in lost.rig.ledger.leases():
        lost.rig.release(held)
    lost.rig.ledger.remove_tenant("ada", actor="op")
    done = rebuild(lost, take_over=True)
    assert {action for _, action in told(done).values()} == {"tenant removed"}
    assert (done.tenants, lost.rig.ledger.heads()) == ([], [])


def test_tenants_and_epochs_come_back(lost: Shelf) -> None:
    """Who leases next is newer than whoever saved what was found."""
    old = lost.old  # type: ignore[attr-defined]
    lost.rig.sql("DELETE FROM tenant WHERE name = 'ada'")
    old.rig.ledger.mark_restored(actor="x")
    old.rig.ledger.mark_current(actor="x")
    newer = old.rig.ask(lease_id="newer")
    from tests.store.rig import Held

    old.open().save(JOB, a_state(7), expected_version=6, lease=Held(old.rig.key(newer)))
    done = rebuild(lost, take_over=True)
    assert done.tenants == ["ada"]
    head = lost.rig.ledger.head(JOB)
    assert head is not None
    assert head.epoch == newer.lease.epoch > 1 << 40
    answer = lost.rig.ask(lease_id="after")
    assert answer.lease.epoch > head.epoch
    lost.open().save(JOB, a_state(8), expected_version=7, lease=Held(lost.rig.key(answer)))
    assert filled(lost.load()) == 8


def test_the_newest_may_not_have_been_committed(lost: Shelf) -> None:
    old = lost.old  # type: ignore[attr-defined]
    failpoints.arm("after_quorum", "raise")
    with pytest.raises(failpoints.FailpointHit):
        old.save(a_state(9), 6)
    failpoints.disarm()
    done = rebuild(lost, take_over=True)
    job = next(j for j in done.jobs if j.name == JOB)
    assert (job.version, job.certain) == (7, False)
    assert filled(lost.load()) == 9
    lost.save(a_state(10), 7)
    fork = next(j for j in done.jobs if j.name == "fork")
    assert not fork.certain


def test_a_version_somebody_names_as_its_parent_was_committed(quick: Shelf) -> None:
    """Two attempts at version 2; only one has a child, and the child is broken."""
    quick.save(a_state(1), 0)
    failpoints.arm("after_quorum", "raise")
    with pytest.raises(failpoints.FailpointHit):
        quick.open().save(JOB, a_state(50), expected_version=1, lease=quick.lease)
    failpoints.disarm()
    quick.save(a_state(2), 1)
    quick.save(a_state(3), 2)
    new = set(quick.store.manifest(JOB).packs) - set(quick.store.manifest(JOB, 2).packs)
    for replica in quick.replicas:
        for pack in new:
            replica.remove("pack", pack)
    with in_memory() as folder:
        fresh = Shelf(folder)
        try:
            fresh.replicas, fresh.folders = quick.replicas, quick.folders
            (job,) = rebuild(fresh, take_over=True).jobs
            assert (job.version, job.certain, job.passed_over, job.versions) == (2, True, (3,), (2, 1))
            assert filled(fresh.load()) == 2
        finally:
            fresh.close()


def test_damage_on_some_replicas(lost: Shelf) -> None:
    """Each manifest and pack is good somewhere."""
    for number, path in enumerate(lost.published()):
        if number % 3 == 0:
            path.write_bytes(b"{}" * 50)
    done = rebuild(lost, take_over=True)
    assert told(done) == {JOB: (6, "adopted"), "fork": (1, "adopted")}
    assert filled(lost.load()) == 6


def test_a_manifest_under_another_s_name_is_not_believed(lost: Shelf) -> None:
    """A good one, in the wrong place: the first replica lies about the newest version."""
    store = lost.old.store  # type: ignore[attr-defined]
    newest, older = store.manifest(JOB), store.manifest(JOB, 3)
    path = lost.folders[0] / "manifests" / f"{digest(newest.to_bytes())}.json"
    path.write_bytes(older.to_bytes())
    done = rebuild(lost, take_over=True)
    assert told(done)[JOB] == (6, "adopted")
    assert filled(lost.load()) == 6


def test_an_old_version_whose_packs_are_gone_is_not_brought_back(lost: Shelf) -> None:
    old = lost.old.store  # type: ignore[attr-defined]
    for pack in set(old.manifest(JOB, 3).packs) - set(old.manifest(JOB, 6).packs):
        for replica in lost.replicas:
            replica.remove("pack", pack)
    rebuild(lost, take_over=True)
    assert versions(lost) == [6, 5, 1]


def test_rubbish_among_the_manifests(lost: Shelf) -> None:
    for name, data in [("ab" * 32, b"{}"), ("notes", b"hello"), (digest(b"[]"), b"[]")]:
        (lost.folders[0] / "manifests" / f"{name}.json").write_bytes(data)
    done = rebuild(lost, take_over=True)
    assert done.unreadable == 3
    assert told(done) == {JOB: (6, "adopted"), "fork": (1, "adopted")}


def test_nothing_whole_is_left(quick: Shelf, tmp_path: Path) -> None:
    quick.save(a_state(1), 0)
    for path in quick.files("packs"):
        path.unlink()
    fresh = Shelf(tmp_path)
    try:
        fresh.replicas, fresh.folders = quick.replicas, quick.folders
        assert told(rebuild(fresh, take_over=True)) == {JOB: (0, "lost")}
        assert fresh.version == 0
    finally:
        fresh.close()


def test_a_replica_that_cannot_be_read_stops_it(lost: Shelf) -> None:
    lost.lose(1)
    assert list(rebuild(lost, take_over=True, dry_run=True).unreachable) == [f"dir:{lost.folders[1]}"]
    with pytest.raises(Misconfigured, match="nothing was changed"):
        rebuild(lost, take_over=True)
    assert lost.rig.ledger.heads() == []


# --- a backup that was put back ------------------------------------------------------------------------------


def put_back(shelf: Shelf, copy: Path) -> None:
    """The ledger as it was."""
    path = Path(shelf.rig.url.removeprefix("sqlite:"))
    shelf.rig.close()
    for extra in path.parent.glob(path.name + "-*"):
        extra.unlink()
    path.write_bytes(copy.read_bytes())
    shelf.rig.ledger = shelf.rig.open()
    shelf.rig.ledger.mark_restored(actor="operator")


def backup(shelf: Shelf, folder: Path) -> Path:
    from sublet.ledger.engines.sqlite import engine

    target = folder / "backup.db"
    engine.backup(Path(shelf.rig.url.removeprefix("sqlite:")), target)
    return target


def test_heads_of_a_backup_are_brought_forward(quick: Shelf, tmp_path: Path) -> None:
    for number in range(1, 4):
        quick.save(a_state(number), number - 1)
    copy = backup(quick, tmp_path)
    for number in range(4, 6):
        quick.save(a_state(number), number - 1)
    quick.open().save("young", a_state(1), expected_version=0, lease=quick.lease)
    put_back(quick, copy)
    assert versions(quick) == [3, 2, 1]
    with pytest.raises(Misconfigured, match="backup"):
        quick.open().sweep()
    done = rebuild(quick)
    assert told(done) == {JOB: (5, "newer"), "young": (1, "adopted")}
    assert not done.heads_current
    assert quick.version == 3, "a head that is there is moved only if asked"
    with pytest.raises(Misconfigured, match="backup"):
        quick.open().sweep()
    assert told(rebuild(quick, forward=True)) == {JOB: (5, "forwarded"), "young": (1, "as it was")}
    assert versions(quick) == [5, 4, 3, 2, 1]
    assert filled(quick.load()) == 5
    make_old(quick)
    assert quick.open().sweep().removed == []


def test_a_backup_from_before_a_sweep(quick: Shelf, tmp_path: Path) -> None:
    """It names versions that are gone; what is there now is what counts."""
    for number in range(1, 6):
        quick.save(a_state(number), number - 1)
    quick.store.tag(JOB, 2, "gone")
    quick.store.sweep(keep=Retention(last=3))
    copy = backup(quick, tmp_path)
    quick.store.untag(JOB, "gone")
    for number in range(6, 9):
        quick.save(a_state(number), number - 1)
    quick.store.sweep(keep=Retention(last=2, every=4), older_than_us=0, nobody_is_saving=True)
    assert versions(quick) == [8, 7, 4]
    put_back(quick, copy)
    assert told(rebuild(quick, forward=True)) == {JOB: (8, "forwarded")}
    assert versions(quick) == [8, 7, 4]
    assert [filled(quick.load(version=v)) for v in (8, 7, 4)] == [8, 7, 4]
    quick.open().sweep(older_than_us=0, nobody_is_saving=True)
    assert [filled(quick.load(version=v)) for v in (8, 7, 4)] == [8, 7, 4]
    assert quick.rig.faults() == []


def test_two_lines_from_one_backup(quick: Shelf, tmp_path: Path) -> None:
    """Somebody went on from the backup before comparing: neither line is thrown away by itself."""
    quick.save(a_state(1), 0)
    copy = backup(quick, tmp_path)
    for number in (2, 3):
        quick.save(a_state(number), number - 1)
    put_back(quick, copy)
    answer = quick.rig.ask(lease_id="again")
    from tests.store.rig import Held

    quick.open().save(JOB, a_state(20), expected_version=1, lease=Held(quick.rig.key(answer)))
    done = rebuild(quick, forward=True)
    assert told(done) == {JOB: (3, "diverged")}
    assert (quick.version, filled(quick.load())) == (2, 20)
    with pytest.raises(Misconfigured):
        quick.open().sweep()
    rebuild(quick, heads_are_right=True)
    quick.open().sweep()
    assert filled(quick.load()) == 20
