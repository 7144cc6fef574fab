"""Regions on a disk: power cuts, bit flips, full disks, links where files belong (C6, C7, threats 8 and 9)."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sublet.core.checkpoints.region import Bad, Empty, Good, SlotHeader, capacity_bytes, pick, slot_at
from sublet.core.errors import BadInput, BlockTooSmall, Damaged, Fenced, NotDurable, NothingSaved, SubletError
from sublet.core.leasing.block import BLOCK_BYTES, UNKNOWN_SEQUENCE
from sublet.store.regions import DirectoryRegions, FileRegion
from tests.conftest import need
from tests.core.leasing.test_block import traversals
from tests.in_memory import in_memory

ID = "B" + "0123456789" * 2
BLOCKS = 8
SECTOR = 512
FLIPS = int(os.environ.get("SUBLET_BLOCK_FLIPS", "600"))
CRASHES = int(os.environ.get("SUBLET_BLOCK_CRASHES", "400"))


@pytest.fixture
def quick() -> Iterator[DirectoryRegions]:
    with in_memory() as folder:
        yield DirectoryRegions(folder / "blocks")


@pytest.fixture
def regions(tmp_path: Path) -> DirectoryRegions:
    return DirectoryRegions(tmp_path / "home" / "blocks")


def value(sequence: int, size: int = 5000) -> bytes:
    return random.Random(sequence).randbytes(size)


def put(region: FileRegion, slot: int, sequence: int, epoch: int = 1, size: int = 5000) -> str:
    header = SlotHeader(block_id=ID, sequence=sequence, epoch=epoch, length=size, codec="raw")
    data = value(sequence, size)
    return region.write(slot, header, [memoryview(data[:100]), memoryview(b""), memoryview(data[100:])])


def read_back(region: FileRegion, sequence: int, digest: str) -> tuple[int, bytes]:
    """As a restore does it."""
    read = [region.read(0), region.read(1)]
    picked = pick((read[0][0], read[1][0]), sequence, digest)
    return picked.good.header.sequence, bytes(read[picked.slot][1])


# --- the plain way -------------------------------------------------------------------------------------------


def test_what_was_written_is_there(regions: DirectoryRegions) -> None:
    region = regions.create(ID, 3, BLOCKS)
    assert region.slots() == (Empty(), Empty())
    first = put(region, 0, 1, epoch=3)
    assert isinstance(region.slots()[0], Good)
    assert region.slots()[1] == Empty()
    second = put(region, 1, 2, epoch=3, size=capacity_bytes(BLOCKS))
    assert read_back(region, 1, first) == (1, value(1))
    assert read_back(region, 2, second) == (2, value(2, capacity_bytes(BLOCKS)))
    put(region, 0, 3, epoch=3, size=0)
    assert read_back(region, UNKNOWN_SEQUENCE, "") == (3, b"")
    path = regions.path / f"{ID}.3"
    assert path.stat().st_size == BLOCKS * BLOCK_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert regions.path.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_blocks * 512 >= BLOCKS * BLOCK_BYTES, "its space is taken when it is made"
    assert [p.name for p in regions.path.iterdir()] == [f"{ID}.3"]
    assert (regions.known(), regions.present(ID)) == ([ID], True)
    assert regions.inspect(ID, BLOCKS) == region.slots()


def test_too_large_says_how_many_blocks_it_needs(regions: DirectoryRegions) -> None:
    region = regions.create(ID, 1, BLOCKS)
    digest = put(region, 0, 1)
    with pytest.raises(BlockTooSmall, match="it needs 10 blocks") as refused:
        put(region, 1, 2, size=capacity_bytes(BLOCKS) + 1)
    assert "blocks=10" in refused.value.remedy
    assert region.slots()[1] == Empty()
    assert read_back(region, 1, digest) == (1, value(1))
    regions.remove(ID)
    larger = regions.create(ID, 2, 10)
    put(larger, 1, 2, size=capacity_bytes(BLOCKS) + 1)


def test_a_value_that_changes_while_it_is_written_still_verifies(
    regions: DirectoryRegions, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, live = regions.create(ID, 1, BLOCKS), bytearray(value(1))
    real = os.pwrite

    def changing(fd: int, data: Any, at: int) -> int:
        live[2000:3000] = bytes(1000)
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", changing)
    header = SlotHeader(block_id=ID, sequence=1, epoch=1, length=len(live), codec="raw")
    digest = region.write(0, header, [memoryview(live)])
    assert read_back(region, 1, digest) == (1, value(1))


def test_short_writes_are_finished(regions: DirectoryRegions, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    region = regions.create(ID, 1, BLOCKS)
    digest = put(region, 1, 1)
    assert read_back(region, 1, digest) == (1, value(1))


# --- taking over ---------------------------------------------------------------------------------------------


def test_taking_over_moves_the_content_out_of_reach(regions: DirectoryRegions) -> None:
    """Fact 4: whoever still has the old region open writes where nobody looks."""
    old = regions.create(ID, 1, BLOCKS)
    digest = put(old, 0, 1)
    new = regions.take_over(ID, 2, BLOCKS, empty_ok=False)
    assert [p.name for p in regions.path.iterdir()] == [f"{ID}.2"]
    put(old, 1, 2)
    put(old, 0, 3)
    assert read_back(new, 1, digest) == (1, value(1))
    assert new.slots()[1] == Empty()
    again = regions.take_over(ID, 3, BLOCKS, empty_ok=False)
    assert read_back(again, 1, digest) == (1, value(1))


def test_one_that_comes_late_is_refused(regions: DirectoryRegions) -> None:
    regions.create(ID, 1, BLOCKS)
    regions.take_over(ID, 3, BLOCKS, empty_ok=False)
    for epoch in (2, 3):
        with pytest.raises(Fenced):
            regions.take_over(ID, epoch, BLOCKS, empty_ok=False)
    assert [p.name for p in regions.path.iterdir()] == [f"{ID}.3"]


def test_the_highest_epoch_is_the_block_whatever_lies_beside_it(regions: DirectoryRegions) -> None:
    """By number and not by name; one that was paused in its take-over leaves an older file, which goes with the next."""
    for epoch in (9, 10):
        region = regions.create(ID, epoch, BLOCKS)
        put(region, 0, epoch, epoch=epoch)
    other = "B" + "f" * 20
    put(regions.create(other, 99, BLOCKS), 0, 99)
    (regions.path / f"draft-{ID}.9-{'0' * 16}").write_bytes(b"left by a crash")
    new = regions.take_over(ID, 11, BLOCKS, empty_ok=False)
    assert read_back(new, UNKNOWN_SEQUENCE, "")[0] == 10
    assert sorted(p.name for p in regions.path.iterdir()) == sorted([f"{ID}.11", f"{other}.99"])
    assert regions.remove(ID) == 1
    assert regions.known() == [other]


def test_a_missing_region(regions: DirectoryRegions) -> None:
    assert not regions.present(ID)
    assert regions.inspect(ID, BLOCKS) is None
    assert regions.remove(ID) == 0
    assert regions.known() == []
    with pytest.raises(Damaged, match="missing"):
        regions.take_over(ID, 2, BLOCKS, empty_ok=False)
    assert regions.take_over(ID, 2, BLOCKS, empty_ok=True).slots() == (Empty(), Empty())


def test_a_forgotten_region_does_not_keep_its_file_open(regions: DirectoryRegions) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for epoch in range(1, 20):
        regions.take_over(ID, epoch, BLOCKS, empty_ok=True)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


# --- power cuts ----------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """Every change of the folder in the order it was asked for, as the kernel saw it."""

    log: list[tuple[Any, ...]] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def name(fd: int) -> str:
            # By inode: a draft and what it is linked to are one file.
            return "folder" if os.path.isdir(f"/proc/self/fd/{fd}") else str(os.fstat(fd).st_ino)

        def spy(call: str, note: Callable[..., tuple[Any, ...]], *, after: bool = False) -> None:
            real = getattr(os, call)

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if not after:
                    self.log.append(note(*args, **kwargs))
                result = real(*args, **kwargs)
                if after:
                    self.log.append(note(*args, **kwargs))
                return result

            monkeypatch.setattr(os, call, wrapper)

        def inode(path: str, dir_fd: int) -> str:
            return str(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino)

        spy("pwrite", lambda fd, data, at: ("write", name(fd), at, bytes(data)))
        spy("posix_fallocate", lambda fd, at, size: ("size", name(fd), size))
        # A sync counts from when it returned.
        spy("fsync", lambda fd: ("sync", name(fd)), after=True)
        spy("fdatasync", lambda fd: ("sync", name(fd)), after=True)
        spy("link", lambda a, b, **k: ("link", b, inode(a, k["src_dir_fd"])), after=True)
        spy("unlink", lambda a, **k: ("unlink", a, inode(a, k["dir_fd"])))
        real_open = os.open

        def opened(path: Any, flags: int, *mode: Any, **options: Any) -> int:
            fd = real_open(path, flags, *mode, **options)
            if flags & os.O_CREAT:
                self.log.append(("link", str(path), name(fd)))
            return fd

        monkeypatch.setattr(os, "open", opened)
        for call in ("rename", "replace", "ftruncate", "pwritev", "write", "copy_file_range"):
            monkeypatch.setattr(os, call, None)  # the model does not know them


def crash_states(
    start: dict[str, bytes], inodes: dict[str, str], log: list[tuple[Any, ...]], cut: int, rng: random.Random
) -> Iterator[dict[str, bytes]]:
    """Folders a power cut after `cut` calls may leave: synced writes are there; of the others any sectors, in any order; of the
    names made or removed since the folder's last sync any."""
    done = log[:cut]
    for attempt in range(4):
        files = {inode: bytearray(data) for inode, data in start.items()}
        names = dict(inodes)
        for number, (kind, what, *rest) in enumerate(done):
            later = [e for e in done[number + 1 :] if e[0] == "sync"]
            if kind in ("write", "size"):
                safe = any(e[1] == what for e in later)
            else:
                safe = any(e[1] == "folder" for e in later)
            # The first tries are the extremes: nothing unsynced survived, everything did.
            kept = safe or {0: False, 1: True}.get(attempt, rng.random() < 0.5)
            if kind == "size" and kept:
                file = files.setdefault(what, bytearray())
                file.extend(bytes(max(0, rest[0] - len(file))))
            elif kind == "write":
                at, data = rest
                file = files.setdefault(what, bytearray())
                for offset in range(0, len(data), SECTOR):
                    if safe or (kept if attempt < 2 else rng.random() < 0.5):
                        piece = data[offset : offset + SECTOR]
                        file.extend(bytes(max(0, at + offset + len(piece) - len(file))))
                        file[at + offset : at + offset + len(piece)] = piece
            elif kind == "link" and kept:
                names[what] = rest[0]
            elif kind == "unlink" and kept:
                names.pop(what, None)
        yield {name: bytes(files.get(inode, b"")) for name, inode in names.items()}


