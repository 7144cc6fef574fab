"""A sweep deletes what nobody needs, and nothing else (C5), whoever saves, loads, forks, rolls back or dies meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sublet.core.checkpoints.checkpoint import MARK
from sublet.core.checkpoints.retention import Retention
from sublet.core.errors import BadInput, Damaged, HeadMoved, Misconfigured, NotFound
from sublet.core.values import HOUR_US
from sublet.machine import failpoints
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.save.packing import digest
from sublet.store.upkeep.sweeping import LEAST_AGE_US, Sweep, Swept
from tests import forked
from tests.in_memory import in_memory
from tests.store.rig import JOB, Shelf, saver
from tests.store.upkeep.test_lineage import a_state, filled, versions

EXAMPLES = int(os.environ.get("SUBLET_SWEEP_EXAMPLES", "8"))
STORM_SECONDS = float(os.environ.get("SUBLET_SWEEP_STORM_SECONDS", "3"))
PLACES = ["sweep_after_mark", "sweep_before_delete", "sweep_between_deletes"]


def make_old(shelf: Shelf, seconds: float = 3 * 86400) -> None:
    """Everything on the replicas was written so long ago."""
    then = time.time() - seconds
    for path in shelf.files():
        os.utime(path, (then, then))


def sweep(shelf: Shelf, last: int = 0, every: int = 0, **over: Any) -> Swept:
    return shelf.open().sweep(keep=Retention(last=last, every=every), **over)


def names(shelf: Shelf, folder: str) -> set[str]:
    return {p.stem for p in shelf.files(folder)}


def needed(shelf: Shelf, *jobs: str) -> tuple[set[str], set[str]]:
    """Packs and manifests the versions of these jobs refer to."""
    found = [m for job in jobs or (JOB,) for m in shelf.open().history(job)]
    return {p for m in found for p in m.packs}, {digest(m.to_bytes()) for m in found}


@pytest.fixture
def six(quick: Shelf) -> Shelf:
    for number in range(1, 7):
        quick.save(a_state(number), number - 1)
    return quick


# --- what goes and what stays --------------------------------------------------------------------------------


def test_without_rules_only_garbage_goes(six: Shelf) -> None:
    before = six.published()
    failpoints.arm("after_quorum", "raise")
    with pytest.raises(failpoints.FailpointHit):
        six.save(a_state(9), 6)
    failpoints.disarm()
    assert len(six.published()) > len(before)
    assert sweep(six).removed == [], "it is new: a save might still refer to it"
    make_old(six)
    swept = sweep(six)
    assert {g.kind for g in swept.removed} == {"manifest", "pack"}
    assert swept.bytes == sum(g.bytes for g in swept.removed) > 0
    assert six.published() == before
    assert (versions(six), filled(six.load())) == ([6, 5, 4, 3, 2, 1], 6)
    assert sweep(six).removed == []
    assert (swept.manifests, swept.packs) == (6, 6)
    assert {v.reason for v in swept.verdicts[JOB]} == {"the newest", "no rule drops it"}


def test_retention_then_sweep(six: Shelf) -> None:
    six.store.tag(JOB, 1, "first")
    six.store.tag(JOB, 3, "third")
    make_old(six)
    swept = sweep(six, last=2, every=3)
    assert [(v.version, v.keep) for v in swept.verdicts[JOB]] == [
        (6, True), (5, True), (4, False), (3, True), (2, False), (1, True),
    ]  # fmt: skip
    assert versions(six) == [6, 5, 3, 1]
    packs, manifests = needed(six)
    assert names(six, "packs") == packs
    assert names(six, "manifests") == manifests
    for version in (6, 5, 3, 1):
        assert filled(six.load(version=version)) == version
    # The pack of the first version holds what all share; those of the dropped ones are gone from each replica.
    assert sorted(g.kind for g in swept.removed) == ["manifest"] * 6 + ["pack"] * 6
    for tag in ("first", "third"):
        six.store.untag(JOB, tag)
        assert versions(six) == [6, 5, 3], "what a rule keeps stays when its tag goes"
    assert [g.kind for g in sweep(six, last=1).removed].count("manifest") == 9
    assert versions(six) == [6]


def test_a_sweep_without_rules_keeps_no_more_than_before(six: Shelf) -> None:
    six.store.tag(JOB, 1, "first")
    sweep(six, last=2)
    sweeps = six.store.versions(JOB).head.sweeps
    sweep(six)
    assert six.store.versions(JOB).head.sweeps == sweeps, "nothing to say to the ledger"
    six.store.untag(JOB, "first")
    assert versions(six) == [6, 5]


def test_only_one_job_is_thinned_out_when_it_is_named(six: Shelf) -> None:
    other = six.open()
    for number in range(1, 4):
        other.save("other", a_state(number), expected_version=number - 1, lease=six.lease)
    make_old(six)
    sweep(six, name="other", last=1)
    assert (versions(six), versions(six, "other")) == ([6, 5, 4, 3, 2, 1], [3])
    packs, manifests = needed(six, JOB, "other")
    assert (names(six, "packs"), names(six, "manifests")) == (packs, manifests)
    with pytest.raises(NotFound):
        sweep(six, name="nothing", last=1)


def test_a_dry_run_changes_nothing_and_says_the_same(six: Shelf) -> None:
    make_old(six)
    before, ledger = six.published(), six.rig.dump()
    told = sweep(six, last=2, every=3, dry_run=True)
    assert (six.published(), six.rig.dump()) == (before, ledger)
    done = sweep(six, last=2, every=3)
    assert done.verdicts == told.verdicts
    assert [(g.replica, g.kind, g.name, g.bytes) for g in done.removed] == [
        (g.replica, g.kind, g.name, g.bytes) for g in told.removed
    ]
    assert len(done.removed) == 3 * (3 + 2), "what the first one wrote is shared"


def test_the_age_limit(six: Shelf) -> None:
    """C5."""
    with pytest.raises(BadInput, match="12h00m"):
        sweep(six, last=1, older_than_us=LEAST_AGE_US - 1)
    assert versions(six) == [6, 5, 4, 3, 2, 1]
    make_old(six, 13 * 3600)
    assert sweep(six, last=1).removed == [], "the default is a day"
    assert len(sweep(six, older_than_us=14 * HOUR_US).removed) == 0
    assert len(sweep(six, older_than_us=12 * HOUR_US).removed) > 0


def test_nobody_is_saving(six: Shelf) -> None:
    swept = sweep(six, last=1, older_than_us=0, nobody_is_saving=True)
    assert len(swept.removed) == 3 * (5 + 4)
    assert filled(six.load()) == 6


def test_ages_are_by_the_replica_s_own_clock(six: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is a month ahead of the file server's."""
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert sweep(six, last=1).removed == []
    ages = [age for replica in six.replicas for _, age in replica.manifests()]
    assert all(-1 < age < 100 for age in ages)


