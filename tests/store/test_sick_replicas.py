"""Replicas that are full, read-only, slow, gone, lying, or whose disk fails at the last moment (C1, C3, C6).

With one of three sick a save is made and loads; with two it fails, names both, moves nothing and leaves nothing lying about. When they
are well again the next save works. Where the kernel can make a disk sick it does, for a save here and for one behind, in its own process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.core.errors import QuorumNotReached
from sublet.machine import failpoints
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.replicas.quorum import Replicas
from tests.conftest import need
from tests.in_memory import in_memory
from tests.store.rig import JOB, Shelf

SIZE = 3 << 20


def a_state(seed: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8), "n": seed}


def same(found: dict[str, Any], seed: int) -> bool:
    wanted = a_state(seed)
    return bool(np.array_equal(found["w"], wanted["w"])) and found["n"] == seed


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """In memory, with a store of its own for every disk."""
    with in_memory() as folder:
        made = Shelf(folder)
        yield made
        made.close()


def save(shelf: Shelf, seed: int, *, behind: bool) -> Any:
    verb = shelf.store.save_behind if behind else shelf.store.save
    saved = verb(JOB, a_state(seed), expected_version=shelf.version, lease=shelf.lease)
    return saved.result(60) if behind else saved  # type: ignore[union-attr]


def settled(shelf: Shelf) -> None:
    """What failed behind is said once more at the next call."""
    with contextlib.suppress(QuorumNotReached):
        shelf.store.settle()


# --- disks the kernel makes sick ---------------------------------------------------------------------------------


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    need(done.returncode == 0, f"root, to mount ({done.stderr.strip()})")


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """A disk of its own with a megabyte left."""
    kept = folder.with_name(f"{folder.name}-kept")
    used = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    folder.rename(kept)
    folder.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", f"size={used + (1 << 20)}", "none", str(folder))
        try:
            shutil.copytree(kept, folder, dirs_exist_ok=True)
            yield
            shutil.rmtree(kept)
            shutil.copytree(folder, kept)
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=False)
    finally:
        folder.rmdir()
        kept.rename(folder)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        for part in folder.iterdir():
            part.chmod(0o500)
        yield
        for part in folder.iterdir():
            part.chmod(0o700)
        return
    _mount("--bind", str(folder), str(folder))
    try:
        _mount("-o", "remount,bind,ro", str(folder))
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.contextmanager
def gone(folder: Path) -> Iterator[None]:
    away = folder.with_name(f"{folder.name}-away")
    folder.rename(away)
    yield
    away.rename(folder)


@contextlib.contextmanager
def a_file(folder: Path) -> Iterator[None]:
    """Somebody put a file where the folder was."""
    away = folder.with_name(f"{folder.name}-away")
    folder.rename(away)
    folder.write_bytes(b"?")
    yield
    folder.unlink()
    away.rename(folder)


WORDS = {
    full: "No space left",
    read_only: "Read-only|Permission",
    gone: "No such file",
    a_file: "Not a directory",
}


@pytest.mark.parametrize("behind", [False, True], ids=["save", "behind"])
@pytest.mark.parametrize("sickness", WORDS, ids=lambda s: s.__name__)
def test_sick_disks(
    shelf: Shelf, sickness: Callable[[Path], AbstractContextManager[None]], behind: bool
) -> None:
    save(shelf, 1, behind=behind)
    with sickness(shelf.folders[1]):
        save(shelf, 2, behind=behind)
        assert same(shelf.load(), 2)
        assert len(list((shelf.folders[1]).glob("drafts/*"))) == 0
        with sickness(shelf.folders[0]):
            before = shelf.rig.ledger.head(JOB)
            for _ in range(2):
                with pytest.raises(QuorumNotReached, match=WORDS[sickness]) as caught:
                    save(shelf, 3, behind=behind)
                settled(shelf)
                named = [r.name in caught.value.message for r in shelf.replicas]
                assert named == [True, True, False], caught.value.message
            assert shelf.rig.ledger.head(JOB) == before
            assert same(shelf.load(), 2)
            assert shelf.files("drafts") == []
    assert shelf.files("drafts") == []
    saved = save(shelf, 4, behind=behind)
    assert saved.version == 3
    shelf.lose(2)
    assert same(shelf.load(), 4), "who was sick is well, and has it"
    assert same(shelf.load(version=1), 1)


@pytest.mark.parametrize("behind", [False, True], ids=["save", "behind"])
def test_files_that_may_not_grow(shelf: Shelf, behind: bool) -> None:
    """Every disk full at once, also for who is not root: a limit on the size of files."""
    save(shelf, 1, behind=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(QuorumNotReached, match="too large") as caught:
            save(shelf, 2, behind=behind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    settled(shelf)
    assert all(r.name in caught.value.message for r in shelf.replicas)
    assert shelf.version == 1
    assert shelf.files("drafts") == []
    assert same(shelf.load(), 1)
    shelf.store.close()
    shelf.store = shelf.open()  # another writer: limits are inherited
    assert save(shelf, 2, behind=behind).version == 2
    assert same(shelf.load(), 2)


# --- disks that fail at the last moment --------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, call: str, folders: list[Path], only: str = "") -> None:
    """This call fails below these folders, with an error of the disk."""
    real = getattr(os, call)

    def fail(fd: Any, *args: Any, **kwargs: Any) -> Any:
        where = kwargs.get("dst_dir_fd", fd)
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
        if any(path.startswith(str(f)) for f in folders) and only in path:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, *args, **kwargs)

    monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize(
    ("call", "only"),
    [("fsync", "drafts/pack"), ("fsync", "drafts/manifest"), ("fsync", "packs"), ("fsync", "manifests"), ("pwritev", ""),
     ("ftruncate", ""), ("link", "packs"), ("link", "manifests"), ("write", ""), ("open", "")],
)  # fmt: skip
def test_calls_that_fail(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, call: str, only: str) -> None:
    save(shelf, 1, behind=False)
    if call == "open":
        folders = [str(f) for f in shelf.folders]
        real = os.open

        def no_open(path: Any, *args: Any, **kwargs: Any) -> int:
            if str(path) in sick:
                raise OSError(errno.EMFILE, "Too many open files")
            return real(path, *args, **kwargs)

    for number in (1, 2):
        with monkeypatch.context() as patched:
            if call == "open":
                sick = folders[:number]
                patched.setattr(os, "open", no_open)
            else:
                failing(patched, call, shelf.folders[:number], only)
            if number == 1:
                save(shelf, 2, behind=False)
                continue
            with pytest.raises(QuorumNotReached, match=r"Input/output|Too many") as caught:
                save(shelf, 3, behind=False)
            named = [r.name in caught.value.message for r in shelf.replicas]
            assert named == [True, True, False], caught.value.message
        assert shelf.version == 2
        assert shelf.files("drafts") == []
    assert same(shelf.load(), 2)
    save(shelf, 3, behind=False)
    shelf.lose(2)
    assert same(shelf.load(), 3)
    assert same(shelf.load(version=1), 1)


@pytest.mark.parametrize(
    "place",
    ["after_chunk_write", "after_chunk_fsync", "after_publish", "between_replicas", "before_manifest"],
)
@pytest.mark.parametrize("lost", [1, 2])
def test_folders_that_vanish_in_the_middle(shelf: Shelf, place: str, lost: int) -> None:
    """Whoever vanishes after it had confirmed is a lost replica like any other; before, it has not confirmed."""
    save(shelf, 1, behind=False)
    vanished: list[Path] = []

    def vanish() -> None:
        if not vanished:
            for folder in shelf.folders[-lost:]:
                folder.rename(f"{folder}-away")
                vanished.append(folder)

    failpoints.arm(place, vanish)
    if lost == 1:
        save(shelf, 2, behind=False)
    else:
        with pytest.raises(QuorumNotReached) as caught:
            save(shelf, 2, behind=False)
        assert [r.name in caught.value.message for r in shelf.replicas] == [False, True, True]
    failpoints.disarm()
    assert vanished
    assert shelf.version == 3 - lost
    for folder in vanished:
        Path(f"{folder}-away").rename(folder)
    assert shelf.files("drafts") == []
    assert same(shelf.load(), 3 - lost)
    save(shelf, 5, behind=False)
    shelf.lose(0)
    assert same(shelf.load(), 5)
    assert same(shelf.load(version=1), 1)


# --- replicas that lie, or take their time -------------------------------------------------------------------------


class Liar(DirectoryReplica):
    """Whatever is asked for is there, and is something else."""

    def has_pack(self, pack: str) -> bool:
        return True

    def read_pack(self, pack: str, at: int, into: memoryview) -> bool:
        super().read_pack(pack, at, into)
        into[0] ^= 1
        return True

    def get_manifest(self, digest: str) -> bytes | None:
        return (super().get_manifest(digest) or b"{}").replace(b'"version":', b'"version":1')


class Slow(DirectoryReplica):
    def begin_pack(self, size: int) -> Any:
        time.sleep(0.1)
        return super().begin_pack(size)

    def put_manifest(self, digest: str, data: bytes) -> None:
        time.sleep(0.1)
        super().put_manifest(digest, data)

    def read_pack(self, pack: str, at: int, into: memoryview) -> bool:
        time.sleep(0.02)
        return super().read_pack(pack, at, into)


def with_sick(shelf: Shelf, kind: type[DirectoryReplica], numbers: tuple[int, ...]) -> CheckpointStore:
    replicas = [kind(r.path) if n in numbers else r for n, r in enumerate(shelf.replicas)]
    ledger = shelf.rig.open()
    return CheckpointStore(Replicas(replicas, shelf.policy), lambda: ledger)


@pytest.mark.parametrize("numbers", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_liars_are_not_believed(shelf: Shelf, numbers: tuple[int, ...]) -> None:
    """C3: while one copy is true it is what is loaded, however many lie; nobody is repaired from a lie."""
    with with_sick(shelf, Liar, numbers) as store:
        for version in range(3):
            store.save(JOB, a_state(version), expected_version=version, lease=shelf.lease)
            assert same(store.load(JOB), version)
        assert same(store.load(JOB, version=1), 0)
        store.repair(JOB)
        assert same(store.load(JOB), 2)
    for number in range(3):  # on the disks everything is true
        if number not in numbers:
            assert same(shelf.load(), 2)


def test_nothing_but_liars(shelf: Shelf) -> None:
    """C4: an error that names them, and never a byte."""
    save(shelf, 1, behind=False)
    with with_sick(shelf, Liar, (0, 1, 2)) as store:
        target = {"w": np.zeros(SIZE, np.uint8), "n": 0}
        with pytest.raises(Exception, match="in good order") as caught:
            store.load(JOB, into=target)
        assert all(r.name in str(caught.value) for r in shelf.replicas)
        assert not target["w"].any()


def test_the_slow_are_waited_for(shelf: Shelf) -> None:
    with with_sick(shelf, Slow, (1,)) as store:
        for version in range(2):
            store.save(JOB, a_state(version), expected_version=version, lease=shelf.lease)
    assert same(shelf.load(), 1)
    assert len(list(shelf.folders[1].glob("packs/*"))) == 2, "it is slow, and has everything"
