"""Several machines on one PostgreSQL, each with its own `sublet warden`: what one grants, what a lost or frozen one leaves to the others.

A machine here is a home and a SUBLET_HOST of its own; everything else of it is real.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.leasing.tenancy import Tenant
from sublet.core.scheduling.device import DeviceState
from sublet.leases.warden.warden_process import system_lock_path
from sublet.ledger.engines.postgres.engine import open_ledger
from sublet.processes.clock import HostClock
from sublet.processes.pid_lock import state_of
from sublet.settings import load_settings
from tests import forked
from tests.conftest import need
from tests.homes import process_is_gone, wait_until

POLICY = '[policy]\nhost_silence = "2s"\nhost_gone = "6s"\n'

HOLD = """
    import sublet, sys
    with sublet.gpu(vram="16GiB", ttl=sys.argv[1], tier="batch") as lease:
        print("held", lease.id, lease.devices[0], flush=True)
        sys.stdin.readline()
"""
#: Steps until it is told, stopped or killed; after a stop, what it still dares to write.
STEPS = """
    import sublet, sys, time
    from sublet import wiring
    from sublet.core.progress.effect import Commit
    ledger = wiring.open_ledger(wiring.load_settings())
    with sublet.gpu(vram="16GiB", ttl="5s", tier="batch", holder="name") as lease:
        print("held", lease.id, lease.devices[0], flush=True)
        step = 0
        while True:
            step += 1
            try:
                ledger.commit(lease.key, Commit(job="j", key=f"j:{step}", step=step, fingerprint="f",
                                                expected_version=step - 1, digest=f"d{step}"))
            except sublet.SubletError as e:
                print("refused", e.code, step, flush=True)
                break
            time.sleep(0.05)
