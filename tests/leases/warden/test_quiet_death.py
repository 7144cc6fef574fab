"""I4: a warden that is broken, or that nobody can find any more, ends, and another takes over.

`SUBLET_DISK_FULL` says how often the disk fills up, `SUBLET_DISK_FULL_SECONDS` for how long; `make proof` says more.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet import wiring
from sublet.core.leasing.lease import EndReason, LeaseState, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.leases.warden import warden_process
from sublet.ports.ledger import Ledger
from sublet.processes.ladder import HostProcesses
from sublet.processes.loop_watch import EXIT_BROKEN
from tests.conftest import need
from tests.homes import Home, close_home, make_home, process_is_gone
from tests.leases.test_lease import HOLD, held, ledger_of
from tests.seeds import SEED
from tests.waiting import wait_until

ROUNDS = int(os.environ.get("SUBLET_DISK_FULL", "1"))
FULL_SECONDS = float(os.environ.get("SUBLET_DISK_FULL_SECONDS", "2"))
#: On a quiet machine it is two.
SETTLES_WITHIN_SECONDS = 20.0
DISK = "24m"
GIB = 1 << 30
SECOND = 1_000_000

#: A warden, as the command line starts it, with one fault put into it.
BROKEN = """
    import functools, sys, threading, time
    from sublet.leases.warden import warden, warden_process
    from sublet.cli.main import main

    turns = [0]
    talk = warden.Warden._talk_to_ledger
    probe = warden_process.find_host_devices

    def faulty(self, now):
        turns[0] += 1
        if turns[0] == 3:
            if sys.argv[1] == "dies":
                raise SystemExit
            time.sleep(3600)
        talk(self, now)

    warden.Warden._talk_to_ledger = faulty
    warden_process.LoopWatch = functools.partial(warden_process.LoopWatch, end_after_us=2_000_000)
    sys.argv[1:] = ["warden"]
    main()
"""


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_warden_whose_ledger_loop_is_broken_ends_and_another_takes_over(
    sqlite_home: Home, how: str
) -> None:
    """The lock said ready, and an expired lease was never ended."""
    broken = sqlite_home.start(BROKEN, how)
    assert broken.wait(timeout=60) == EXIT_BROKEN
    holder = sqlite_home.start(HOLD, "2s")
    lease_id, _, _ = held(holder)
    holder.kill()
    wait_until(lambda: ledger_of(sqlite_home).look(lease_id).lease.settled_at)


def test_a_warden_whose_home_was_deleted_ends(sqlite_home: Home) -> None:
    """Also one that has something to enforce, and is not told to leave when idle."""
    holder = sqlite_home.start(HOLD, "10m")
    held(holder)
    pid = sqlite_home.warden_pid()
    shutil.rmtree(sqlite_home.settings.home)
    wait_until(lambda: process_is_gone(pid))
    holder.kill()


def test_a_log_that_can_never_be_written_stops_nothing(sqlite_home: Home) -> None:
    log = sqlite_home.settings.home / "warden.log"
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    holder = sqlite_home.start(HOLD, "2s")
    lease_id, _, _ = held(holder)
    holder.kill()
    wait_until(lambda: ledger_of(sqlite_home).look(lease_id).lease.settled_at)


def test_what_its_loops_do_is_shown(sqlite_home: Home) -> None:
    def status() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sublet", "warden", "--status"]
        return subprocess.run(command, capture_output=True, text=True, env=sqlite_home.environment)

    none = status()
    assert none.returncode == 78
    assert "it does not run" in none.stderr
    warden_process.ensure_warden(sqlite_home.settings)
    wait_until(lambda: len(warden_process.warden_health(sqlite_home.settings).silent_us) == 5)
    fine = status()
    assert fine.returncode == 0, fine.stderr
    for loop in ("enforcing", "ledger", "bell", "arenas", "watching"):
        assert loop in fine.stdout


# --- a full disk ---


@pytest.fixture
def small_disk() -> Iterator[Path]:
    need(os.getuid() == 0, "root, to mount a small disk")
    with tempfile.TemporaryDirectory(prefix="sublet-full-") as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=False)
        need(mounted.returncode == 0, "the right to mount a small disk")
        yield Path(folder)
        subprocess.run(["umount", "-l", folder], check=False, stderr=subprocess.DEVNULL)


@pytest.fixture
def small_home(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    made = make_home(small_disk, f"sqlite:{small_disk}/home/ledger.db", monkeypatch, "host:1x16GiB")
    yield made
    close_home(made)


@contextlib.contextmanager
def _full(disk: Path) -> Iterator[None]:
    """Every byte is taken, also those of whatever is freed meanwhile."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    try:
        yield
    finally:
        filler.unlink()


class Queue:
    """Leases of processes that never renew, each for the whole device: one is held, the next one waits."""

    def __init__(self, home: Home, ledger: Ledger) -> None:
        self._home, self._ledger = home, ledger
        self._processes = HostProcesses(home.settings["host"])
        self._sleepers: dict[str, subprocess.Popen[bytes]] = {}
        ledger.add_tenant(Tenant(name="t"), actor="test")

    def ask(self, lease_id: str, ttl_us: int) -> LeaseState:
        sleeper = subprocess.Popen(["sleep", "3600"])
        self._sleepers[lease_id] = sleeper
        request = Request(tenant="t", vram_bytes=16 * GIB, ttl_us=ttl_us, host=self._home.settings["host"])
        return self._ledger.acquire(
            lease_id, "secret", request, self._processes.identify(sleeper.pid)
        ).lease.state

    def end(self) -> None:
        for sleeper in self._sleepers.values():
            sleeper.kill()
            sleeper.wait()


def test_a_full_disk_is_survived_by_the_warden(small_disk: Path, small_home: Home) -> None:
    """Leases come due while nothing can be written. When there is room again everything settles, with no hand moved."""
    random_pause = random.Random(SEED)
    warden_process.ensure_warden(small_home.settings)
    ledger = ledger_of(small_home)
    queue = Queue(small_home, ledger)
    try:
        for number in range(ROUNDS):
            assert queue.ask(f"Ldue{number}", SECOND) is LeaseState.ACTIVE
            assert queue.ask(f"Lnext{number}", 600 * SECOND) is LeaseState.WAITING
            time.sleep(random_pause.uniform(0, 1.0))  # before, at and after the moment it comes due
            with _full(small_disk):
                time.sleep(FULL_SECONDS)
            free_at = time.monotonic()
            wait_until(
                lambda n=number: _settled(ledger, f"Ldue{n}"), what="the lease that came due is settled"
            )
            wait_until(lambda n=number: ledger.look(f"Lnext{n}").lease.state is LeaseState.ACTIVE)
            assert time.monotonic() - free_at < SETTLES_WITHIN_SECONDS
            assert ledger.look(f"Ldue{number}").lease.reason is EndReason.EXPIRED
            assert ledger.release(f"Lnext{number}", "secret")
        assert not ledger.verify().faults
        assert ledger.devices()[0].free_bytes == 16 * GIB
        assert warden_process.warden_health(small_home.settings).problem == ""
    finally:
        queue.end()


def _settled(ledger: Ledger, lease_id: str) -> bool:
    return bool(ledger.look(lease_id).lease.settled_at)


def test_a_warden_whose_home_was_unmounted_ends(small_disk: Path, small_home: Home) -> None:
    warden_process.ensure_warden(small_home.settings)
    pid = small_home.warden_pid()
    wiring.close_all()
    subprocess.run(["umount", "-l", str(small_disk)], check=True)
    wait_until(lambda: process_is_gone(pid))
