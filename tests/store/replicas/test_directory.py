"""A replica in a directory: create-only (C2), durable in the right order (C6), and what happens when the disk says no."""

from __future__ import annotations

import errno
import mmap
import os
import random
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.core.checkpoints.checkpoint import ALIGN, MAX_MANIFEST_BYTES, ByteSpan
from sublet.core.errors import Misconfigured, NotDurable
from sublet.machine import failpoints
from sublet.machine.failpoints import FailpointHit
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.save.packing import digest, write_pack
from tests.conftest import need

A, B = "a" * 64, "b" * 64


@pytest.fixture
def replica(tmp_path: Path) -> DirectoryReplica:
    made = DirectoryReplica(tmp_path / "replica")
    made.check()
    return made


def blocks(data: bytes) -> memoryview:
    """Aligned memory, whole blocks."""
    view = memoryview(mmap.mmap(-1, max(ALIGN, -(-len(data) // ALIGN) * ALIGN)))
    view[: len(data)] = data
    return view


def put_pack(replica: DirectoryReplica, name: str, data: bytes) -> None:
    draft = replica.begin_pack(len(data))
    try:
        draft.write(0, blocks(data))
        draft.publish(name, [ByteSpan(0, len(data))])
    finally:
        draft.discard()


def get_pack(replica: DirectoryReplica, name: str, size: int, at: int = 0) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if replica.read_pack(name, at, memoryview(into)) else None


def test_what_was_put_is_there(replica: DirectoryReplica) -> None:
    data = random.Random(1).randbytes(10_001)
    put_pack(replica, A, data)
    assert get_pack(replica, A, 10_001) == data
    assert get_pack(replica, A, 100, at=4096) == data[4096:4196]
    assert get_pack(replica, A, 10_002) is None, "a part that is not there"
    assert get_pack(replica, A, 1, at=10_001) is None
    assert get_pack(replica, B, 1) is None
    assert (replica.has_pack(A), replica.has_pack(B)) == (True, False)
    replica.put_manifest(B, b"{}")
    assert replica.get_manifest(B) == b"{}"
    assert replica.get_manifest(A) is None
    assert [(name, size) for name, _, size in replica.packs()] == [(A, 10_001)]
    assert [name for name, _ in replica.manifests()] == [B]
    assert all(-5 < age < 60 for _, age, _ in replica.packs())
    assert list((replica.path / "drafts").iterdir()) == []


def test_bytes_under_a_name_never_change(replica: DirectoryReplica) -> None:
    """C2: the same again is fine and touches nothing; something else is refused and touches nothing."""
    put_pack(replica, A, b"x" * 5000)
    replica.put_manifest(A, b"first")
    pack, manifest = replica.path / f"packs/{A}.pack", replica.path / f"manifests/{A}.json"
    before = [(p.stat().st_ino, p.stat().st_mtime_ns) for p in (pack, manifest)]
    put_pack(replica, A, b"x" * 5000)
    replica.put_manifest(A, b"first")
    for data in (b"y" * 5000, b"x" * 4999, b"x" * 5001):
        with pytest.raises(NotDurable, match="exists"):
            put_pack(replica, A, data)
    for data in (b"secon", b"fir", b"first "):
        with pytest.raises(NotDurable, match="exists"):
            replica.put_manifest(A, data)
    assert [(p.stat().st_ino, p.stat().st_mtime_ns) for p in (pack, manifest)] == before
    assert (pack.read_bytes(), manifest.read_bytes()) == (b"x" * 5000, b"first")
    assert list((replica.path / "drafts").iterdir()) == []


RACER = """
import sys
from pathlib import Path
from sublet.core.errors import NotDurable
from sublet.store.replicas.directory import DirectoryReplica
from tests.conftest import need
from tests.store.replicas.test_directory import put_pack
replica, fill = DirectoryReplica(Path(sys.argv[1])), sys.argv[2].encode()
print("ready", flush=True)
for line in sys.stdin:
    name = line.strip()
    try:
        put_pack(replica, name, (fill if name[0] == "d" else b"s") * 9000)
        replica.put_manifest(name, (fill if name[0] == "d" else b"s") * 900)
        print("done", flush=True)
    except NotDurable:
        print("refused", flush=True)
"""


def test_two_processes_race_for_one_name(replica: DirectoryReplica) -> None:
    """C2: the same content twice is one file; different content is the first one's, whole, and the other is told."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(replica.path), fill],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for fill in "xy"
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for number in range(60):
        same = number % 2 == 0
        name = ("5" if same else "d") + f"{number:063x}"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(name + "\n")
            racer.stdin.flush()
        said = sorted(racer.stdout.readline().strip() for racer in racers if racer.stdout)
        data = get_pack(replica, name, 9000)
        if same:
            assert said == ["done", "done"]
            assert data == b"s" * 9000
        else:
            # Whoever had the pack may have lost the manifest, never both.
            assert said in (["done", "refused"], ["refused", "refused"])
            assert data in (b"x" * 9000, b"y" * 9000)
    for racer in racers:
        racer.communicate()
    assert list((replica.path / "drafts").iterdir()) == []


# --- order ---------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is asked of the kernel, in order, by path."""
    made: list[str] = []
    names: dict[int, str] = {}

    def short(path: Any) -> str:
        path = Path(path)
        return (
            path.name if path.name in ("packs", "manifests", "drafts", "aside") else path.parent.name + "/*"
        )

    def watch(name: str, say: Callable[..., str | None]) -> None:
        real = getattr(os, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            said = say(*args, **kwargs)
            if said:
                made.append(f"{name} {said}")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapper)

    def by_fd(fd: int, *_: Any) -> str:
        return names.get(fd) or short(os.readlink(f"/proc/self/fd/{fd}"))

    watch("pwritev", by_fd)
    watch("ftruncate", by_fd)
    watch("fsync", by_fd)

    def from_to(_: str, __: str, *, src_dir_fd: int, dst_dir_fd: int, **___: Any) -> str:
        return f"{by_fd(src_dir_fd)}/* {by_fd(dst_dir_fd)}/*"

    watch("write", by_fd)
    watch("link", from_to)
    watch("rename", from_to)
    return made


def test_order_of_a_pack(replica: DirectoryReplica, calls: list[str]) -> None:
    """C1, C6: data, its length, sync of the file, link, sync of the folder."""
    put_pack(replica, A, b"x" * 5000)
    assert calls == [
        "pwritev drafts/*",
        "ftruncate drafts/*",
        "fsync drafts/*",
        "link drafts/* packs/*",
        "fsync packs",
    ]


def test_order_of_a_manifest(replica: DirectoryReplica, calls: list[str]) -> None:
    """C1."""
    replica.put_manifest(A, b"{}")
    assert calls == ["write drafts/*", "fsync drafts/*", "link drafts/* manifests/*", "fsync manifests"]


def test_a_name_that_was_there_is_synced_too(replica: DirectoryReplica, calls: list[str]) -> None:
    """C6: whoever linked it may have died before its own sync of the folder."""
    put_pack(replica, A, b"x")
    replica.put_manifest(A, b"x")
    calls.clear()
    put_pack(replica, A, b"x")
    assert calls[-2:] == ["link drafts/* packs/*", "fsync packs"]
    replica.put_manifest(A, b"x")
    assert calls[-2:] == ["link drafts/* manifests/*", "fsync manifests"]


def test_the_manifest_s_bytes_are_written_before_they_are_synced(
    replica: DirectoryReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size if not os.path.isdir(f"/proc/self/fd/{fd}") else -1)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    replica.put_manifest(A, b"x" * 777)
    assert sizes == [777, -1]


def test_folders_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: what is synced in a folder that is lost is lost with it."""
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    DirectoryReplica(tmp_path / "new" / "deeper").check()
    assert synced == [
        str(p)
        for p in (
            tmp_path,
            tmp_path / "new",
            *[tmp_path / "new" / "deeper"] * 4,
            tmp_path / "new",
            tmp_path / "new" / "deeper",
        )
    ]
    synced.clear()
    DirectoryReplica(tmp_path / "new" / "deeper").check()
    assert synced == [str(tmp_path / "new"), str(tmp_path / "new" / "deeper")], (
        "whoever made it may have died before"
    )


@pytest.mark.parametrize("call", ["fsync", "link", "ftruncate", "pwritev"])
def test_a_failing_call_is_not_durable(
    replica: DirectoryReplica, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """C6: a disk that says no is a save that did not happen."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(NotDurable, match="broken disk"):
        put_pack(replica, A, b"x" * 100)
    if call in ("fsync", "link"):
        with pytest.raises(NotDurable, match="broken disk"):
            replica.put_manifest(A, b"x" * 100)
    if call == "link":
        assert not replica.has_pack(A)
        assert replica.get_manifest(A) is None


# --- disks that say no ---------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misconfigured, match="cannot be a replica"):
        DirectoryReplica(tmp_path / "file").check()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(Misconfigured, match="no hard links"):
        DirectoryReplica(tmp_path / "fat").check()
    assert list((tmp_path / "fat" / "drafts").iterdir()) == []


def test_a_replica_that_is_gone(tmp_path: Path) -> None:
    gone = DirectoryReplica(tmp_path / "gone")
    with pytest.raises(NotDurable, match="gone"):
        gone.begin_pack(10)
    with pytest.raises(NotDurable, match="gone"):
        gone.put_manifest(A, b"x")
    assert gone.get_manifest(A) is None
    assert get_pack(gone, A, 1) is None


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(place)], capture_output=True, check=False
        )
        need(done.returncode == 0, "root, to mount")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=False)


def test_a_full_disk(mounted: Callable[[str], Path]) -> None:
    """C6: nothing under the name, the draft's space given back, and it works again when there is room."""
    replica = DirectoryReplica(mounted("size=256k"))
    replica.check()
    with pytest.raises(NotDurable, match="No space"):
        put_pack(replica, A, b"x" * (1 << 20))
    assert not replica.has_pack(A)
    assert list((replica.path / "drafts").iterdir()) == []
    with pytest.raises(NotDurable, match="No space"):
        replica.put_manifest(A, b"x" * (1 << 20))
    assert replica.get_manifest(A) is None
    assert list((replica.path / "drafts").iterdir()) == []
    put_pack(replica, A, b"x" * 100_000)
    assert get_pack(replica, A, 100_000) == b"x" * 100_000


def test_a_disk_that_turned_read_only(mounted: Callable[[str], Path]) -> None:
    """It fails in words, and what is on it is still read."""
    place = mounted("size=1m")
    replica = DirectoryReplica(place)
    replica.check()
    put_pack(replica, A, b"x" * 100)
    subprocess.run(["mount", "-o", "remount,ro", str(place)], capture_output=True, check=True)
    with pytest.raises(Misconfigured, match="Read-only"):
        replica.check()
    with pytest.raises(NotDurable, match="Read-only"):
        replica.begin_pack(10)
    with pytest.raises(NotDurable, match="Read-only"):
        replica.put_manifest(A, b"x")
    assert get_pack(replica, A, 100) == b"x" * 100


def test_a_draft_that_cannot_be_removed_is_left(
    replica: DirectoryReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was published was published, whatever becomes of its draft."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EROFS, "read-only")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        put_pack(replica, A, b"x" * 10)
        replica.put_manifest(A, b"x")
    assert get_pack(replica, A, 10) == b"x" * 10
    assert replica.get_manifest(A) == b"x"
    assert len(list((replica.path / "drafts").iterdir())) == 2
    put_pack(replica, B, b"y")


# --- direct I/O ----------------------------------------------------------------------------------------------


def test_direct_io_refused_after_the_file_was_made(
    replica: DirectoryReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux creates the file and then says EINVAL: the second try must not find its own file in the way."""
    real = os.open

    def refusing(path: Any, flags: int, *mode: int, **more: Any) -> int:
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, *mode, **more))
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", refusing)
    put_pack(replica, A, b"x" * 5000)
    assert get_pack(replica, A, 5000) == b"x" * 5000
    assert list((replica.path / "drafts").iterdir()) == []


def test_direct_io_refused_when_it_is_used_by_several_threads(
    replica: DirectoryReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread that was refused writes again, also one that hears of it after another has turned it off."""
    import fcntl

    real = os.pwritev
    both = threading.Barrier(2, timeout=20)
    refused: list[int] = []

    def refusing(fd: int, buffers: Any, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and len(refused) < 2:
            refused.append(at)
            both.wait()
            if at:
                threading.Event().wait(0.1)  # the other one has turned to buffered I/O by now
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "pwritev", refusing)
    draft = replica.begin_pack(2 * ALIGN)
    if not draft._direct:
        pytest.skip("no direct I/O here to refuse")
    failed: list[BaseException] = []

    def write(at: int, fill: bytes) -> None:
        try:
            draft.write(at, blocks(fill * ALIGN))
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=write, args=(at, fill)) for at, fill in ((0, b"x"), (ALIGN, b"y"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sorted(refused) == [0, ALIGN]
    draft.publish(A, [ByteSpan(0, ALIGN), ByteSpan(ALIGN, ALIGN)])
    assert get_pack(replica, A, 2 * ALIGN) == b"x" * ALIGN + b"y" * ALIGN


def test_unaligned_memory_and_short_writes(
    replica: DirectoryReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(2).randbytes(3 * ALIGN + 1)
    draft = replica.begin_pack(len(data))
    draft.write(0, memoryview(bytearray(b"?" + data))[1:])
    draft.publish(A, [ByteSpan(0, len(data))])
    assert get_pack(replica, A, len(data)) == data
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: real(fd, [buffers[0][:1000]], at))
    put_pack(replica, B, data)
    assert get_pack(replica, B, len(data)) == data


def test_short_reads(replica: DirectoryReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(4).randbytes(9999)
    put_pack(replica, A, data)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:777]], at))
    assert get_pack(replica, A, 9999) == data


# --- names and leftovers -------------------------------------------------------------------------------------


def test_every_name_in_the_store_is_a_digest(tmp_path: Path) -> None:
    """Threat 9: nothing a user types becomes a path; locators are digests."""
    from tests.store.rig import Shelf

    shelf = Shelf(tmp_path, replicas=1)
    for version, name in enumerate(["job/../..", "..", "/etc/passwd", "a/../b", "", ".", "a\x00b", "a\nb"]):
        del version
        with pytest.raises(ValueError, match="name"):
            shelf.store.save(name, {"a": 1}, expected_version=0, lease=shelf.lease)
        with pytest.raises(ValueError, match="name"):
            shelf.store.load(name)
    shelf.store.save("a/b:c@d", {"a": b"x"}, expected_version=0, lease=shelf.lease, schema="../../x")
    found = [str(p.relative_to(shelf.folders[0])) for p in shelf.files()]
    assert len(found) == 2
    assert all(re.fullmatch(r"packs/[0-9a-f]{64}\.pack|manifests/[0-9a-f]{64}\.json", p) for p in found)
    shelf.close()


@pytest.mark.parametrize("planted", ["link", "dangling", "pipe", "folder", "socket"])
def test_what_is_no_plain_file_is_a_bad_copy(replica: DirectoryReplica, tmp_path: Path, planted: str) -> None:
    """Threat 9: what is planted under a name leads nowhere, holds nobody up, and is set aside like every bad copy."""
    (tmp_path / "secret").write_bytes(b"secret")
    for kind, name in (("pack", f"packs/{A}.pack"), ("manifest", f"manifests/{A}.json")):
        path = replica.path / name
        if planted in ("link", "dangling"):
            path.symlink_to(tmp_path / ("secret" if planted == "link" else "nothing"))
        elif planted == "pipe":
            os.mkfifo(path)
        elif planted == "folder":
            path.mkdir()
        else:
            os.mknod(path, 0o600 | stat.S_IFSOCK)
        if kind == "pack":
            assert get_pack(replica, A, 6) is None
            assert replica.has_pack(A)
            with pytest.raises(NotDurable, match="exists"):
                put_pack(replica, A, b"secret")
        else:
            assert replica.get_manifest(A) == b""
            with pytest.raises(NotDurable, match="exists"):
                replica.put_manifest(A, b"secret")
        replica.set_aside(kind, A)
    put_pack(replica, A, b"good")
    replica.put_manifest(A, b"good")
    assert (get_pack(replica, A, 4), replica.get_manifest(A)) == (b"good", b"good")
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert list((replica.path / "drafts").iterdir()) == []


@pytest.mark.parametrize("folder", ["packs", "manifests", "drafts", "aside"])
def test_folders_that_are_links_are_not_followed(
    replica: DirectoryReplica, tmp_path: Path, folder: str
) -> None:
    """Threat 9: also one step higher. The replica's own path may be a link: that one is the operator's."""
    elsewhere = tmp_path / "elsewhere"
    (replica.path / folder).rename(elsewhere)
    (elsewhere / f"{A}.pack").write_bytes(b"secret")
    (elsewhere / f"{A}.json").write_bytes(b"secret")
    (replica.path / folder).symlink_to(elsewhere)
    with pytest.raises(Misconfigured):
        replica.check()
    if folder in ("packs", "manifests", "drafts"):
        with pytest.raises(NotDurable):
            put_pack(replica, B, b"x") if folder != "manifests" else replica.put_manifest(B, b"x")
    if folder == "packs":
        with pytest.raises(OSError, match="Not a directory"):
            get_pack(replica, A, 6)
    if folder == "manifests":
        with pytest.raises(OSError, match="Not a directory"):
            replica.get_manifest(A)
    if folder == "aside":
        put_pack(replica, A, b"mine")
        with pytest.raises(OSError, match="Not a directory"):
            replica.set_aside("pack", A)
        assert replica.has_pack(A)
    assert sorted(p.name for p in elsewhere.iterdir()) == [f"{A}.json", f"{A}.pack"]
    (replica.path / folder).unlink()
    elsewhere.rename(replica.path / folder)
    (tmp_path / "also").symlink_to(replica.path)
    also = DirectoryReplica(tmp_path / "also")
    also.check()
    put_pack(also, B, b"through the operator's link")
    assert replica.has_pack(B)


def test_a_name_whose_folder_did_not_sync_is_taken_back(
    replica: DirectoryReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: else the next save would count a copy that a power cut may take away. What was there before stays."""
    put_pack(replica, B, b"before")
    real = os.fsync

    def failing(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "broken disk")
        real(fd)

    monkeypatch.setattr(os, "fsync", failing)
    for name, data in ((A, b"x"), (B, b"before")):
        with pytest.raises(NotDurable, match="broken disk"):
            put_pack(replica, name, data)
    with pytest.raises(NotDurable, match="broken disk"):
        replica.put_manifest(A, b"x")
    assert (replica.has_pack(A), replica.has_pack(B), replica.get_manifest(A)) == (False, True, None)
    assert list((replica.path / "drafts").iterdir()) == []


def test_a_manifest_of_any_size_is_not_read_into_memory(replica: DirectoryReplica) -> None:
    """C7: a sparse file of a terabyte."""
    with open(replica.path / f"manifests/{A}.json", "wb") as file:
        file.truncate(1 << 40)
    data = replica.get_manifest(A)
    assert data is not None
    assert len(data) == MAX_MANIFEST_BYTES + 1


def test_a_bad_copy_is_kept_for_whoever_looks_into_it(replica: DirectoryReplica) -> None:
    put_pack(replica, A, b"bad")
    replica.put_manifest(A, b"bad")
    for kind in ("pack", "manifest"):
        replica.set_aside(kind, A)
        replica.set_aside(kind, A)  # gone already
    assert not replica.has_pack(A)
    assert replica.get_manifest(A) is None
    kept = sorted(replica.path.glob("aside/*"))
    assert [p.name[:64] for p in kept] == [A, A]
    assert {p.read_bytes() for p in kept} == {b"bad"}
    put_pack(replica, A, b"good")
    assert get_pack(replica, A, 4) == b"good"
    replica.remove("pack", A)
    replica.remove("pack", A)
    assert not replica.has_pack(A)


@pytest.mark.parametrize("place", ["after_chunk_write", "after_chunk_fsync", "after_publish"])
def test_leftovers_of_a_crash_are_in_nobody_s_way(replica: DirectoryReplica, place: str) -> None:
    script = (
        "import sys; from pathlib import Path; from sublet.store.replicas.directory import DirectoryReplica;"
        "from tests.store.replicas.test_directory import put_pack; put_pack(DirectoryReplica(Path(sys.argv[1])), 'a' * 64, b'x' * 9000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(replica.path)],
        check=False,
        env={**os.environ, "SUBLET_FAILPOINTS": f"{place}=kill"},
    )
    assert done.returncode == -9
    assert len(list((replica.path / "drafts").iterdir())) == 1
    assert get_pack(replica, A, 9000) == (b"x" * 9000 if place == "after_publish" else None)
    put_pack(replica, A, b"x" * 9000)
    assert get_pack(replica, A, 9000) == b"x" * 9000


# --- packs over several replicas -----------------------------------------------------------------------------


def test_a_pack_goes_to_every_replica(tmp_path: Path) -> None:
    replicas = [DirectoryReplica(tmp_path / str(i)) for i in range(3)]
    for replica in replicas[:2]:
        replica.check()
    rng = random.Random(3)
    arena = blocks(rng.randbytes(100_000))
    spans = [ByteSpan(0, 5000), ByteSpan(8192, 4096), ByteSpan(16384, 1)]
    packed = write_pack(arena, spans, replicas)
    assert packed.confirmed == tuple(r.name for r in replicas[:2])
    assert list(packed.failed) == [replicas[2].name]
    assert packed.digests == tuple(digest(arena[s.offset : s.end]) for s in spans)
    assert packed.places == (0, 8192, 12288)
    for replica in replicas[:2]:
        for span, at in zip(spans, packed.places, strict=True):
            assert get_pack(replica, packed.pack, span.size, at) == bytes(arena[span.offset : span.end])
        assert (replica.path / f"packs/{packed.pack}.pack").stat().st_size == 12289
    again = write_pack(arena, spans, replicas)
    assert again.pack != packed.pack
    assert (again.digests, again.confirmed) == (packed.digests, packed.confirmed)
    other = write_pack(arena, spans[:2], replicas)
    assert other.pack != packed.pack


def test_a_replica_whose_write_failed_has_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: also when only one piece of many failed, and publishing it would have worked."""
    replicas = [DirectoryReplica(tmp_path / str(i)) for i in range(2)]
    for replica in replicas:
        replica.check()
    real = os.pwritev

    def failing(fd: int, buffers: Any, at: int) -> int:
        if at == 8192 and f"{tmp_path}/1/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "bad sector")
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "pwritev", failing)
    packed = write_pack(
        blocks(b"x" * 20_000), [ByteSpan(0, 8192), ByteSpan(8192, 4096), ByteSpan(12288, 7000)], replicas
    )
    assert packed.confirmed == (replicas[0].name,)
    assert "bad sector" in packed.failed[replicas[1].name]
    assert not replicas[1].has_pack(packed.pack)


def test_no_descriptor_and_no_draft_is_left(tmp_path: Path) -> None:
    replica = DirectoryReplica(tmp_path / "r")
    replica.check()
    before = len(os.listdir("/proc/self/fd"))
    failpoints.arm("between_replicas", "raise")
    for _ in range(5):
        with pytest.raises(FailpointHit):
            write_pack(blocks(b"x" * 5000), [ByteSpan(0, 5000)], [replica])
    failpoints.disarm()
    write_pack(blocks(b"x" * 5000), [ByteSpan(0, 5000)], [replica])
    assert len(os.listdir("/proc/self/fd")) == before
    assert list((replica.path / "drafts").iterdir()) == []


def test_what_somebody_left_under_the_name_does_not_pass_for_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1, C2: names are random; should one be taken all the same, it is neither written over nor believed."""
    replica = DirectoryReplica(tmp_path / "r")
    replica.check()
    monkeypatch.setattr("sublet.store.save.packing.secrets.token_hex", lambda n: "ab" * n)
    path = replica.path / f"packs/{'ab' * 32}.pack"
    path.write_bytes(b"theirs")
    packed = write_pack(blocks(bytes(5000)), [ByteSpan(0, 5000)], [replica])
    assert (packed.confirmed, list(packed.failed)) == ((), [replica.name])
    assert path.read_bytes() == b"theirs"
    assert list((replica.path / "drafts").iterdir()) == []