"""


class Machine:
    def __init__(self, folder: Path, ledger: str, name: str) -> None:
        self.name = f"{name}-{uuid.uuid4().hex[:6]}"  # device memory is looked for machine-wide
        self.home = folder / name
        self.home.mkdir()
        (self.home / "sublet.toml").write_text(POLICY)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")} | {
            "SUBLET_HOME": str(self.home),
            "SUBLET_LEDGER": ledger,
            "SUBLET_HOST": self.name,
            "SUBLET_DEVICES": "host:1x16GiB",
            "SUBLET_PRELOAD": "none",
            "SUBLET_TENANT": "ada",
        }
        self.processes: list[Any] = []
        self.wardens: list[Any] = []

    @property
    def device(self) -> str:
        return f"{self.name}-host0"

    def warden(self, *options: str) -> Any:
        log = (self.home / "warden.out").open("ab")
        command = [sys.executable, "-m", "sublet", "warden", *options]
        started = forked.Forked(command, env=self.environment, stderr=log, stdin=subprocess.DEVNULL)
        self.wardens.append(started)
        wait_until(lambda: f"watching {self.name}" in self.log())
        return started

    def log(self) -> str:
        return (self.home / "warden.out").read_text()

    def start(self, code: str, *args: str) -> Any:
        command = [sys.executable, "-u", "-c", textwrap.dedent(code), *args]
        child = forked.Forked(
            command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(child)
        return child

    def signal(self, number: int) -> None:
        """To everything that runs on it, at once."""
        for process in [*self.wardens, *self.processes]:
            if not process_is_gone(process.pid):
                os.kill(process.pid, number)

    def end(self) -> None:
        for process in [*self.wardens, *self.processes]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def ledger_url(postgres_server: Any) -> str:
    return f"{postgres_server.url}&sublet_schema=m{uuid.uuid4().hex[:12]}"


@pytest.fixture
def two(tmp_path: Path, ledger_url: str) -> Iterator[tuple[Machine, Machine, Any]]:
    forked.warm()
    ledger = open_ledger(ledger_url, HostClock())
    ledger.add_tenant(Tenant(name="ada"), actor="test")
    left, right = Machine(tmp_path, ledger_url, "left"), Machine(tmp_path, ledger_url, "right")
    yield left, right, ledger
    for machine in (left, right):
        machine.end()
    ledger.close()


def held(child: Any) -> tuple[str, str]:
    word, lease_id, device = child.stdout.readline().split()
    assert word == "held"
    return lease_id, device


def states(ledger: Any) -> dict[str, DeviceState]:
    return {d.host: d.state for d in ledger.devices()}


def test_each_machine_leases_its_own_devices_and_waits_for_them(two: tuple[Machine, Machine, Any]) -> None:
    left, right, ledger = two
    left.warden(), right.warden()
    first = left.start(HOLD, "1m")
    first_id, device = held(first)
    assert device == left.device
    second = left.start(HOLD, "1m")
    wait_until(lambda: any(a.lease.state is LeaseState.WAITING for a in ledger.leases()))
    far = right.start(HOLD, "1m")  # what is free on the right is for who is there
    assert held(far)[1] == right.device
    far.stdin.write("\n")
    far.stdin.flush()
    far.wait(timeout=20)
    [waiting] = [a.lease for a in ledger.leases() if a.lease.state is LeaseState.WAITING]
    assert waiting.holder.host == left.name
    first.kill()  # seen by the left's warden, not by the right's
    assert held(second)[1] == left.device
    wait_until(lambda: ledger.look(first_id).lease.settled_at)
    assert ledger.look(first_id).lease.reason is EndReason.HOLDER_LOST
    assert not ledger.verify().faults


def test_a_machine_that_dies_leaves_its_leases_to_their_deadlines_and_the_others_in_peace(
    two: tuple[Machine, Machine, Any],
) -> None:
    left, right, ledger = two
    ledger.set_tenant("ada", actor="test", max_leases=2)
    left.warden(), right.warden()
    gone_id, _ = held(left.start(HOLD, "2s"))
    right_holder = right.start(HOLD, "2s")
    right_id, _ = held(right_holder)
    left.signal(signal.SIGKILL)
    wait_until(lambda: ledger.look(gone_id).lease.state is LeaseState.ENDED)
    ended = ledger.look(gone_id).lease
    assert (ended.reason, ended.settled_at) == (EndReason.EXPIRED, 0)  # nobody saw what it left
    wait_until(lambda: states(ledger)[left.name] is DeviceState.LOST)
    assert ledger.tenant("ada").live_leases == 2
    # Given up: the tenant may use its quota elsewhere, and the device waits for somebody who looks.
    wait_until(lambda: ledger.look(gone_id).lease.settled_at)
    assert ledger.tenant("ada").live_leases == 1
    assert states(ledger) == {left.name: DeviceState.QUARANTINED, right.name: DeviceState.READY}
    assert ledger.look(right_id).lease.state is LeaseState.ACTIVE
    assert not process_is_gone(right_holder.pid)
    assert not ledger.verify().faults


def test_a_machine_without_work_looks_after_its_neighbours(two: tuple[Machine, Machine, Any]) -> None:
    left, right, ledger = two
    left.warden(), right.warden()
    gone_id, _ = held(left.start(HOLD, "1s"))
    left.signal(signal.SIGKILL)
    wait_until(lambda: ledger.look(gone_id).lease.state is LeaseState.ENDED)
    wait_until(lambda: states(ledger)[left.name] is DeviceState.LOST)


def test_a_frozen_machine_loses_its_leases_and_its_zombie_writes_nothing(
    two: tuple[Machine, Machine, Any],
) -> None:
    left, right, ledger = two
    left.warden(), right.warden()
    zombie = left.start(STEPS)
    zombie_id, _ = held(zombie)
    wait_until(lambda: (ledger.head("j") or None) and ledger.head("j").version >= 2)
    left.signal(signal.SIGSTOP)
    wait_until(lambda: ledger.look(zombie_id).lease.state is LeaseState.ENDED)
    wait_until(lambda: states(ledger)[left.name] is DeviceState.LOST)
    version = ledger.head("j").version
    left.signal(signal.SIGCONT)
    word, code, _ = zombie.stdout.readline().split()
    assert (word, code) == ("refused", "fenced")
    assert ledger.head("j").version == version
    # Its warden is back: so are its devices, long before the next look at all of them.
    wait_until(lambda: states(ledger)[left.name] is DeviceState.READY)
    assert held(left.start(HOLD, "1m"))[1] == left.device
    assert not ledger.verify().faults


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_a_machine_that_was_given_up_shows_that_it_is_clean_when_it_is_back(
    two: tuple[Machine, Machine, Any], how: str
) -> None:
    """K1, K3: nobody has to clear what was only withheld because nobody could look."""
    left, right, ledger = two
    left.warden(), right.warden()
    holder = left.start(HOLD, "2s")
    lease_id, _ = held(holder)
    left.signal(signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
    wait_until(lambda: states(ledger)[left.name] is DeviceState.QUARANTINED)
    if how == "frozen":
        left.signal(signal.SIGCONT)
    else:
        left.warden()
    wait_until(lambda: states(ledger)[left.name] is DeviceState.READY)
    assert process_is_gone(holder.pid)
    [receipt] = [t.receipt for t in ledger.receipts() if t.lease_id == lease_id]
    assert receipt.proven
    assert held(left.start(HOLD, "1m"))[1] == left.device
    assert not ledger.verify().faults


def test_a_machine_that_is_given_back_tells_its_holders_and_leaves_clean(
    two: tuple[Machine, Machine, Any],
) -> None:
    left, right, ledger = two
    leaving = left.warden("--drain", "10s")
    right.warden()
    polite = left.start(
        """
        import sublet, sys, time
        with sublet.gpu(vram="8GiB", ttl="1m") as lease:
            print("held", lease.id, lease.devices[0], flush=True)
            while lease.notice is None:
                time.sleep(0.01)
            print(lease.notice.reason, flush=True)
        """
    )
    lease_id, _ = held(polite)
    waiting = left.start(HOLD, "1m")
    wait_until(lambda: any(a.lease.state is LeaseState.WAITING for a in ledger.leases()))
    os.kill(leaving.pid, signal.SIGTERM)
    assert "given back" in polite.stdout.readline()
    assert polite.wait(timeout=20) == 0
    assert waiting.wait(timeout=20) != 0  # it waits for nothing
    assert leaving.wait(timeout=20) == 0
    assert "left clean" in left.log()
    assert ledger.look(lease_id).lease.settled_at
    assert states(ledger) == {left.name: DeviceState.LOST, right.name: DeviceState.READY}
    assert not ledger.verify().faults


SYSTEM = """
    import sublet, sys
    with sublet.gpu(vram="1GiB", ttl="1m") as lease:
        print("held", lease.id, lease.devices[0], flush=True)
        sys.stdin.readline()
