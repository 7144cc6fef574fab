"""kill -9 at the n-th system call of one save, or an error from it, by strace: old or new, never between (C6).

Three programs are disturbed: one that saves, one whose save runs behind it, and that one's writer process. Every call that changes a file or
talks to the other process is a place to die, each at its first, second, … time. A spread sample here, all of them in `make proof`
(`SUBLET_KILLS=all`).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.core import checkpoint
from sublet.store.checkpoints import CheckpointStore
from sublet.store.packing import digest
from sublet.store.replicas import Replicas
from tests.conftest import need
from tests.runtime.conftest import process_is_gone, wait_until

from .rig import JOB, Shelf, in_memory

KILLS = os.environ.get("SUBLET_KILLS", "6")
SEED = int(os.environ.get("SUBLET_SEED", "4"))
CALLS = (
    "openat,write,pwrite64,pwritev,pwritev2,ftruncate,fallocate,fsync,fdatasync,link,linkat,rename,renameat,renameat2,"
    "unlink,unlinkat,mkdir,mkdirat,sendto,sendmsg"
)

pytestmark = pytest.mark.timeout(900 if KILLS == "all" else 180)

#: Imports once, and forks a program for each kill: it says who it is, waits for a signal, saves, and says how that went.
ZYGOTE = """
import ctypes, json, os, signal, sys
from pathlib import Path
import numpy as np
from sublet.core import checkpoint
from sublet.core.checkpoint import ReplicaPolicy, Span
from sublet.ledger.sqlite import open_ledger
from sublet.ports.ledger import LeaseKey
from sublet.store import checkpoints
from sublet.store.arena import Arena
from sublet.store.checkpoints import CheckpointStore
from sublet.store.directory import DirectoryReplica
from sublet.store.packing import digest
from sublet.store.replicas import Replicas
from sublet.testing.clock import VirtualClock
from tests.store.test_killed_at_a_call import a_state, small

small()
digest(b"")
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

class Held:
    def __init__(self, key): self.key = LeaseKey(*key)
    def check(self): pass

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def program(url, key, folders, version, fill, behind):
    ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # whoever is not root may trace it too
    ledger = open_ledger(url, VirtualClock())
    store = CheckpointStore(Replicas([DirectoryReplica(Path(f)) for f in folders], ReplicaPolicy(replicas=3)), lambda: ledger)
    writer = 0
    checkpoints.WORTH_A_PROCESS = 0  # small states too
    if behind:
        store._write_elsewhere(Arena(4096), [Span(0, 1)])  # it is up
        writer = store._writer._process.pid
    ledger.head("team/job")
    say(pid=os.getpid(), writer=writer)
    signal.sigwait({signal.SIGUSR1})
    lease, state = Held(key), a_state(fill)
    if behind:
        saved = store.save_behind("team/job", state, expected_version=version, lease=lease).result(60)
    else:
        saved = store.save("team/job", state, expected_version=version, lease=lease)
    say(saved=saved.version)
    os._exit(0)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            program(**json.loads(line))
        except BaseException as e:
            say(failed=type(e).__name__, why=str(e)[:300])
        os._exit(1)
    say(ended=os.waitpid(child, 0)[1])
