"""Arenas that outlive their process: given to the right one, once, and never while somebody may still write
to them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.processes.arenas import ArenaHolder, HeldArenas
from sublet.processes.channel.channel import reachable, receive_with_fds, send_with_fds
from tests import forked
from tests.conftest import need
from tests.homes import wait_until

DIGEST = "d" * 64

KEEPER = """
import os, sys, time
from pathlib import Path
from sublet.processes.arenas import HeldArenas
if len(sys.argv) > 3:
    os.setuid(int(sys.argv[3]))
fd = os.memfd_create("arena")
os.write(fd, sys.argv[2].encode() * 100)
HeldArenas(Path(sys.argv[1]), "arenas").keep("job", fd, 100 * len(sys.argv[2]), "d" * 64, b"manifest of " + sys.argv[2].encode())
print("kept", flush=True)
time.sleep(60)
"""


def keeper(folder: Path, text: str, *more: str) -> subprocess.Popen[str]:
    process = forked.Forked(
        [sys.executable, "-c", KEEPER, str(folder), text, *more], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "kept\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(autouse=True)
def _only_what_is_new() -> Iterator[None]:
    """Whatever other tests of this process have left is none of these."""
    _BEFORE.update(_memories())
    yield
    _BEFORE.clear()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[ArenaHolder]:
    with ArenaHolder(tmp_path, "arenas") as made:
        yield made


_BEFORE: set[int] = set()


def _memories() -> set[int]:
    """Each that this process has open, by its inode."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd" in os.readlink(f"/proc/self/fd/{fd}"):
                found.add(os.fstat(int(fd)).st_ino)
    return found


def held_by_us() -> int:
    return len(_memories() - _BEFORE)


def test_it_is_there_when_its_process_is_gone_and_given_once(tmp_path: Path, holder: ArenaHolder) -> None:
    asking = HeldArenas(tmp_path, "arenas")
    assert asking.fetch("job", DIGEST) is None
    assert not holder.holding()
    process = keeper(tmp_path, "abc")
    end(process)
    assert holder.holding()
    assert asking.fetch("job", "e" * 64) is None, "another state than is wanted"
    assert asking.fetch("other", DIGEST) is None
    found = asking.fetch("job", DIGEST)
    assert found is not None
    assert (found.size, found.manifest) == (300, b"manifest of abc")
    assert os.pread(found.fd, 300, 0) == b"abc" * 100
    os.close(found.fd)
    assert asking.fetch("job", DIGEST) is None
    assert not holder.holding()
    wait_until(lambda: held_by_us() == 0)


def test_nothing_is_given_while_its_process_lives(tmp_path: Path, holder: ArenaHolder) -> None:
    """Also one that is stopped may go on, and write to it."""
    asking = HeldArenas(tmp_path, "arenas")
    process = keeper(tmp_path, "abc")
    assert asking.fetch("job", DIGEST) is None
    os.kill(process.pid, signal.SIGSTOP)
    assert asking.fetch("job", DIGEST) is None
    end(process)
    found = asking.fetch("job", DIGEST)
    assert found is not None
    os.close(found.fd)


def test_the_newest_replaces_and_a_drop_forgets(tmp_path: Path, holder: ArenaHolder) -> None:
    for text in ("abc", "defg"):
        end(keeper(tmp_path, text))
    asking = HeldArenas(tmp_path, "arenas")
    found = asking.fetch("job", DIGEST)
    assert found is not None
    assert found.manifest == b"manifest of defg"
    os.close(found.fd)
    end(keeper(tmp_path, "abc"))
    asking.drop("job")
    assert asking.fetch("job", DIGEST) is None
    wait_until(lambda: held_by_us() == 0)


def test_another_user_gets_nothing(tmp_path: Path) -> None:
    """Where a group shares a home; elsewhere another user does not even reach the socket."""
    need(os.getuid() == 0, "root, to be somebody else")
    os.chmod(tmp_path, 0o2770)  # the keeper changes its user only
    with ArenaHolder(tmp_path, "arenas") as holder:
        _another_user_gets_nothing(tmp_path, holder)


