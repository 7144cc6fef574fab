"""The power goes off at any moment of a save, a repair, or the first opening of a replica (C1, C6).

Real code writes to real folders; `tests/crash_states.py` makes from its calls what the disks may look like afterwards. In each of these
states the head's version loads bit-exactly from every quorum, nothing under a published name is partial, and the next save works.
A few hundred states here, `SUBLET_CRASH_STATES` in `make proof`.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.core.checkpoints import checkpoint
from sublet.core.errors import NotFound
from sublet.ledger.engines.sqlite.engine import open_ledger
from sublet.machine import failpoints
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas import directory
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.replicas.quorum import Replicas
from sublet.store.save.packing import digest
from sublet.testing.clock import VirtualClock
from tests.crash_states import Crash, Log, crash_states, recording
from tests.in_memory import in_memory
from tests.seeds import SEED
from tests.store.rig import JOB, Shelf

STATES = int(os.environ.get("SUBLET_CRASH_STATES", "300"))

pytestmark = pytest.mark.timeout(120 + STATES // 5)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in a pack of a few kilobytes."""
    monkeypatch.setattr(checkpoint, "GROUP_BYTES", 2048)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 8192)


@pytest.fixture
def place() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


def a_state(version: int) -> dict[str, Any]:
    rng = random.Random(version)
    return {
        "w": np.frombuffer(rng.randbytes(19_000), np.uint8),
        "frozen": np.frombuffer(b"same" * 1000, np.uint8),
        "b": rng.randbytes(100),
        "n": version,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        np.array_equal(one[k], other[k]) if isinstance(one[k], np.ndarray) else one[k] == other[k]
        for k in other
    )