"""


def small() -> None:
    """Several chunks in a few kilobytes."""
    checkpoint.GROUP_BYTES, checkpoint.CHUNK_BYTES = 4096, 16384


def a_state(fill: int) -> dict[str, Any]:
    rng = random.Random(fill)
    return {
        "w": np.frombuffer(rng.randbytes(40_000), np.uint8),
        "same": np.zeros(9000),
        "b": bytes([fill % 256]) * 100,
        "n": fill,
    }


def filled(state: dict[str, Any]) -> int:
    """Which one it is; fails if it is none of them."""
    wanted = a_state(state["n"])
    assert state.keys() == wanted.keys()
    assert np.array_equal(state["w"], wanted["w"])
    assert np.array_equal(state["same"], wanted["same"])
    assert state["b"] == wanted["b"]
    return int(state["n"])


class Programs:
    def __init__(self, shelf: Shelf, folder: Path) -> None:
        self.shelf = shelf
        self._log = folder / "calls"
        self._writers: list[int] = []
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _said(self) -> dict[str, Any]:
        assert self._zygote.stdout is not None
        said: dict[str, Any] = json.loads(self._zygote.stdout.readline())
        return said

    def run(self, fill: int, whom: str, inject: str = "") -> tuple[list[dict[str, Any]], list[str]]:
        """One save under strace: what was said until it ended, and the calls that were seen, 'thread call'."""
        key = self.shelf.lease.key
        order = {
            "url": self.shelf.rig.url, "key": [key.lease_id, key.epoch, key.secret], "folders": [str(f) for f in self.shelf.folders],
            "version": self.shelf.version, "fill": fill, "behind": whom != "save",
        }  # fmt: skip
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(order) + "\n")
        self._zygote.stdin.flush()
        born = self._said()
        target = born["writer"] if whom == "writer" else born["pid"]
        command = ["strace", "-f", "-o", str(self._log), "-e", f"trace={CALLS}", "-p", str(target)]
        if inject:
            command += ["-e", f"inject={inject}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            words = strace.stderr.readline()
            need("attached" in words, f"strace that may trace ({words.strip()})")
            os.kill(born["pid"], signal.SIGUSR1)
            said = []
            while not said or "ended" not in said[-1]:
                said.append(self._said())
            strace.communicate(timeout=20)
        # Nobody waits for the writer of a program that was killed: the next one does not know of it either.
        self._writers = [pid for pid in (*self._writers, born["writer"]) if pid and not process_is_gone(pid)]
        seen = re.findall(r"^(\d+) +(\w+)\(", self._log.read_text(), re.MULTILINE)
        return said, [f"{thread} {call}" for thread, call in seen]

    def close(self) -> None:
        self._zygote.communicate(timeout=20)
        wait_until(lambda: all(process_is_gone(pid) for pid in self._writers), 20)


def check_head(shelf: Shelf) -> int:
    """The head's version is whole on as many replicas as must confirm, and loads from every quorum. Which state it is."""
    head = shelf.rig.ledger.head(JOB)
    assert head is not None
    having = [r for r in shelf.replicas if digest(r.get_manifest(head.digest) or b"") == head.digest]
    assert len(having) >= shelf.policy.write_quorum
    replicas = Replicas(shelf.replicas, shelf.policy)
    good: Counter[str] = Counter()
    for _, pack, how in replicas.inspect([replicas.manifest(head.digest)]):
        good[pack] += how == "good"
    assert min(good.values()) >= shelf.policy.write_quorum
    found = set()
    for lost in range(len(shelf.folders)):
        shelf.folders[lost].rename(f"{shelf.folders[lost]}-lost")
        ledger = shelf.rig.ledger
        with CheckpointStore(Replicas(shelf.replicas, shelf.policy), lambda ledger=ledger: ledger) as store:
            found.add(filled(store.load(JOB)))
        Path(f"{shelf.folders[lost]}-lost").rename(shelf.folders[lost])
    assert len(found) == 1
    return found.pop()


@pytest.fixture
def kept_sizes() -> Iterator[None]:
    before = checkpoint.GROUP_BYTES, checkpoint.CHUNK_BYTES
    small()
    yield
    checkpoint.GROUP_BYTES, checkpoint.CHUNK_BYTES = before


def places_of(programs: Programs, whom: str, least: int) -> list[tuple[str, int]]:
    """Each call of one save, at its first, second, … time; or a spread sample of them."""
    said, seen = programs.run(1, whom)
    assert said[0] == {"saved": 2}, said
    # How often each call is made by the thread that makes it most: strace counts for each thread.
    often: dict[str, int] = {}
    for (_, call), count in Counter(tuple(s.split()) for s in seen).items():
        often[call] = max(often.get(call, 0), count)
    assert {
        "pwritev2" if "pwritev2" in often else "pwritev",
        "fsync",
        "linkat",
    } <= often.keys() or whom == "behind", often
    places = [(call, n) for call, count in sorted(often.items()) for n in range(1, count + 1)]
    if KILLS != "all":
        places = sorted(random.Random(SEED).sample(places, min(least, len(places))))
    return places


