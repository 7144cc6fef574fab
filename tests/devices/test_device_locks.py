"""The locks on physical devices: one ledger has a device, everybody can see who, and the kernel takes it back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.leasing.device_claim import CLAIM_BYTES, DeviceClaim, read_claim, taken_words, write_claim
from sublet.devices import device_locks
from sublet.devices.device_locks import DeviceLocks, lock_folder
from sublet.ports.ledger import FoundDevice

GPU = FoundDevice(
    id="GPU-1", driver="cuda", ordinal=0, name="a GPU", capacity_bytes=1 << 30, physical="GPU-1"
)
MEMORY = FoundDevice(id="here-host0", driver="host", ordinal=0, name="memory", capacity_bytes=1 << 30)

HOLD = """
import itertools, os, sys
from sublet.core.leasing.device_claim import DeviceClaim
from sublet.devices.device_locks import DeviceLocks
from sublet.ports.ledger import FoundDevice
from pathlib import Path

folder, ledger, uid = sys.argv[1:]
if uid != "-":
    os.setgroups([]), os.setgid(int(uid)), os.setuid(int(uid))
os.umask(0o077)
locks = DeviceLocks(DeviceClaim(ledger=ledger, user=f"u{os.getuid()}", home="/their/home", pid=os.getpid()), folder=Path(folder))
gpu = FoundDevice(id="GPU-1", driver="cuda", ordinal=0, name="a GPU", capacity_bytes=1, physical="GPU-1")
for line in itertools.chain([""], sys.stdin):
    print("changed" if line and locks.changed() else locks.claim([gpu]).get("GPU-1", "ours"), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "lock"
    made.mkdir()
    made.chmod(0o1777)
    return made


class Other:
    """Another process, of whoever is said, which claims the device and says what came of it."""

    def __init__(self, folder: Path, ledger: str, uid: int | None = None) -> None:
        command = [sys.executable, "-c", textwrap.dedent(HOLD), str(folder), ledger, str(uid or "-")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.first = self.says()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def asked(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.says()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def others() -> Iterator[list[Other]]:
    started: list[Other] = []
    yield started
    for other in started:
        other.kill()
        for stream in (other.process.stdin, other.process.stdout):
            if stream is not None:
                stream.close()


def locks(folder: Path, ledger: str = "mine", said: list[str] | None = None) -> DeviceLocks:
    mine = DeviceClaim(ledger=ledger, user="me", home="/my/home", pid=os.getpid())
    return DeviceLocks(mine, (said if said is not None else []).append, folder)


def test_a_device_another_ledger_has_is_not_ours_and_its_holder_is_named(folder: Path) -> None:
    """I3: two wardens of two ledgers, of one user or of two: the second is told who has the device."""
    first, second = locks(folder), locks(folder, "other")
    assert first.claim([GPU, MEMORY]) == {}
    words = "user me, home /my/home, warden pid " + str(os.getpid())
    assert second.claim([GPU, MEMORY]) == {
        "GPU-1": f"GPU-1 is granted by another ledger of this machine: {words}"
    }
    assert not second.changed()
    first.close()
    assert second.changed()
    assert second.claim([GPU]) == {}
    assert "GPU-1" in first.claim([GPU])
    second.close()


def test_wardens_of_one_ledger_have_it_together(folder: Path) -> None:
    """I3: they know of each other; when one ends the device stays with the others."""
    first, second, stranger = locks(folder), locks(folder), locks(folder, "other")
    assert first.claim([GPU]) == second.claim([GPU]) == {}
    first.close()
    assert "GPU-1" in stranger.claim([GPU])
    second.close()
    assert stranger.changed()
    stranger.close()


def test_memory_that_pretends_to_be_a_device_takes_no_lock(folder: Path) -> None:
    assert locks(folder).claim([MEMORY]) == locks(folder, "other").claim([MEMORY]) == {}
    assert list(folder.iterdir()) == []


def test_the_kill_of_the_holder_frees_it_at_once(folder: Path, others: list[Other]) -> None:
    """I3: the kernel owns the lock, so what a killed process leaves behind is a file that says nothing."""
    others.append(Other(folder, "theirs"))
    assert others[0].first == "ours"
    ours = locks(folder)
    assert "home /their/home" in ours.claim([GPU])["GPU-1"]
    _, holder = ours.holder("GPU-1")
    assert holder is not None
    assert holder.pid == others[0].process.pid
    others[0].kill()
    assert ours.holder("GPU-1") == (False, None)
    assert ours.claim([GPU]) == {}
    ours.close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Which other users can reach too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        folder = Path(made)
        folder.chmod(0o1777)
        yield folder


def test_two_users_see_each_other_whatever_their_umask(open_folder: Path, others: list[Other]) -> None:
    """I3: the file that one user made is locked, read and written by the next."""
    if os.geteuid() != 0:
        pytest.skip("two users take root")
    folder = open_folder
    for uid, ledger in ((20_001, "first"), (20_002, "second")):
        others.append(Other(folder, ledger, uid))
    assert [o.first.partition(", home")[0] for o in others] == [
        "ours",
        "GPU-1 is granted by another ledger of this machine: user u20001",
    ]
    others[0].kill()
    assert others[1].asked() == "changed"
    _, holder = locks(folder).holder("GPU-1")
    assert holder is not None
    assert holder.user == "u20002"
    assert "u20002" in locks(folder, "root's").claim([GPU])["GPU-1"]


def test_a_removed_file_is_made_and_locked_again(folder: Path) -> None:
    """I3: who owns a file may remove it while somebody else holds its lock."""
    first, second = locks(folder), locks(folder, "other")
    first.claim([GPU])
    (folder / "sublet-GPU-1.lock").unlink()
    assert not first.changed()
    assert "GPU-1" in second.claim([GPU])
    first.close()


def test_of_two_that_lock_after_a_removal_one_has_it(folder: Path) -> None:
    first, second = locks(folder), locks(folder, "other")
    first.claim([GPU])
    (folder / "sublet-GPU-1.lock").unlink()
    assert second.claim([GPU]) == {}
    assert first.changed()
    assert "GPU-1" in first.claim([GPU])
    second.close()


@pytest.mark.parametrize("trap", ["link", "pipe", "two names", "folder"])
def test_what_is_no_lock_file_is_neither_followed_nor_written(folder: Path, trap: str) -> None:
    """I3: without its lock a device is not granted."""
    path, victim = folder / "sublet-GPU-1.lock", folder / "victim"
    victim.write_text("precious")
    if trap == "link":
        path.symlink_to(victim)
    elif trap == "two names":
        path.hardlink_to(victim)
    elif trap == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    taken = locks(folder).claim([GPU])
    assert taken.get("GPU-1", "").endswith("does not say whose it is")
    assert victim.read_text() == "precious"


def test_a_machine_that_can_keep_no_lock_is_used_and_that_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    ours = locks(tmp_path / "missing", said=said)
    assert ours.claim([GPU]) == ours.claim([GPU]) == {}
    assert len(said) == 1
    assert "other ledgers are not told of us" in said[0]


def test_the_folder_is_one_that_all_users_can_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = folder.parent
    monkeypatch.setattr(device_locks, "_FOLDERS", (closed, folder))
    assert lock_folder() == folder
    folder.chmod(0o0777)  # anybody could take another's file away
    monkeypatch.setattr(device_locks, "_FOLDERS", (folder, closed))
    assert lock_folder() == closed


def test_a_claim_comes_back_and_what_is_none_is_not_one() -> None:
    claim = DeviceClaim(ledger="abc", user="ada", home="/home/ada/.sublet", pid=7)
    assert len(write_claim(claim)) == CLAIM_BYTES
    assert read_claim(write_claim(claim)) == claim
    long = DeviceClaim(ledger="abc", user="ada", home="/ü" * 2000, pid=7)
    assert len(write_claim(long)) == CLAIM_BYTES
    assert read_claim(write_claim(long)) == DeviceClaim(ledger="abc", user="ada", home="", pid=7)
    for none in (b"", b"\0" * CLAIM_BYTES, b"[]", b"7", b"{}", b"\xff", b'{"ledger": 1, "user": 2}'):
        assert read_claim(none) is None


def test_what_a_stranger_wrote_cannot_move_the_cursor() -> None:
    claim = read_claim(b'{"ledger": "a", "user": "\\u001b[2Jeve\\n", "home": "/h", "pid": "7"}')
    assert claim is not None
    assert claim.user == "[2Jeve"
    assert "user [2Jeve, home /h, warden pid 7" in taken_words("GPU-1", claim)