class Story:
    """What happened, in one log, and a copy of the ledger as it was at each version."""

    def __init__(self, place: Path, kind: type[DirectoryReplica] = DirectoryReplica) -> None:
        self.place = place
        self.kind = kind
        (place / "disks").mkdir()
        self.copies: dict[int, Path] = {}
        self.log = Log(place)
        self.shelf: Shelf

    def keep_ledger(self) -> None:
        path = self.place / f"at{self.shelf.version}.db"
        self.shelf.rig.sql("VACUUM INTO ?", str(path))
        shutil.copy(path, path.with_suffix(".kept"))
        shutil.copy(
            f"{self.shelf.rig.url.removeprefix('sqlite:')}-stamp", path.with_suffix(".stamp")
        )  # or it is a copy from the past
        self.copies[self.shelf.version] = path

    def saves(self, versions: int) -> None:
        """From empty disks on."""
        with recording(self.place / "disks") as self.log:
            self.shelf = Shelf(self.place, disks=self.place / "disks" / "of" / "all", kind=self.kind)
            self.keep_ledger()
            for version in range(1, versions + 1):
                # From here on the ledger may have it, whether or not it could say so.
                failpoints.arm("after_quorum", lambda v=version: self.log.mark(f"committing {v}"))
                self.shelf.save(a_state(version), version - 1)
                self.log.mark(f"committed {version}")
                self.keep_ledger()
        failpoints.disarm()
        self.log.check_complete()

    def check(self, states: int, *, seed: int = SEED) -> int:
        """How many states were looked at; fails with the one that is wrong."""
        root = self.place / "after"
        folders = [root / f.relative_to(self.place / "disks") for f in self.shelf.folders]
        replicas = [DirectoryReplica(f) for f in folders]
        ledgers = {v: open_ledger(f"sqlite:{p}", VirtualClock()) for v, p in self.copies.items()}
        whole = {Path(p).name: data for p, data in self.log.at_end().items() if "drafts/" not in p and data}
        looked = 0
        for crash in crash_states(self.log, count=states, seed=seed):
            crash.write_to(root)
            self._check_names(crash, folders, whole)
            begun = max((v for v in self.copies if f"committing {v}" in crash.marks), default=0)
            ended = max((v for v in self.copies if f"committed {v}" in crash.marks), default=0)
            for version in {begun, ended}:
                self._check_head(crash, version, replicas, ledgers[version])
            if looked % 10 == 0:
                self._check_next(crash, ended, replicas)
            looked += 1
        for ledger in ledgers.values():
            ledger.close()
        return looked

    def _check_names(self, crash: Crash, folders: list[Path], whole: dict[str, bytes | None]) -> None:
        for path in itertools.chain.from_iterable(f.glob("[pm]a*s/*") for f in folders):
            data = path.read_bytes()
            whole_it_is = data == whole.get(
                path.name
            )  # not in the assertion: explaining how bytes differ takes minutes
            assert whole_it_is, f"{path.name} is partial: {crash}"
            if path.suffix == ".json":
                assert digest(data) == path.stem

    def _check_head(self, crash: Crash, version: int, replicas: list[DirectoryReplica], ledger: Any) -> None:
        store = CheckpointStore(Replicas(replicas, self.shelf.policy), lambda: ledger)
        if version == 0:
            with pytest.raises(NotFound):
                store.load(JOB)
            return
        head = ledger.head(JOB)
        assert head.version == version
        having = [r for r in replicas if r.get_manifest(head.digest) is not None]
        assert len(having) >= self.shelf.policy.write_quorum, f"manifest {version} is lost: {crash}"
        good: dict[str, int] = {}
        for _, pack, how in store.verify(JOB):
            good[pack] = good.get(pack, 0) + (how == "good")
        assert min(good.values()) >= self.shelf.policy.write_quorum, f"packs of {version} are lost: {crash}"
        assert same(store.load(JOB), a_state(version)), f"version {version} is another one: {crash}"
        store.close()

    def _check_next(self, crash: Crash, version: int, replicas: list[DirectoryReplica]) -> None:
        folder = self.place / "next"  # its own: an engine leaves more than one file
        folder.mkdir()
        path = folder / "ledger.db"
        shutil.copy(self.copies[version].with_suffix(".kept"), path)
        shutil.copy(self.copies[version].with_suffix(".stamp"), f"{path}-stamp")
        ledger = open_ledger(f"sqlite:{path}", VirtualClock())
        for replica in replicas:
            replica.check()
        store = CheckpointStore(Replicas(replicas, self.shelf.policy), lambda: ledger)
        store.save(JOB, a_state(99), expected_version=version, lease=self.shelf.lease)
        again = CheckpointStore(Replicas(replicas[::-1], self.shelf.policy), lambda: ledger)
        assert same(again.load(JOB), a_state(99)), f"the next save does not load: {crash}"
        store.close(), ledger.close(), shutil.rmtree(folder)


def test_power_cuts_during_saves(place: Path) -> None:
    """The first opening of three replicas, a first save, and one that shares chunks with it."""
    story = Story(place)
    story.saves(3)
    assert story.check(STATES) >= min(STATES, 300)
    story.shelf.close()