@pytest.mark.usefixtures("kept_sizes")
@pytest.mark.parametrize("whom", ["save", "behind", "writer"])
def test_killed_at_the_nth_call(whom: str) -> None:
    need(shutil.which("strace") is not None, "strace")
    with in_memory() as folder:
        shelf = Shelf(folder)
        programs = Programs(shelf, folder)
        shelf.save(a_state(0), 0)
        places = places_of(programs, whom, int(KILLS) if KILLS != "all" else 0)
        outcomes: Counter[str] = Counter()
        for number, (call, n) in enumerate(places):
            before, fill = shelf.version, 10 + 2 * number
            was = check_head(shelf)
            said, _ = programs.run(fill, whom, f"{call}:signal=KILL:when={n}")
            where = f"{whom} killed at {call} number {n} (seed {SEED}): {said}"
            now = check_head(shelf)
            assert shelf.version in (before, before + 1), where
            assert now == (was if shelf.version == before else fill), where
            if any("saved" in s for s in said):
                assert shelf.version == before + 1, where
            assert (
                said[-1]["ended"] == signal.SIGKILL or whom == "writer" or any("saved" in s for s in said)
            ), where
            outcomes["new" if shelf.version > before else "old"] += 1
            outcomes["killed"] += not any("saved" in s for s in said)
            saved = shelf.save(a_state(fill + 1), shelf.version)
            assert (saved.version, check_head(shelf)) == (shelf.version, fill + 1), where
        assert outcomes["killed"] >= 0.6 * len(places), f"{outcomes} of {len(places)}"
        assert outcomes["old"], outcomes
        if whom != "writer" and KILLS == "all":
            assert outcomes["new"], outcomes
        assert shelf.rig.faults() == []
        print(f"{whom}: {len(places)} places, {dict(outcomes)}")
        programs.close()
        shelf.close()


#: What a disk, a quota or a remounted file system says.
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS")


@pytest.mark.usefixtures("kept_sizes")
@pytest.mark.parametrize("whom", ["save", "behind", "writer"])
@pytest.mark.parametrize("error", ERRORS if KILLS == "all" else ERRORS[:1])
def test_the_nth_call_fails(whom: str, error: str) -> None:
    """C6: whatever one call answers, the state is the old one or the new one, whole; a save that says it succeeded did."""
    need(shutil.which("strace") is not None, "strace")
    with in_memory() as folder:
        shelf = Shelf(folder)
        programs = Programs(shelf, folder)
        shelf.save(a_state(0), 0)
        places = places_of(programs, whom, 3)
        outcomes: Counter[str] = Counter()
        for number, (call, n) in enumerate(places):
            before, fill = shelf.version, 10 + 2 * number
            was = check_head(shelf)
            said, _ = programs.run(fill, whom, f"{call}:error={error}:when={n}")
            where = f"{error} for {whom} at {call} number {n} (seed {SEED}): {said}"
            now = check_head(shelf)
            assert shelf.version in (before, before + 1), where
            assert now == (was if shelf.version == before else fill), where
            if any("saved" in s for s in said):
                assert shelf.version == before + 1, where
            failed = next((s["failed"] for s in said if "failed" in s), "")
            outcomes[
                "saved"
                if any("saved" in s for s in said)
                else f"{failed or 'silent'}, {'new' if shelf.version > before else 'old'}"
            ] += 1
            saved = shelf.save(a_state(fill + 1), shelf.version)
            assert (saved.version, check_head(shelf)) == (shelf.version, fill + 1), where
        assert shelf.rig.faults() == []
        print(f"{whom} {error}: {len(places)} places, {dict(outcomes)}")
        programs.close()
        shelf.close()
