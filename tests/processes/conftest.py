"""One zygote for the whole folder, a worker of its own for each test; both are gone afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.processes.sandbox.containment import Group, group_name
from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.workers import LocalWorkers
from tests.homes import process_is_gone, wait_until

#: Far enough for any test, near enough that what a broken test leaves behind goes away by itself.
FAR_US = 120_000_000
REPOSITORY = Path(__file__).parents[2]
#: What the zygote has imported: what the tests' functions in a worker need.
PRELOAD = "numpy,pytest,sublet"


def now_us() -> int:
    return time.monotonic_ns() // 1000


def moved_in(workers: LocalWorkers) -> LocalWorker:
    """A worker as a lease would have it: armed, and begun."""
    worker = workers.start()
    worker.arm(now_us() + FAR_US, now_us() + FAR_US, confirm=True)
    worker.begin("lease-1", 7, {})
    return worker


def zygote_pids(home: Path) -> list[int]:
    found = [
        int(lock.read_text()) for lock in (home / "run").glob("zygote-*.lock") if lock.read_text().strip()
    ]
    return [pid for pid in found if not process_is_gone(pid)]


def end_zygotes(home: Path) -> None:
    pids = zygote_pids(home)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_until(lambda pid=pid: process_is_gone(pid))


def remove_group(pid: int, started: int) -> None:
    """Of a supervisor that a test killed: what it could not remove is the warden's to sweep, and there is
    none here."""
    group = Group.find(group_name(pid, started))
    if group is not None:
        group.kill()
        assert group.emptied(5_000_000)
        group.remove()


def script(code: str, *args: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it as `__main__` of a process of its own, which is where functions and classes by value come
    from."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ) | {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"} | environment,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("hosting")
    yield made
    end_zygotes(made)


@pytest.fixture(scope="session")
def workers(folder: Path) -> LocalWorkers:
    return LocalWorkers(folder, "here", PRELOAD)


@contextlib.contextmanager
def one_of(workers: LocalWorkers) -> Iterator[LocalWorker]:
    made = moved_in(workers)
    yield made
    made.end("the test is over")
    for pid in (made.worker_pid, made.holder.pid):
        wait_until(lambda pid=pid: process_is_gone(pid))


@pytest.fixture
def worker(workers: LocalWorkers) -> Iterator[LocalWorker]:
    with one_of(workers) as made:
        yield made


@pytest.fixture
def torch_worker(folder: Path) -> Iterator[LocalWorker]:
    """With torch a fork costs five times as much: for those that use it."""
    with one_of(LocalWorkers(folder, "here", "torch,numpy,sublet")) as made:
        yield made