def test_a_replica_whose_clock_cannot_be_asked_has_nothing_old(
    six: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old(six)

    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith("clock-"):
            raise OSError(30, "Read-only file system")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert sweep(six, last=1).removed == []
    assert not six.files("drafts")


def test_leftovers_of_crashes(six: Shelf) -> None:
    for folder in six.folders:
        (folder / "drafts" / "pack-dead").write_bytes(b"x" * 1000)
        (folder / "aside" / "bad.pack.1").write_bytes(b"y" * 1000)
    assert sweep(six).removed == []
    make_old(six)
    assert {(g.kind, g.name, g.bytes) for g in sweep(six).removed} == {("drafts", "pack-dead", 1000)}
    make_old(six, 8 * 86400)
    assert {(g.kind, g.name) for g in sweep(six).removed} == {("aside", "bad.pack.1")}
    assert (six.files("drafts"), six.files("aside")) == ([], [])


class _LikeABucket(DirectoryReplica):
    """The mark lies among the manifests, and nothing is left behind by crashes."""

    leftovers = None  # type: ignore[assignment]

    @staticmethod
    def _place(kind: str, name: str) -> tuple[str, str]:
        return ("packs", f"{name}.pack") if kind == "pack" else ("manifests", f"{name}.json")


def test_a_mark_among_the_manifests_is_no_garbage_and_no_manifest(six: Shelf) -> None:
    six.replicas = [_LikeABucket(folder) for folder in six.folders]
    store = six.open()
    store.save(JOB, a_state(7), expected_version=6, lease=six.lease)
    (six.folders[0] / "drafts" / "old").touch()
    for _ in range(2):
        swept = sweep(six, last=1, older_than_us=0, nobody_is_saving=True)
        assert swept.skipped == {}
        assert all((folder / "manifests" / f"{MARK}.json").exists() for folder in six.folders)
    assert names(six, "manifests") == {MARK} | needed(six)[1]
    done = six.open().rebuild()
    assert (done.manifests, done.unreadable) == (1, 0)
    assert six.files("drafts") == [six.folders[0] / "drafts" / "old"]


# --- failing closed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["head", "middle", "tagged", "other job"])
def test_a_manifest_that_does_not_read_stops_it(six: Shelf, what: str) -> None:
    six.store.fork(JOB, "other", 2)
    six.store.tag(JOB, 1, "first")
    six.store.sweep(keep=Retention(last=4))
    failpoints.arm("after_quorum", "raise")
    with pytest.raises(failpoints.FailpointHit):
        six.save(a_state(9), 6)
    failpoints.disarm()
    job, version = {"head": (JOB, 6), "middle": (JOB, 4), "tagged": (JOB, 1), "other job": ("other", 1)}[what]
    lost = digest(six.store.manifest(job, version).to_bytes())
    for replica in six.replicas:
        replica.remove("manifest", lost)
    make_old(six)
    before = six.published()
    for rules in ({}, {"last": 1}, {"nobody_is_saving": True, "older_than_us": 0}):
        with pytest.raises(Damaged, match="nothing was deleted"):
            sweep(six, **rules)  # type: ignore[arg-type]
    assert six.published() == before


def test_a_replica_that_is_gone_is_skipped_and_named(six: Shelf) -> None:
    make_old(six)
    six.lose(1)
    swept = sweep(six, last=1)
    assert list(swept.skipped) == [f"dir:{six.folders[1]}"]
    assert {g.replica for g in swept.removed} == {f"dir:{six.folders[n]}" for n in (0, 2)}
    assert filled(six.load()) == 6


def test_a_delete_that_fails_is_named_and_the_others_go_on(
    six: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old(six)
    real = DirectoryReplica.remove

    def remove(self: DirectoryReplica, kind: str, name: str) -> None:
        if self.path == six.folders[0]:
            raise OSError(13, "Permission denied")
        real(self, kind, name)

    monkeypatch.setattr(DirectoryReplica, "remove", remove)
    swept = sweep(six, last=1)
    assert swept.skipped == {f"dir:{six.folders[0]}": "Permission denied"}
    assert {g.replica for g in swept.removed} == {f"dir:{six.folders[n]}" for n in (1, 2)}


def test_a_restored_ledger_sweeps_nothing_before_it_was_compared(six: Shelf) -> None:
    """Its heads are of the past: what was saved since looks like garbage."""
    make_old(six)
    six.rig.ledger.mark_restored(actor="operator")
    with pytest.raises(Misconfigured, match="backup"):
        sweep(six, last=1)
    assert versions(six) == [6, 5, 4, 3, 2, 1]
    six.open().rebuild(forward=True)
    assert len(sweep(six, last=1).removed) > 0


def test_a_new_ledger_on_old_replicas_sweeps_nothing(six: Shelf, tmp_path: Path) -> None:
    make_old(six)
    stranger = Shelf(tmp_path)
    try:
        stranger.replicas, stranger.folders = six.replicas, six.folders
        before = six.published()
        with pytest.raises(Misconfigured, match="another ledger"):
            stranger.open().sweep(older_than_us=0, nobody_is_saving=True)
        assert six.published() == before
    finally:
        stranger.close()


# --- between mark and delete ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["sweep_after_mark", "sweep_before_delete"])
def test_what_came_between_is_kept(six: Shelf, place: str) -> None:
    """Even against the protocol: nothing is too young here, and a save of this very moment is seen all the same."""
    store = six.open()

    def meanwhile() -> None:
        failpoints.disarm()
        store.save(JOB, a_state(7), expected_version=6, lease=six.lease)
        store.rollback(JOB, 5)
        store.fork(JOB, "fork", 4)
        store.tag(JOB, 4, "kept")

    failpoints.arm(place, meanwhile)
    swept = sweep(six, last=3, older_than_us=0, nobody_is_saving=True)
    assert len(swept.removed) > 0
    assert (filled(six.load()), filled(six.open().load("fork"))) == (5, 4)
    assert [(v, filled(six.load(version=v))) for v in (8, 7, 6, 5, 4)] == [
        (8, 5),
        (7, 7),
        (6, 6),
        (5, 5),
        (4, 4),
    ]


def test_it_looks_once_more_before_it_deletes(six: Shelf) -> None:
    """C5, against the protocol: a save that was forgotten, and commits when its packs are already on the list."""
    store = six.open()
    held: list[Any] = []
    commit = store._commit
    store._commit = lambda *args: held.append(args) or 7  # type: ignore[method-assign, func-returns-value]
    store.save(JOB, a_state(7), expected_version=6, lease=six.lease)
    assert versions(six)[0] == 6
    failpoints.arm("sweep_after_mark", lambda: commit(*held[0]))
    swept = sweep(six, older_than_us=0, nobody_is_saving=True)
    assert swept.removed == []
    assert (versions(six)[0], filled(six.load())) == (7, 7)


def test_a_version_dropped_while_it_is_loaded(six: Shelf) -> None:
    """The reader is told; it never gets other bytes."""
    manifest = six.store.manifest(JOB, 2)
    sweep(six, last=1, older_than_us=0, nobody_is_saving=True)
    assert filled(six.load()) == 6
    store = six.open()
    store.manifest = lambda *_: manifest  # type: ignore[method-assign]
    with pytest.raises((NotFound, Damaged)):
        store.load(JOB, version=2)
    assert filled(six.load()) == 6


def test_a_save_refers_to_nothing_behind_a_parent_it_cannot_read(six: Shelf) -> None:
    """What this process saved itself may have been dropped and swept since somebody else saved."""
    own = set(six.store.manifest(JOB).packs)
    other = six.open()
    everything = {"a": np.full(1 << 20, 8, np.uint8), "b": np.full(100, 9, np.uint8)}
    other.save(JOB, everything, expected_version=6, lease=six.lease)
    head = other.manifest(JOB)
    assert own.isdisjoint(head.packs)
    for replica in six.replicas:
        replica.remove("manifest", digest(head.to_bytes()))
    six.save(a_state(6), 7)
    assert own.isdisjoint(six.store.manifest(JOB).packs)
    assert filled(six.load()) == 6


@pytest.mark.parametrize("nth", range(1, 9))
def test_another_sweep_deletes_what_this_one_is_about_to_read(six: Shelf, nth: int) -> None:
    """It reads the heads again, and is not told that something is damaged."""
    store, count = six.open(), iter(range(1, 1000))
    real = store.lineage._read

    def read(name: str) -> Any:
        if next(count) == nth:
            sweep(six, last=1, older_than_us=0, nobody_is_saving=True)
        return real(name)

    store.lineage._read = read  # type: ignore[method-assign]
    store.sweep(keep=Retention(last=3), older_than_us=0, nobody_is_saving=True)
    assert (versions(six), filled(six.load())) == ([6], 6)


# --- dying ---------------------------------------------------------------------------------------------------

SWEEPER = """
import os, sys
from pathlib import Path
from sublet.machine import failpoints
from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.core.checkpoints.retention import Retention
from sublet.ledger.engines.sqlite.engine import open_ledger
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.replicas.quorum import Replicas
from sublet.testing.clock import VirtualClock

url, *folders = sys.argv[1:]
ledger = open_ledger(url, VirtualClock())
store = CheckpointStore(Replicas([DirectoryReplica(Path(f)) for f in folders], ReplicaPolicy(replicas=len(folders))), lambda: ledger)
os.environ["SUBLET_FAILPOINTS"] = os.environ["ARMED"]
failpoints.arm_from_environment()
print(len(store.sweep(keep=Retention(last=2), older_than_us=0, nobody_is_saving=True).removed))
"""


def sweeper(shelf: Shelf, armed: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-c", SWEEPER, shelf.rig.url, *map(str, shelf.folders)],
        env={**os.environ, "SUBLET_FAILPOINTS": "", "ARMED": armed},
        timeout=60,
    )


@pytest.mark.parametrize(
    "armed",
    [
        "sweep_after_mark=kill", "sweep_before_delete=kill@1", "sweep_before_delete=kill@2",
        "sweep_between_deletes=kill@1", "sweep_between_deletes=kill@5", "sweep_between_deletes=kill@12",
        "before_commit=kill@1", "after_commit_before_reply=kill@1",
    ],
)  # fmt: skip
def test_kill_9_of_a_sweep(six: Shelf, armed: str) -> None:
    died = sweeper(six, armed)
    assert died.returncode == -signal.SIGKILL, died.stderr
    for version in (6, 5):
        assert filled(six.load(version=version)) == version
    sweep(six, last=2, older_than_us=0, nobody_is_saving=True)
    packs, manifests = needed(six)
    assert (names(six, "packs"), names(six, "manifests")) == (packs, manifests)
    assert versions(six) == [6, 5]
    assert [filled(six.load(version=v)) for v in (6, 5)] == [6, 5]
    assert six.rig.faults() == []


@pytest.mark.parametrize("place", PLACES)
def test_a_save_goes_through_a_stopped_sweep(six: Shelf, place: str) -> None:
    """A whole save by another process while the sweep stands still."""
    make_old(six)
    child = saver(six, fill=9, version=6)

    def meanwhile() -> None:
        failpoints.disarm()
        out, err = child.communicate("\n", timeout=60)
        assert out.strip() == "7", err

    failpoints.arm(place, meanwhile)
    sweep(six, last=1)
    loaded = six.load()
    assert set(loaded["b"].tolist()) == {9}


# --- any order of things -------------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Saves that stop half-way and go on later, forks, rollbacks, tags and sweeps in any order. Time is virtual: what is older
    than twice the longest save may be deleted."""

    LONGEST = 100.0

    def __init__(self) -> None:
        super().__init__()
        self._memory = in_memory()
        self.folder = self._memory.__enter__()
        self.shelf = Shelf(self.folder, replicas=2)
        self.now = 0.0
        self.fill = 0
        self.truth: dict[str, dict[int, int]] = {}  # job, version, which state it is
        self.tags: dict[str, dict[str, int]] = {}
        self.ever_tagged: set[tuple[str, int]] = set()
        self.dropped: dict[str, set[int]] = {}
        self.paused: list[tuple[str, int, int, float, Any]] = []

    def teardown(self) -> None:
        self.shelf.close()
        self._memory.__exit__(None, None, None)

    def _stamp(self) -> None:
        """What was written since the last look is as old as now."""
        for path in self.shelf.files():
            if path.stat().st_mtime > 1e9:
                os.utime(path, (self.now + 1000, self.now + 1000))

    def _newest(self, job: str) -> int:
        return max(self.truth[job], default=0)

    def _live(self, job: str) -> list[int]:
        return sorted(v for v in self.truth[job] if v not in self.dropped[job])

    @rule(job=st.sampled_from(["a", "b"]))
    def save(self, job: str) -> None:
        self.truth.setdefault(job, {})
        self.dropped.setdefault(job, set())
        self.tags.setdefault(job, {})
        self.fill = (self.fill + 1) % 250
        version = self._newest(job)
        self.shelf.open().save(job, a_state(self.fill), expected_version=version, lease=self.shelf.lease)
        self.truth[job][version + 1] = self.fill
        self._stamp()

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def begin_save(self, data: Any) -> None:
        """Everything but the commit."""
        job = data.draw(st.sampled_from(sorted(self.truth)))
        self.fill = (self.fill + 1) % 250
        store, version = self.shelf.open(), self._newest(job)
        held: list[Any] = []

        def hold(*asked: Any) -> int:
            held.append(asked)
            return version + 1

        real = store._commit
        store._commit = hold  # type: ignore[method-assign]
        store.save(job, a_state(self.fill), expected_version=version, lease=self.shelf.lease)
        self.paused.append((job, version, self.fill, self.now, lambda: real(*held[0])))
        self._stamp()

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def end_save(self, data: Any) -> None:
        job, version, fill, since, commit = self.paused.pop(data.draw(st.integers(0, len(self.paused) - 1)))
        if self.now - since > self.LONGEST:
            return  # it gives itself up
        if self._newest(job) != version:
            with pytest.raises(HeadMoved):
                commit()
            return
        assert commit() == version + 1
        self.truth[job][version + 1] = fill

    @rule(seconds=st.sampled_from([1.0, 30.0, 90.0, 150.0, 250.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: any(map(self._live, self.truth)))
    @rule(data=st.data())
    def roll_back(self, data: Any) -> None:
        job = data.draw(
            st.sampled_from([j for j in sorted(self.truth) if len(self._live(j)) > 1])
            if any(len(self._live(j)) > 1 for j in self.truth)
            else st.none()
        )
        if job is None:
            return
        version = data.draw(st.sampled_from(self._live(job)[:-1]))
        moved = self.shelf.open().rollback(job, version)
        self.truth[job][moved.version] = self.truth[job][version]
        self._stamp()

    @precondition(lambda self: any(map(self._live, self.truth)) and len(self.truth) < 5)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        job = data.draw(st.sampled_from([j for j in sorted(self.truth) if self._live(j)]))
        version = data.draw(st.sampled_from(self._live(job)))
        new = f"fork{len(self.truth)}"
        self.shelf.open().fork(job, new, version)
        self.truth[new] = {1: self.truth[job][version]}
        self.dropped[new], self.tags[new] = set(), {}
        self._stamp()

    @precondition(lambda self: any(map(self._live, self.truth)))
    @rule(data=st.data(), tag=st.sampled_from(["x", "y"]))
    def tag(self, data: Any, tag: str) -> None:
        job = data.draw(st.sampled_from([j for j in sorted(self.truth) if self._live(j)]))
        version = data.draw(st.sampled_from(self._live(job)))
        self.shelf.open().tag(job, version, tag)
        self.tags[job][tag] = version
        self.ever_tagged.add((job, version))

    @rule(last=st.integers(0, 3), every=st.sampled_from([0, 2, 3]), died=st.sampled_from([None, *PLACES]))
    def sweep(self, last: int, every: int, died: str | None) -> None:
        rule = Retention(last=last, every=every)
        store = self.shelf.open()
        if died is not None:
            failpoints.arm(died, "raise")
        clock = DirectoryReplica._its_clock
        DirectoryReplica._its_clock = lambda _: self.now + 1000  # type: ignore[method-assign]
        try:
            swept = Sweep(store._replicas.replicas, self.shelf.rig.ledger, store.lineage, "test").run(
                name=None, rule=rule, older_than_us=int(2 * self.LONGEST * 1e6), nobody_is_saving=False,
                dry_run=False, least_age_us=int(2 * self.LONGEST * 1e6),
            )  # fmt: skip
            assert not swept.skipped
        except failpoints.FailpointHit:
            pass
        finally:
            failpoints.disarm()
            DirectoryReplica._its_clock = clock  # type: ignore[method-assign]
        for job, known in self.truth.items():
            live, tagged = self._live(job), set(self.tags[job].values())
            for place, version in enumerate(reversed(live)):
                kept = (
                    place == 0 or version in tagged or place < last or (every and version % every == 0)
                    or not (last or every)
                )  # fmt: skip
                if not kept:
                    self.dropped[job].add(version)
            assert known

    @invariant()
    def everything_retained_is_there(self) -> None:
        for job, known in self.truth.items():
            if not known:
                continue
            found = {m.version for m in self.shelf.open().history(job)}
            tagged = set(self.tags[job].values())
            for version in self._live(job):
                if version in found:
                    assert filled(self.shelf.open().load(job, version=version)) == known[version]
                else:  # only a tag kept it, and the tag moved
                    assert (job, version) in self.ever_tagged
                    assert version not in tagged
                    self.dropped[job].add(version)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# --- a storm of processes ------------------------------------------------------------------------------------

STORM = """
import os, random, sys, time
import numpy as np
from pathlib import Path
from sublet.core.checkpoints import checkpoint
from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.core.errors import Damaged, HeadMoved, NotDurable, NotFound, BadInput
from sublet.core.checkpoints.retention import Retention
from sublet.ledger.engines.sqlite.engine import open_ledger
from sublet.ports.ledger import LeaseKey
from sublet.store import checkpoints
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.replicas.quorum import Replicas
from sublet.store.upkeep.sweeping import Sweep
from sublet.testing.clock import VirtualClock

role, seconds, url, epoch, secret, *folders = sys.argv[1:]
LONGEST = 1_500_000  # of a save here; a sweep deletes what is older than twice this
checkpoint.LONGEST_SAVE_US = checkpoints.LONGEST_SAVE_US = LONGEST

class Held:
    key = LeaseKey("holder", int(epoch), secret)
    def check(self): pass

ledger = open_ledger(url, VirtualClock())
store = CheckpointStore(Replicas([DirectoryReplica(Path(f)) for f in folders], ReplicaPolicy(replicas=len(folders))), lambda: ledger)
rng = random.Random(role)
until = time.monotonic() + float(seconds)
done = 0

def state(fill):
    return {"a": np.full(1 << 20, 7, np.uint8), "b": np.full(3000, fill % 251, np.uint8), "n": fill}

def check(loaded):
    assert (loaded["a"] == 7).all()
    assert set(loaded["b"].tolist()) == {loaded["n"] % 251}, "mixed"

def head(name):
    found = ledger.head(name)
    return found.version if found else 0

def retained(name, version):
    now = ledger.versions(name)
    return version >= now.head.floor or any(k.version == version for k in now.kept)

def attempt(name, version, work):
    # What is retained must work. What fails must have been dropped, and once dropped it stays so.
    try:
        work()
        return 1
    except HeadMoved:
        return 0
    except (Damaged, NotFound, NotDurable):
        if retained(name, version):
            raise AssertionError(f"version {version} of {name} is retained")
        return 0

def choose():
    name = "job-" + rng.choice("01")
    now = ledger.versions(name)
    oldest = max(now.head.floor, 1)
    return name, rng.choice([*range(oldest, now.head.version + 1), *(k.version for k in now.kept)])

while time.monotonic() < until:
    if role.startswith("save"):
        name = "job-" + role[-1]
        try:
            store.save(name, state(rng.randrange(10**6)), expected_version=head(name), lease=Held())
            done += 1
        except HeadMoved:
            pass
    elif role == "load":
        name, version = choose()
        if rng.random() < 0.3:
            version = head(name)
            done += attempt(name, version, lambda: check(store.load(name)))
        else:
            done += attempt(name, version, lambda: check(store.load(name, version=version)))
    elif role == "move":
        name, version = choose()
        what = rng.randrange(3)
        if what == 0 and version != head(name):
            done += attempt(name, version, lambda: store.rollback(name, version))
        elif what == 1:
            new = f"fork-{rng.randrange(10**9)}"
            if attempt(name, version, lambda: store.fork(name, new, version)):
                check(store.load(new))
                done += 1
        elif what == 2:
            if attempt(name, version, lambda: store.tag(name, version, "best")):
                check(store.load(name, version="best"))
                done += 1
        time.sleep(0.02)
    else:
        try:
            swept = Sweep(store._replicas.replicas, ledger, store.lineage, role).run(
                name=None, rule=Retention(last=3, every=7), older_than_us=2 * LONGEST, nobody_is_saving=False,
                dry_run=False, least_age_us=2 * LONGEST,
            )
            done += len(swept.removed)
        except HeadMoved:
            pass  # the other sweep was faster
        time.sleep(0.05)
print(done)
"""


def test_sweeps_among_savers_readers_and_movers(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, replicas=2)
    try:
        key = shelf.lease.key
        roles = ["save0", "save1", "load", "move", "sweep0", "sweep1"]
        for n in (0, 1):
            shelf.store.save(
                f"job-{n}",
                {"a": np.full(1 << 20, 7, np.uint8), "b": np.full(3000, 0, np.uint8), "n": 0},
                expected_version=0,
                lease=shelf.lease,
            )
        children = {
            role: forked.Forked(
                [sys.executable, "-c", STORM, role, str(STORM_SECONDS), shelf.rig.url, str(key.epoch), key.secret,
                 *map(str, shelf.folders)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for role in roles
        }  # fmt: skip
        done = {}
        for role, child in children.items():
            out, err = child.communicate(timeout=STORM_SECONDS + 60)
            assert child.returncode == 0, f"{role}: {err[-3000:]}"
            done[role] = int(out)
        swept = done.pop("sweep0") + done.pop("sweep1")  # one may have been faster each time
        assert swept > 0
        assert all(count > 0 for count in done.values()), done
        store = shelf.open()
        for versions_ in shelf.rig.ledger.all_versions():
            for manifest in store.history(versions_.head.job):
                loaded = store.load(versions_.head.job, version=manifest.version)
                assert set(loaded["b"].tolist()) == {loaded["n"] % 251}
        assert shelf.rig.faults() == []
    finally:
        shelf.close()
