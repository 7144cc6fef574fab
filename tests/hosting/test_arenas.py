"""Arenas that outlive their process: given to the right one, once, and never while somebody may still write to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.hosting.arenas import ArenaHolder, HeldArenas
from sublet.hosting.channel import reachable
from tests.runtime.conftest import wait_until

DIGEST = "d" * 64

KEEPER = """
import os, sys, time
from pathlib import Path
from sublet.hosting.arenas import HeldArenas
if len(sys.argv) > 3:
    os.setuid(int(sys.argv[3]))
fd = os.memfd_create("arena")
os.write(fd, sys.argv[2].encode() * 100)
HeldArenas(Path(sys.argv[1]), "arenas").keep("job", fd, 100 * len(sys.argv[2]), "d" * 64, b"manifest of " + sys.argv[2].encode())
print("kept", flush=True)
time.sleep(60)
"""


def keeper(folder: Path, text: str, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
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


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[ArenaHolder]:
    with ArenaHolder(tmp_path, "arenas") as made:
        yield made


def held_by_us() -> int:
    return sum("memfd" in os.readlink(f"/proc/self/fd/{f}") for f in os.listdir("/proc/self/fd") if exists(f))


def exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


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
    wait_until(lambda: held_by_us() == 0)  # the holder's thread closes its own a moment later


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
    wait_until(lambda: held_by_us() == 0)  # the holder's thread closes its own a moment later


@pytest.mark.skipif(os.getuid() != 0, reason="takes root to be somebody else")
def test_another_user_gets_nothing(tmp_path: Path, holder: ArenaHolder) -> None:
    os.chmod(tmp_path, 0o755)
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
        wait_until(lambda: held_by_us() == 0)  # the holder's thread closes its own a moment later


def test_held_up_to_so_many_bytes(tmp_path: Path) -> None:
    """The oldest goes first."""
    with ArenaHolder(tmp_path, "arenas", most_bytes=500) as holder:
        ours = HeldArenas(tmp_path, "arenas")
        names = []
        for number in range(3):
            code = KEEPER.replace('"job"', f'"job{number}"')
            process = subprocess.Popen(
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
    wait_until(lambda: held_by_us() == 0)  # the holder's thread closes its own a moment later


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