"""


def test_a_machines_own_warden_is_everybodys_and_nobody_starts_another(
    tmp_path: Path, postgres_server: Any
) -> None:
    """Two users with homes of their own, known to PostgreSQL by different names: one warden, also while it is away for a moment."""
    need(os.geteuid() == 0, "root, for /run/sublet,")
    forked.warm()
    schema = f"m{uuid.uuid4().hex[:12]}"
    mine, yours = (
        f"postgresql://{user}@/postgres?host={postgres_server.folder}&user=sublet&sublet_schema={schema}"
        for user in ("sublet", "somebody")
    )
    ledger = open_ledger(mine, HostClock())
    ledger.add_tenant(Tenant(name="ada"), actor="test")
    machine = Machine(tmp_path, mine, "shared")
    user = Machine(tmp_path, yours, "user")
    user.environment["SUBLET_HOST"] = machine.name
    lock = system_lock_path(load_settings(ledger=yours, host=machine.name))
    assert lock == system_lock_path(load_settings(ledger=mine, host=machine.name))
    try:
        first = machine.warden("--system")
        assert state_of(lock) == (True, True, first.pid)
        child = user.start(SYSTEM)
        lease_id, device = held(child)
        assert device == machine.device
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        waiting = user.start(SYSTEM)  # while there is none: it waits for the machine's
        (machine.home / "warden.out").write_text("")
        second = machine.warden("--system")
        assert held(waiting)[1] == machine.device
        assert state_of(lock) == (True, True, second.pid)
        assert not list(user.home.glob("warden-*.lock")), "a user's own was started"
        child.kill()
        wait_until(lambda: ledger.look(lease_id).lease.settled_at)
    finally:
        for one in (machine, user):
            one.end()
        lock.unlink(missing_ok=True)
        ledger.close()
