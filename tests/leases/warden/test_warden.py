"""The warden: enforcement without the ledger, recovery from its own death, and what it must never do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet import wiring
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.scheduling.device import DeviceState
from sublet.leases.warden import warden_process
from sublet.ports.processes import Receipt
from sublet.processes.ladder import HostProcesses
from sublet.settings import Settings
from sublet.testing.postgres import PostgresServer, find_binaries
from tests.conftest import need
from tests.homes import Home, close_home, make_home, process_is_gone, wait_until
from tests.leases.test_lease import HOLD, held, ledger_of


def test_a_killed_warden_is_replaced_and_the_new_one_sees_the_same_leases(home: Home) -> None:
    """K3: kill -9 of the warden, then of a holder while none watches: the next warden finds and settles it."""
    keeper = home.start(HOLD, "2s")
    keeper_id, _, _ = held(keeper)
    old = home.end_warden(signal.SIGKILL)
    # The holder's own renewal brings a new warden, within one ttl.
    wait_until(lambda: home.warden_pid() not in (0, old))
    ledger = ledger_of(home)
    assert ledger.look(keeper_id).lease.state is LeaseState.ACTIVE
    assert not process_is_gone(keeper.pid)
    home.end_warden(signal.SIGKILL)
    keeper.kill()
    keeper.wait()
    warden_process.ensure_warden(home.settings)
    wait_until(lambda: ledger.look(keeper_id).lease.settled_at)
    assert ledger.look(keeper_id).lease.reason in (EndReason.HOLDER_LOST, EndReason.EXPIRED)
    assert ledger.devices()[0].leases == 0
    assert not ledger.verify().faults


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Home, PostgresServer]]:
    """A home on a PostgreSQL server of its own, which the test may crash."""
    need(find_binaries() is not None, "a PostgreSQL server")
    server = PostgresServer()
    server.start()
    home = make_home(tmp_path, f"{server.url}&sublet_schema=fragile", monkeypatch, "host:1x16GiB")
    yield home, server
    close_home(home)
    server.stop()


def test_the_deadline_is_enforced_while_the_ledger_is_down(fragile: tuple[Home, PostgresServer]) -> None:
    """K2: PostgreSQL killed with -9, a holder stopped: it dies at its deadline; the books are made up afterwards."""
    home, server = fragile
    child = home.start(HOLD, "4s")
    lease_id, _, _ = held(child)
    ledger = ledger_of(home)
    wait_until(lambda: "watching" in (home.settings.home / "warden.log").read_text())
    time.sleep(1.2)  # one polling interval: the warden has certainly seen the lease
    server.crash()
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: process_is_gone(child.pid))
    server.start()
    wait_until(lambda: ledger.look(lease_id).lease.settled_at)
    assert ledger.look(lease_id).lease.reason is EndReason.EXPIRED
    assert ledger.devices()[0].free_bytes == 16 << 30
    assert not ledger.verify().faults


def test_a_holder_whose_ledger_is_down_is_warned_and_stops_by_itself(
    fragile: tuple[Home, PostgresServer],
) -> None:
    """L6, L7: no answer means not held, and the Notice comes before the expiry."""
    home, server = fragile
    child = home.start(
        """
        import sublet, time
        with sublet.gpu(vram="1GiB", ttl="5s", holder="name") as lease:
            began = time.monotonic()
            print("held", lease.id, lease.epoch, 0, flush=True)
            while lease.notice is None:
                time.sleep(0.01)
            print("noticed", lease.seconds_left > 0, lease.status, flush=True)
            while lease.status == "active":
                time.sleep(0.01)
            print("stopped", time.monotonic() - began < 5, flush=True)
        """
    )
    held(child)
    server.crash()
    assert child.stdout.readline().split() == ["noticed", "True", "active"]
    assert child.stdout.readline().split() == ["stopped", "True"]
    assert child.wait(timeout=20) == 0


def test_a_process_stopped_inside_a_transaction_does_not_stop_the_others(sqlite_home: Home) -> None:
    """The writer lock's owner is let run for the moment it needs, then stopped again."""
    with sublet.gpu(vram="1GiB"):
        stuck = sqlite_home.start(
            """
            import os, signal
            from sublet import wiring
            from sublet.machine import failpoints
            ledger = wiring.open_ledger(wiring.load_settings())
            failpoints.arm("before_commit", lambda: os.kill(os.getpid(), signal.SIGSTOP))
            ledger.seal()
            print("went on", flush=True)
            os.read(0, 1)
            """
        )
        wait_until(lambda: _state(stuck.pid) == "T")
        begun = time.monotonic()
        with sublet.gpu(vram="1GiB", wait=0):
            waited = time.monotonic() - begun
        assert waited < 30
        wait_until(lambda: _state(stuck.pid) == "T")  # still as its user left it
        os.kill(stuck.pid, signal.SIGCONT)
        assert stuck.stdout.readline().strip() == "went on"