def _another_user_gets_nothing(tmp_path: Path, holder: ArenaHolder) -> None:
    for folder in tmp_path.parents:
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    process = keeper(tmp_path, "abc", "65534")
    end(process)
    asking = HeldArenas(tmp_path, "arenas")
    assert asking.fetch("job", DIGEST) is None
    asking.drop("job")  # nor may others forget it
    assert holder.holding()


def test_held_for_a_while_only(tmp_path: Path) -> None:
    with ArenaHolder(tmp_path, "arenas", keep_seconds=0) as holder:
        process = keeper(tmp_path, "abc")
        time.sleep(0.05)
        assert holder.holding(), "as long as the process lives it costs nothing"
        end(process)
        wait_until(lambda: not holder.holding())
        wait_until(lambda: held_by_us() == 0)


def test_held_up_to_so_many_bytes(tmp_path: Path) -> None:
    """The oldest goes first."""
    with ArenaHolder(tmp_path, "arenas", most_bytes=500) as holder:
        ours = HeldArenas(tmp_path, "arenas")
        names = []
        for number in range(3):
            code = KEEPER.replace('"job"', f'"job{number}"')
            process = forked.Forked(
                [sys.executable, "-c", code, str(tmp_path), "ab"], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "kept\n"
            end(process)
            names.append(f"job{number}")
            wait_until(lambda n=number: len(holder._held) == min(n + 1, 2))
        assert ours.fetch("job0", DIGEST) is None
        for name in names[1:]:
            found = ours.fetch(name, DIGEST)
            assert found is not None
            os.close(found.fd)


def test_without_a_holder_there_is_nothing(tmp_path: Path) -> None:
    asking = HeldArenas(tmp_path / "nowhere", "arenas")
    assert asking.fetch("job", DIGEST) is None
    fd = os.memfd_create("mine")
    asking.keep("job", fd, 10, DIGEST, b"m")
    asking.drop("job")
    os.close(fd)
    wait_until(lambda: held_by_us() == 0)


def test_nonsense_does_not_end_it(tmp_path: Path, holder: ArenaHolder) -> None:
    for message in (
        b"",
        b"{",
        b"[]",
        b'{"op": "keep"}',
        b'{"op": "keep", "job": "x"}',
        b'{"op": 3, "job": []}',
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            with reachable(tmp_path, "arenas") as path:
                sock.connect(path)
            sock.send(message)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        with reachable(tmp_path, "arenas") as path:
            silent.connect(path)
        end(keeper(tmp_path, "abc"))  # waits for the silent one's patience, no longer
    found = HeldArenas(tmp_path, "arenas").fetch("job", DIGEST)
    assert found is not None
    os.close(found.fd)
    wait_until(lambda: held_by_us() == 0)  # the holder's thread closes its own a moment later


def told(folder: Path, message: bytes, fds: list[int]) -> None:
    """Said by this process, which waits until it was heard."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        with reachable(folder, "arenas") as path:
            sock.connect(path)
        sock.settimeout(5)
        send_with_fds(sock, message, fds)
        receive_with_fds(sock)


def test_what_no_reader_of_json_takes_does_not_end_it(tmp_path: Path, holder: ArenaHolder) -> None:
    fds = [os.memfd_create("one"), os.memfd_create("two")]
    for message in (
        b"[" * 4000,
        b'{"op": "keep", "job": "x", "digest": "d", "size": Infinity}',
        b'{"op": "keep", "job": "x", "digest": "d"}',
        b'{"op": "keep", "job": "x", "size": 3}',
        b'{"op": "keep", "job": "\\ud800", "digest": "d", "size": 3}',
        b'{"op": "keep", "job": "a\\nb", "digest": "d", "size": 3}',
        b'{"op": "other", "job": "x", "digest": "d", "size": 3}',
        b"3",
    ):
        told(tmp_path, message, fds)
    assert not holder.holding()
    told(tmp_path, b'{"op": "keep", "job": "x", "digest": "d", "size": 3}', fds[:1])
    told(tmp_path, b'{"op": "keep", "job": "x", "digest": "d", "size": 3}', [*fds, fds[0]])
    assert not holder.holding()
    for fd in fds:
        os.close(fd)
    wait_until(lambda: held_by_us() == 0)
    end(keeper(tmp_path, "abc"))
    assert holder.holding()


def test_one_that_is_gone_before_it_was_heard_leaves_nothing(tmp_path: Path) -> None:
    holder = ArenaHolder(tmp_path, "arenas")
    child = os.fork()
    if child == 0:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with reachable(tmp_path, "arenas") as path:
            sock.connect(path)
        fds = [os.memfd_create("one"), os.memfd_create("two")]
        send_with_fds(sock, b'{"op": "keep", "job": "x", "digest": "d", "size": 3}', fds)
        os._exit(0)
    os.waitpid(child, 0)
    with holder:
        assert HeldArenas(tmp_path, "arenas").fetch("y", DIGEST) is None  # after it
        assert not holder.holding()
        wait_until(lambda: held_by_us() == 0)


@pytest.mark.parametrize("claimed", [-1000, 0, 10**30])
def test_how_much_is_held_is_looked_at_not_believed(tmp_path: Path, claimed: int) -> None:
    with ArenaHolder(tmp_path, "arenas", most_bytes=250) as holder:
        code = KEEPER.replace('100 * len(sys.argv[2]), "d"', f'{claimed}, "d"')
        assert code != KEEPER
        for number in range(2):
            process = forked.Forked(
                [sys.executable, "-c", code.replace('"job"', f'"job{number}"'), str(tmp_path), "ab"],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "kept\n"
            end(process)
        wait_until(lambda: [key[1] for key in holder._held] == ["job1"])


def test_so_many_arenas_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is three descriptors: one program must not use up the warden's."""
    monkeypatch.setattr("sublet.processes.arenas.MOST_ARENAS", 5)
    with ArenaHolder(tmp_path, "arenas") as holder:
        fd = os.memfd_create("one")
        for number in [*range(8), 2]:
            HeldArenas(tmp_path, "arenas").keep(f"job{number}", fd, 0, DIGEST, b"m")
        os.close(fd)
        assert len(holder._held) == 5


def test_what_a_program_of_ours_drops_is_its_own(tmp_path: Path, holder: ArenaHolder) -> None:
    """Somebody who looked at a job, and closes, does not forget what the trainer keeps."""
    process = keeper(tmp_path, "abc")
    HeldArenas(tmp_path, "arenas").drop("job")
    assert holder.holding()
    end(process)


def test_without_a_descriptor_left_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that was committed must not be said to have failed."""

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    asking = HeldArenas(tmp_path, "arenas")
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", full)
        asking.keep("job", 0, 10, DIGEST, b"m")
    monkeypatch.setattr(socket, "socket", full)
    asking.keep("job", 0, 10, DIGEST, b"m")
    assert asking.fetch("job", DIGEST) is None
    asking.drop("job")


def test_a_manifest_that_is_a_pipe_is_nothing(tmp_path: Path, holder: ArenaHolder) -> None:
    code = KEEPER.replace('HeldArenas(Path(sys.argv[1]), "arenas").keep(', "keep(").replace(
        "fd = os",
        """
def keep(job, fd, size, digest, manifest):
    HeldArenas(Path(sys.argv[1]), "arenas")._ask({"op": "keep", "job": job, "size": size, "digest": digest}, [fd, os.pipe()[0]])
fd = os""",
        1,
    )
    process = forked.Forked(
        [sys.executable, "-c", code, str(tmp_path), "ab"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "kept\n"
    end(process)
    assert HeldArenas(tmp_path, "arenas").fetch("job", DIGEST) is None
    wait_until(lambda: held_by_us() == 0)