def replayed(folder: Path, state: dict[str, bytes]) -> DirectoryRegions:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in state.items():
        (folder / name).write_bytes(data)
    return DirectoryRegions(folder)


def snapshot(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    files = list(path.iterdir()) if path.exists() else []
    return {str(p.stat().st_ino): p.read_bytes() for p in files}, {
        p.name: str(p.stat().st_ino) for p in files
    }


@pytest.mark.parametrize("sizes", [(5000, 7000), (7000, 300), (100, 15_000), (0, 5000)], ids=str)
@pytest.mark.parametrize("written", [2, 3])
def test_power_cut_at_any_write_of_a_checkpoint(
    quick: DirectoryRegions, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], written: int
) -> None:
    """C6, fact 7: before it is recorded exactly the old value, after it exactly the new one, and without the ledger's word one of
    the two. Never a mix, never `Damaged`."""
    region = quick.create(ID, 1, BLOCKS)
    old_size, new_size = sizes
    old = ""
    for sequence in range(1, written):
        old = put(region, (sequence - 1) % 2, sequence, size=old_size)
    start, names = snapshot(quick.path)
    recorder = Recorder()
    with monkeypatch.context() as watched:
        recorder.watch(watched)
        new = put(region, (written - 1) % 2, written, size=new_size)
    log = recorder.log
    assert [e[0] for e in log] == ["write", "sync"]
    before, after = (written - 1, value(written - 1, old_size)), (written, value(written, new_size))
    rng, seen = random.Random(str(sizes)), set()
    for cut, _ in itertools.product(range(len(log) + 1), range(CRASHES // 12)):
        for state in crash_states(start, names, log, cut, rng):
            again = replayed(quick.path.parent / "replay", state).take_over(ID, 2, BLOCKS, empty_ok=False)
            assert read_back(again, written - 1, old) == before
            either = read_back(again, UNKNOWN_SEQUENCE, "")
            assert either in (before, after)
            seen.add(either[0])
            if cut == len(log):
                assert read_back(again, written, new) == after
                assert either == after, "a checkpoint that returned was lost"
            again.close()
    assert seen == {written - 1, written}


def test_power_cut_in_the_first_checkpoint(quick: DirectoryRegions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty is not corrupt: a first checkpoint that was torn was never made."""
    region = quick.create(ID, 1, BLOCKS)
    start, names = snapshot(quick.path)
    recorder = Recorder()
    with monkeypatch.context() as watched:
        recorder.watch(watched)
        put(region, 0, 1)
    rng = random.Random(1)
    for cut in range(len(recorder.log) + 1):
        for state in crash_states(start, names, recorder.log, cut, rng):
            again = replayed(quick.path.parent / "replay", state).take_over(ID, 2, BLOCKS, empty_ok=True)
            with pytest.raises(NothingSaved):
                read_back(again, 0, "")


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_power_cut_at_any_write_of_a_take_over(
    quick: DirectoryRegions, monkeypatch: pytest.MonkeyPatch, checkpoints: int
) -> None:
    """The region is copied, synced, named, the name synced, and only then is the old one removed: always the value."""
    region = quick.create(ID, 1, BLOCKS)
    digest = ""
    for sequence in range(1, checkpoints + 1):
        digest = put(region, (sequence - 1) % 2, sequence)
    start, names = snapshot(quick.path)
    recorder = Recorder()
    with monkeypatch.context() as watched:
        recorder.watch(watched)
        quick.take_over(ID, 2, BLOCKS, empty_ok=False)
    log = recorder.log
    kinds = [e[0] for e in log]
    assert kinds[:2] == ["link", "size"]
    assert kinds[-4:] == ["link", "sync", "unlink", "unlink"]
    assert log[-5] == ("sync", log[1][1])
    rng, seen = random.Random(5), set()
    for cut, _ in itertools.product(range(len(log) + 1), range(CRASHES // 40)):
        for state in crash_states(start, names, log, cut, rng):
            seen.add(tuple(sorted(n.partition("-")[0] for n in state)))
            again = replayed(quick.path.parent / "replay", state).take_over(ID, 3, BLOCKS, empty_ok=False)
            assert read_back(again, checkpoints, digest) == (checkpoints, value(checkpoints))
            assert [p.name for p in (quick.path.parent / "replay").iterdir()] == [f"{ID}.3"]
            again.close()
    assert len(seen) >= 4, "old alone, old and draft, all three, new alone"


def test_power_cut_while_a_block_is_made(quick: DirectoryRegions, monkeypatch: pytest.MonkeyPatch) -> None:
    quick.create("B" + "f" * 20, 1, BLOCKS)
    start, names = snapshot(quick.path)
    recorder = Recorder()
    with monkeypatch.context() as watched:
        recorder.watch(watched)
        quick.create(ID, 1, BLOCKS)
    for cut in range(len(recorder.log) + 1):
        for state in crash_states(start, names, recorder.log, cut, random.Random(cut)):
            again = replayed(quick.path.parent / "replay", state).take_over(ID, 2, BLOCKS, empty_ok=True)
            assert again.slots() == (Empty(), Empty())
            digest = put(again, 0, 1, epoch=2)
            assert read_back(again, 1, digest) == (1, value(1))


def test_folders_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    DirectoryRegions(tmp_path / "home" / "blocks").create(ID, 1, BLOCKS)
    assert {str(tmp_path / "home"), str(tmp_path), str(tmp_path / "home" / "blocks")} <= set(synced)


# --- damage --------------------------------------------------------------------------------------------------


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One thing that happens to files, or that somebody does to them."""
    changed = bytearray(data)
    half = slot_at(BLOCKS, 1)
    match rng.randrange(8):
        case 0 | 1 | 2:
            for _ in range(rng.choice([1, 1, 1, 5, 100])):
                # Where it hurts: headers and payloads, not the space behind them.
                at = rng.choice([0, half]) + rng.randrange(5512)
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
        case 3:
            del changed[rng.randrange(1, len(changed) + 1) :]
        case 4:
            at = rng.randrange(0, len(changed), SECTOR)
            changed[at : at + SECTOR] = bytes(SECTOR)
        case 5:
            changed[:half], changed[half:] = changed[half:], changed[:half]
        case 6:
            at = rng.choice([0, half]) + rng.randrange(0, 200)
            changed[at : at + 8] = rng.choice(
                [b"\xff" * 8, (1 << 63).to_bytes(8, "little"), rng.randbytes(8)]
            )
        case 7:
            at = rng.randrange(len(changed))
            changed[at : at + 700] = rng.randbytes(len(changed[at : at + 700]))
    return bytes(changed)


def test_mutated_regions(quick: DirectoryRegions) -> None:
    """C3, C7, threat 8: the value, the one before it with a note, or an error that names both slots; never other bytes."""
    region = quick.create(ID, 1, BLOCKS)
    put(region, 0, 1)
    digest = put(region, 1, 2)
    path = quick.path / f"{ID}.1"
    whole, rng = path.read_bytes(), random.Random(4)
    outcomes = {"same": 0, "before": 0, "damaged": 0}
    tracemalloc.start()
    for _ in range(FLIPS):
        data = mutated(whole, rng)
        if rng.random() < 0.3:
            data = mutated(data, rng)
        path.write_bytes(data)
        began = time.thread_time()  # its own: others may use the machine
        again = FileRegion(os.open(path, os.O_RDONLY), ID, BLOCKS)
        try:
            sequence, found = read_back(again, 2, digest)
            assert found == value(sequence)
            outcomes["same" if sequence == 2 else "before"] += 1
        except Damaged as e:
            outcomes["damaged"] += "first:" in e.message and "second:" in e.message
        assert time.thread_time() - began < 1
        again.close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert sum(outcomes.values()) == FLIPS, "an error named only one slot"
    assert all(count > FLIPS // 50 for count in outcomes.values()), outcomes


def test_every_bit_of_a_small_slot_counts(quick: DirectoryRegions) -> None:
    """There is no byte of header or payload whose change goes unnoticed."""
    region = quick.create(ID, 1, 2)
    put(region, 0, 1, size=40)
    path = quick.path / f"{ID}.1"
    whole = path.read_bytes()
    for at in range(512 + 40):
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        path.write_bytes(changed)
        again = FileRegion(os.open(path, os.O_RDONLY), ID, 2)
        assert isinstance(again.slots()[0], Bad), at
        again.close()


def test_a_slot_of_another_block_or_place_is_not_ours(quick: DirectoryRegions) -> None:
    other = "B" + "f" * 20
    put(quick.create(ID, 1, BLOCKS), 0, 1)
    quick.create(other, 2, BLOCKS)
    shutil.copy(quick.path / f"{ID}.1", quick.path / f"{other}.2")
    found = quick.inspect(other, BLOCKS)
    assert found is not None
    assert found[0] == Bad("it belongs to another block")


def test_a_region_cut_short_is_taken_over_with_what_is_left(quick: DirectoryRegions) -> None:
    region = quick.create(ID, 1, BLOCKS)
    digest = put(region, 0, 1)
    put(region, 1, 2)
    os.truncate(quick.path / f"{ID}.1", slot_at(BLOCKS, 1) + 100)
    again = quick.take_over(ID, 2, BLOCKS, empty_ok=False)
    assert (quick.path / f"{ID}.2").stat().st_size == BLOCKS * BLOCK_BYTES
    assert read_back(again, 1, digest) == (1, value(1))
    assert isinstance(again.slots()[1], Bad)


# --- links and names -----------------------------------------------------------------------------------------


def test_no_name_leads_outside(regions: DirectoryRegions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threat 9: 500 payloads, every verb, not one call that could open anything."""
    regions.create(ID, 1, BLOCKS)
    touched: list[Any] = []
    for call in ("open", "link", "unlink", "listdir", "stat", "mkdir"):
        monkeypatch.setattr(os, call, lambda *a, **k: touched.append(a))
    for name in traversals(500):
        for verb in (
            lambda n: regions.create(n, 2, BLOCKS),
            lambda n: regions.take_over(n, 2, BLOCKS, empty_ok=True),
            regions.present,
            lambda n: regions.inspect(n, BLOCKS),
            regions.remove,
        ):
            with pytest.raises(BadInput):
                verb(name)
    assert touched == []


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder"])
def test_what_only_looks_like_a_region(regions: DirectoryRegions, tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * BLOCKS * BLOCK_BYTES)
    regions.create(ID, 1, BLOCKS)
    fake = regions.path / f"{ID}.5"
    match kind:
        case "symlink":
            fake.symlink_to(secret)
        case "fifo":
            os.mkfifo(fake)
        case "folder":
            fake.mkdir()
    for verb in (
        lambda: regions.take_over(ID, 6, BLOCKS, empty_ok=True),
        lambda: regions.inspect(ID, BLOCKS),
    ):
        with pytest.raises(Damaged, match="not a plain file"):
            verb()
    assert secret.read_bytes() == b"s" * BLOCKS * BLOCK_BYTES
    assert not (regions.path / f"{ID}.6").exists()


def test_a_link_in_the_way_of_a_draft_is_not_followed(
    regions: DirectoryRegions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import secrets

    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 16)
    regions.create("B" + "f" * 20, 1, BLOCKS)
    (regions.path / f"draft-{ID}.1-{'0' * 16}").symlink_to(tmp_path / "victim")
    with pytest.raises(NotDurable):
        regions.create(ID, 1, BLOCKS)
    assert not (tmp_path / "victim").exists()


# --- disks that say no ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_disk_that_fails_a_checkpoint(
    regions: DirectoryRegions, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    region = regions.create(ID, 1, BLOCKS)
    digest = put(region, 0, 1)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        with pytest.raises(NotDurable, match="broken disk"):
            put(region, 1, 2)
    assert read_back(region, 1, digest) == (1, value(1))
    assert read_back(region, 3, put(region, 1, 3)) == (3, value(3))


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "link", "pwrite"])
def test_a_disk_that_fails_a_take_over(
    regions: DirectoryRegions, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    digest = put(regions.create(ID, 1, BLOCKS), 0, 1)
    real_fds = len(os.listdir("/proc/self/fd"))

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        with pytest.raises(NotDurable, match="No space") as refused:
            regions.take_over(ID, 2, BLOCKS, empty_ok=False)
        assert "make room" in refused.value.remedy
    names = [p.name for p in regions.path.iterdir()]
    assert f"{ID}.1" in names
    assert not any(n.startswith("draft") for n in names)
    assert len(os.listdir("/proc/self/fd")) <= real_fds
    again = regions.take_over(ID, 3, BLOCKS, empty_ok=False)
    assert read_back(again, 1, digest) == (1, value(1))


def test_a_full_disk(tmp_path: Path) -> None:
    """Its space is taken when it is made: a block that exists is never short of room for a checkpoint."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(place)], capture_output=True, check=False
    )
    need(done.returncode == 0, "root, to mount")
    try:
        regions = DirectoryRegions(place / "blocks")
        region = regions.create(ID, 1, 16)
        with pytest.raises(NotDurable, match="No space"):
            regions.create("B" + "f" * 20, 2, 16)
        filler = place / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(1 << 20))
        digest = put(region, 0, 1, size=30_000)
        digest = put(region, 1, 2, size=30_000)
        with pytest.raises(NotDurable, match="No space"):
            regions.take_over(ID, 3, 16, empty_ok=False)
        assert read_back(region, 2, digest) == (2, value(2, 30_000))
        assert [p.name for p in (place / "blocks").iterdir()] == [f"{ID}.1"]
        region.close()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


LIMITED = """
import resource, sys
from pathlib import Path
from sublet.core.errors import NotDurable
from sublet.store.regions import DirectoryRegions
from tests.store.test_regions import BLOCKS, ID, put
regions = DirectoryRegions(Path(sys.argv[1]))
region = regions.create(ID, 1, BLOCKS)
put(region, 0, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    put(region, 1, 2)
except NotDurable as e:
    print(e.message)
"""


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    assert resource.RLIMIT_FSIZE
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "blocks")], capture_output=True, text=True, check=False
    )
    assert "File too large" in done.stdout, done.stderr
    again = DirectoryRegions(tmp_path / "blocks").take_over(ID, 2, BLOCKS, empty_ok=False)
    assert read_back(again, UNKNOWN_SEQUENCE, "") == (1, value(1))


def test_errors_are_ours(regions: DirectoryRegions) -> None:
    (regions.path.parent).mkdir(parents=True)
    regions.path.write_text("a file where the folder belongs")
    for verb in (
        lambda: regions.create(ID, 1, BLOCKS),
        lambda: regions.take_over(ID, 1, BLOCKS, empty_ok=True),
        lambda: regions.present(ID),
        lambda: regions.inspect(ID, BLOCKS),
        lambda: regions.remove(ID),
        regions.known,
    ):
        with pytest.raises(SubletError, match=r"Not a directory|File exists"):
            verb()
