"""The maker of power cuts itself: what it calls legal, that it loses nothing that was synced, and that it finds what it should."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash_states import SECTOR, Crash, crash_states, recording


def put(path: Path, data: bytes, *, sync: bool = True) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, data)
    if sync:
        os.fsync(fd)
    os.close(fd)


def sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def contents(log: object, count: int = 400) -> set[bytes | None]:
    """Everything 'f' may hold after a power cut; None: it is not there."""
    return {crash.tree().get("f") for crash in crash_states(log, count=count, seed=1)}  # type: ignore[arg-type]


def test_a_sync_of_both_is_what_makes_a_file_durable(tmp_path: Path) -> None:
    with recording(tmp_path) as log:
        put(tmp_path / "f", b"x" * 700)
        sync(tmp_path)
        log.mark("done")
    log.check_complete()
    done = [c.tree() for c in crash_states(log, count=400, seed=1) if "done" in c.marks]
    assert done
    assert all(tree == {"f": b"x" * 700} for tree in done)
    assert {None, b"", b"x" * 700} < contents(log)


@pytest.mark.parametrize("lost", ["file", "folder"])
def test_without_one_of_them_it_is_not(tmp_path: Path, lost: str) -> None:
    with recording(tmp_path) as log:
        put(tmp_path / "f", b"x" * 700, sync=lost != "file")
        if lost != "folder":
            sync(tmp_path)
        log.mark("done")
    done = {c.tree().get("f") for c in crash_states(log, count=400, seed=1) if "done" in c.marks}
    assert len(done) > 1
    if lost == "file":
        assert {b"", b"x" * 700, b"x" * SECTOR, bytes(700), bytes(SECTOR) + b"x" * (700 - SECTOR)} <= done
    else:
        assert done == {None, b"x" * 700}


def test_writes_are_torn_at_sectors_and_lengths_come_without_bytes(tmp_path: Path) -> None:
    put(tmp_path / "f", b"a" * 2048)
    with recording(tmp_path) as log:
        fd = os.open(tmp_path / "f", os.O_RDWR)
        os.pwrite(fd, b"b" * 1024, 256)
        os.close(fd)
    assert log.files
    found = contents(log)
    assert len(found) == 8, "three sectors are touched: 256 to 512, 512 to 1024, 1024 to 1280"
    assert b"a" * 512 + b"b" * 512 + b"a" * 1024 in found
    assert all(c is not None and len(c) == 2048 and c[:256] == b"a" * 256 for c in found)
    with recording(tmp_path) as log:
        fd = os.open(tmp_path / "f", os.O_RDWR)
        os.pwritev(fd, [b"c" * 512, b"d" * 512], 2048)
        os.close(fd)
    lengths = {len(c or b"") for c in contents(log)}
    assert lengths == {2048, 2560, 3072}
    assert any(c is not None and b"\xde\xad" in c for c in contents(log))


def test_names_come_and_go_in_any_order(tmp_path: Path) -> None:
    for name in ("a", "b"):
        put(tmp_path / name, name.encode())
    (tmp_path / "other").mkdir()
    with recording(tmp_path) as log:
        os.link(tmp_path / "a", tmp_path / "f")
        os.unlink(tmp_path / "a")
        os.rename(tmp_path / "b", tmp_path / "c")
        os.rename(tmp_path / "f", tmp_path / "other" / "f")
        os.mkdir(tmp_path / "new")
    log.check_complete()
    trees = [frozenset(c.tree()) for c in crash_states(log, count=2000, seed=3)]
    assert {frozenset({"other", "c"}), frozenset({"other", "a", "f", "b", "new"})} <= set(trees)
    assert any("f" not in t and "other/f" not in t and "a" not in t for t in trees), (
        "lost between two folders"
    )
    assert any("f" in t and "other/f" in t for t in trees)
    assert all(("b" in t) != ("c" in t) for t in trees), "a rename in one folder is whole"


def test_a_sync_of_one_file_says_nothing_of_another(tmp_path: Path) -> None:
    with recording(tmp_path) as log:
        put(tmp_path / "f", b"f", sync=False)
        put(tmp_path / "g", b"g")
        sync(tmp_path)
        log.mark("done")
    last = [c.tree() for c in crash_states(log, count=400, seed=1) if "done" in c.marks]
    assert {t["f"] for t in last} >= {b"", b"f"}
    assert {t["g"] for t in last} == {b"g"}


def test_a_number_the_kernel_gave_twice_is_two_files(tmp_path: Path) -> None:
    with recording(tmp_path) as log:
        for fill in (b"1", b"2", b"3"):
            put(tmp_path / "f", fill)
            if fill != b"3":
                os.unlink(tmp_path / "f")
    log.check_complete()
    assert contents(log) == {None, b"", b"\0", b"\xde", b"1", b"2", b"3"}


def test_what_goes_past_the_recorder_is_found(tmp_path: Path) -> None:
    with recording(tmp_path) as log:
        (tmp_path / "f").write_bytes(b"x")
    with pytest.raises(AssertionError, match="past the recorder: f"):
        log.check_complete()


def test_the_same_seed_gives_the_same_states(tmp_path: Path) -> None:
    with recording(tmp_path) as log:
        put(tmp_path / "f", os.urandom(5000), sync=False)
    one, two = ([repr(c) for c in crash_states(log, count=50, seed=s)] for s in (5, 5))
    assert one == two
    assert one != [repr(c) for c in crash_states(log, count=50, seed=6)]
    crash = next(iter(crash_states(log, count=1, seed=5)))
    assert Crash(log, crash.prefix, crash.kind, crash.seed).tree() == crash.tree()


def test_it_is_over_when_the_program_goes_on(tmp_path: Path) -> None:
    real = os.fsync
    with recording(tmp_path):
        assert os.fsync is not real
    assert os.fsync is real


# --- two slots, as blocks have them: the smallest program that must not lose anything --------------------------

SLOT = 1024


def right(fd: int, number: int, value: bytes) -> None:
    import hashlib

    body = number.to_bytes(8, "little") + value
    os.pwrite(fd, hashlib.sha256(body).digest() + body, number % 2 * SLOT)
    os.fsync(fd)


def same_slot(fd: int, number: int, value: bytes) -> None:
    right(fd, number * 2, value)


def no_sync(fd: int, number: int, value: bytes) -> None:
    import hashlib

    body = number.to_bytes(8, "little") + value
    os.pwrite(fd, hashlib.sha256(body).digest() + body, number % 2 * SLOT)


def newest(data: bytes) -> bytes | None:
    import hashlib

    found = []
    for at in (0, SLOT):
        seal, body = data[at : at + 32], data[at + 32 : at + SLOT]
        if len(body) == SLOT - 32 and hashlib.sha256(body).digest() == seal:
            found.append((int.from_bytes(body[:8], "little"), body[8:]))
    return max(found)[1] if found else None


@pytest.mark.parametrize(("store", "safe"), [(right, True), (same_slot, False), (no_sync, False)])
def test_two_slots(tmp_path: Path, store: Callable[[int, int, bytes], None], safe: bool) -> None:
    values = [bytes([65 + n]) * (SLOT - 40) for n in range(5)]
    with recording(tmp_path) as log:
        fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 2 * SLOT)
        os.fsync(fd)
        sync(tmp_path)
        for number, value in enumerate(values):
            store(fd, number, value)
            log.mark(str(number))
        os.close(fd)
    log.check_complete()
    wrong = []
    for crash in crash_states(log, count=500, seed=11):
        done = len(crash.marks)
        if done and newest(crash.tree()["f"] or b"") not in values[done - 1 : done + 1]:
            wrong.append(crash)
    assert bool(wrong) is not safe, wrong[:1]