def _state(pid: int) -> str:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2]


def test_only_one_warden_and_a_second_says_so(sqlite_home: Home) -> None:
    warden_process.ensure_warden(sqlite_home.settings)
    second = subprocess.run(
        [sys.executable, "-m", "sublet", "warden"],
        capture_output=True,
        text=True,
        env=sqlite_home.environment,
    )
    assert second.returncode == 78
    assert "already runs" in second.stderr


def test_one_that_is_killed_while_it_starts_is_started_again(
    sqlite_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K3: that it ended once says nothing of why."""
    start, started = warden_process._spawn_warden, list[int]()

    def spawn(settings: Settings, for_pid: int) -> int:
        started.append(start(settings, for_pid))
        if len(started) == 1:
            os.kill(started[0], signal.SIGKILL)
        return started[-1]

    monkeypatch.setattr(warden_process, "_spawn_warden", spawn)
    warden_process.ensure_warden(sqlite_home.settings)
    assert len(started) == 2
    assert sqlite_home.warden_pid() == started[1]


def test_ten_processes_starting_at_once_share_one_warden(sqlite_home: Home) -> None:
    children = [
        sqlite_home.start("import sublet\nwith sublet.gpu(vram='1GiB') as lease: print(lease.id, flush=True)")
        for _ in range(10)
    ]
    ids = {child.stdout.readline().strip() for child in children}
    assert len(ids) == 10
    assert all(child.wait(timeout=30) == 0 for child in children)
    log = (sqlite_home.settings.home / "warden.log").read_text()
    assert log.count("watching") == 1, log


def test_an_unproven_teardown_withholds_the_device_until_cleared(sqlite_home: Home) -> None:
    ledger = ledger_of(sqlite_home)
    with sublet.gpu(vram="1GiB", holder="name") as lease:
        ledger.end(lease.id, lease.epoch, reason=EndReason.EXPIRED, detail="test")
        ledger.settle(
            lease.id,
            lease.epoch,
            Receipt(proven=False, ladder="unproven", containment="none", detail="pid 7 outlived SIGKILL"),
        )
    device = ledger.devices()[0]
    assert device.state is DeviceState.QUARANTINED
    assert "outlived SIGKILL" in device.note
    with pytest.raises(sublet.NoCapacity):
        sublet.gpu(vram="1GiB", wait=0).acquire()
    ledger.set_device(device.id, state="ready", note="", actor="op")
    with sublet.gpu(vram="1GiB", wait=0):
        pass


def test_the_ladder_ends_a_whole_tree_that_ignores_term() -> None:
    """K1."""
    processes = HostProcesses("here")
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, signal, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "for _ in range(3):\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        os.fork()\n"
            "        break\n"
            "print('up', flush=True)\n"
            "time.sleep(100)\n",
        ],
        stdout=subprocess.PIPE,
    )
    for _ in range(7):
        child.stdout.readline()
    holder = processes.identify(child.pid)
    receipt = processes.end(holder, 100_000)
    assert receipt.proven
    assert receipt.ladder == "kill"
    assert len(receipt.pids) == 7
    assert all(process_is_gone(pid) for pid in receipt.pids)
    child.wait()
    child.stdout.close()


def test_a_recycled_pid_is_nobody() -> None:
    processes = HostProcesses("here")
    me = processes.identify(os.getpid())
    from dataclasses import replace

    stranger = replace(me, started=me.started + 1)
    assert processes.watch(stranger) is None
    assert processes.end(stranger, 0).ladder in ("gone", "unproven")
    bystander = subprocess.Popen(["sleep", "60"])
    other = replace(processes.identify(bystander.pid), started=1)
    assert processes.end(other, 0).ladder == "gone"
    assert bystander.poll() is None, "a process that only shares the pid was killed"
    bystander.kill()
    bystander.wait()


def test_a_warden_never_ends_itself_or_init() -> None:
    processes = HostProcesses("here")
    assert not processes.end(processes.identify(os.getpid()), 0).proven
    assert not processes.end(processes.identify(1), 0).proven


def test_a_waiter_that_died_and_was_granted_meanwhile_is_not_forgotten(sqlite_home: Home) -> None:
    """The warden reads it as a waiter; before it can say so, somebody's release grants it. It must end all the same."""
    from sublet.core.leasing.lease import Request
    from sublet.core.leasing.tenancy import Tenant

    ledger = ledger_of(sqlite_home)
    host = sqlite_home.settings["host"]
    ledger.add_tenant(Tenant(name="t"), actor="test")
    ledger.report_host(host, wiring.find_host_devices(sqlite_home.settings))
    processes = HostProcesses(host)
    sleeper = subprocess.Popen(["sleep", "60"])
    whole = Request(tenant="t", vram_bytes=16 << 30, ttl_us=600_000_000, host=host)
    me = processes.identify(os.getpid())
    ledger.acquire("Lfirst", "s", whole, me)
    waiting = ledger.acquire("Lsecond", "s", whole, processes.identify(sleeper.pid))
    assert waiting.lease.state is LeaseState.WAITING
    warden = warden_process.make_warden(sqlite_home.settings, idle_exit_us=None, log=lambda line: None)
    warden._refresh()
    sleeper.kill()
    sleeper.wait()
    warden._shared.watched["Lsecond"].gone = True
    ledger.release("Lfirst", "s")  # the dead waiter is granted here, behind the warden's back
    assert ledger.look("Lsecond").lease.state is LeaseState.ACTIVE
    for _ in range(3):
        for watched in list(warden._shared.watched.values()):
            if watched.gone:
                warden._tear_down(watched)
        warden._settle()
        warden._refresh()
    ended = ledger.look("Lsecond").lease
    assert ended.settled_at
    assert ended.reason is EndReason.HOLDER_LOST
    assert ledger.devices()[0].leases == 0


def test_a_lost_holders_lease_is_over_before_its_teardown_is_proven(sqlite_home: Home) -> None:
    """Whoever continues the job need not wait for the proof; whoever wants the memory does."""
    from sublet.core.leasing.lease import Request
    from sublet.core.leasing.tenancy import Tenant

    ledger = ledger_of(sqlite_home)
    host = sqlite_home.settings["host"]
    ledger.add_tenant(Tenant(name="t"), actor="test")
    ledger.report_host(host, wiring.find_host_devices(sqlite_home.settings))
    sleeper = subprocess.Popen(["sleep", "60"])
    whole = Request(tenant="t", vram_bytes=16 << 30, ttl_us=600_000_000, host=host)
    ledger.acquire("Lfirst", "s", whole, HostProcesses(host).identify(sleeper.pid))
    warden = warden_process.make_warden(sqlite_home.settings, idle_exit_us=None, log=lambda line: None)
    proven, prove = threading.Event(), warden._tear_down

    def prove_later(watched: object) -> None:
        proven.wait(30)
        prove(watched)  # type: ignore[arg-type]

    warden._tear_down = prove_later  # type: ignore[method-assign,assignment]
    running = threading.Thread(target=warden.run, daemon=True)
    running.start()
    try:
        wait_until(lambda: "Lfirst" in warden._shared.watched)
        sleeper.kill()
        sleeper.wait()
        wait_until(lambda: ledger.look("Lfirst").lease.state is LeaseState.ENDED)
        ended = ledger.look("Lfirst").lease
        assert ended.reason is EndReason.HOLDER_LOST
        assert not ended.settled_at
        assert ledger.devices()[0].leases == 1, "its slices are free only when nothing of it is left"
        proven.set()
        wait_until(lambda: ledger.look("Lfirst").lease.settled_at)
        assert ledger.look("Lfirst").lease.reason is EndReason.HOLDER_LOST
        assert ledger.devices()[0].leases == 0
    finally:
        proven.set()
        warden.stop()
        running.join(60)