def test_power_cuts_during_a_repair(place: Path) -> None:
    """A bad copy is set aside and replaced: whenever the power goes, the head loads, and no good copy was given up for it."""
    story = Story(place)
    story.saves(2)
    files = sorted(story.shelf.folders[0].glob("[pm]a*s/*"))
    good = {p.name: p.read_bytes() for p in files}
    for path in files:
        path.write_bytes(b"bad" + path.read_bytes()[3:])
    with recording(place / "disks") as story.log:
        story.log.mark("committing 2"), story.log.mark("committed 2")
        shelf = story.shelf
        assert same(shelf.load(), a_state(2))
        shelf.store.repair(JOB)
    story.log.check_complete()
    assert len(files) == 4
    assert {p.name: p.read_bytes() for p in files} == good
    root = place / "after"
    folders = [root / f.relative_to(place / "disks") for f in story.shelf.folders]
    replicas = [DirectoryReplica(f) for f in folders]
    ledger = open_ledger(f"sqlite:{story.copies[2]}", VirtualClock())
    looked = 0
    for crash in crash_states(story.log, count=max(STATES // 4, 60), seed=SEED):
        if "committed 2" not in crash.marks:
            continue
        crash.write_to(root)
        for path in folders[0].glob("[pm]a*s/*"):
            assert path.read_bytes() in (good.get(path.name), b"bad" + good[path.name][3:]), crash
        store = CheckpointStore(Replicas(replicas, story.shelf.policy), lambda: ledger)
        assert same(store.load(JOB), a_state(2)), crash
        assert same(store.load(JOB, version=1), a_state(1)), crash
        store.close()
        looked += 1
    assert looked >= 50
    ledger.close(), story.shelf.close()


# --- it finds what it should -----------------------------------------------------------------------------------


def mutant(*changes: tuple[str, str]) -> type[DirectoryReplica]:
    """The source with something wrong in it."""
    path = Path(directory.__file__)
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"the source no longer has {old!r} once"
        text = text.replace(old, new)
    spec = importlib.util.spec_from_loader("mutant", loader=None)
    assert spec is not None
    module: types.ModuleType = importlib.util.module_from_spec(spec)
    exec(compile(text, "mutant", "exec"), module.__dict__)
    made: type[DirectoryReplica] = module.DirectoryReplica
    return made


SYNC_PACK = "            os.fsync(self._fd)\n"
PUBLISH_PACK = '            self._replica.publish_draft(self._drafts, self._name, "packs", f"{pack}.pack")\n'
CUT_PACK = "            os.ftruncate(self._fd, pieces[-1].end if pieces else 0)\n"
MAKE_FOLDER = "                make_folder(self.path / folder, private=True)\n"
NOT_DURABLY = "                (self.path / folder).mkdir(parents=True, exist_ok=True)\n"
MUTANTS: dict[str, list[tuple[str, str]]] = {
    "a pack is not synced": [(SYNC_PACK, "")],
    "a pack is cut after its sync": [(CUT_PACK, ""), (SYNC_PACK, SYNC_PACK + CUT_PACK)],
    "a pack is published before its sync": [(SYNC_PACK, ""), (PUBLISH_PACK, PUBLISH_PACK + SYNC_PACK)],
    "a manifest is not synced": [("                        os.fsync(fd)\n", "")],
    "a manifest is published before its sync": [
        ("                        os.fsync(fd)\n", ""),
        (
            '                    self.publish_draft(drafts, draft, *self._place("manifest", digest))\n',
            '                    self.publish_draft(drafts, draft, *self._place("manifest", digest))\n'
            "                    fd2 = os.open(draft, os.O_RDONLY, dir_fd=drafts); os.fsync(fd2); os.close(fd2)\n",
        ),
    ],
    "the folder is not synced": [("                os.fsync(place)\n", "                pass\n")],
    "the drafts are synced instead": [("                os.fsync(place)\n", "                os.fsync(drafts)\n")],
    "the folder is synced before the link": [
        ("                os.fsync(place)\n", "                pass\n"),
        ("            linked = False\n", "            linked = False; os.fsync(place)\n"),
    ],
    "new folders are not synced": [
        (MAKE_FOLDER, NOT_DURABLY),
        ("            sync_path(self.path)\n", ""),
    ],
    "the folders above are not synced": [
        (MAKE_FOLDER, NOT_DURABLY),
        ("                sync_path(self.path.parent)\n", "                pass\n"),
    ],
    "a pack is renamed from a draft that is not synced": [
        (SYNC_PACK, ""),
        ("os.link(draft, final, src_dir_fd=drafts, dst_dir_fd=place, follow_symlinks=False)",
         "os.rename(draft, final, src_dir_fd=drafts, dst_dir_fd=place)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", MUTANTS, ids=lambda w: w.replace(" ", "-"))
def test_it_finds(place: Path, what: str) -> None:
    story = Story(place, mutant(*MUTANTS[what]))
    story.saves(2)
    with pytest.raises(AssertionError, match=r"Crash\("):
        story.check(400)
    story.shelf.close()


def test_a_mutant_without_a_change_is_none(place: Path) -> None:
    story = Story(place, mutant())
    story.saves(2)
    assert story.check(60) == 60
    story.shelf.close()
