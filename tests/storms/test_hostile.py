"""Hostile sessions, in every way we know: at deadline + 1 s nothing of them lives and their memory is back (K1, K2; threats 14, 17).

Every kind with two of the things that are done from outside, each of which is done three times, in a random order; `SUBLET_HOSTILE=1000` in
`make proof`, which is every pair many times. The seed is printed first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import sublet
from sublet import wiring
from sublet.core.errors import Misconfigured, SubletError
from sublet.core.leasing.lease import EndReason
from sublet.core.scheduling.device import DeviceState
from sublet.devices.host import memory_name
from sublet.leases.lease import Lease
from sublet.leases.warden import warden_process
from sublet.processes.worker.local import LocalWorker
from tests.forked import Forked
from tests.homes import Home, close_home, make_home, process_is_gone, wait_until
from tests.seeds import SEED
from tests.storms import hostile

AT_ONCE = 10
MEMORY = 8 << 20

KINDS = (*(f.__name__ for f in hostile.KINDS), "kernel")
#: What is done from outside while the session does what it does.
OUTSIDE = ("nothing", "revoke", "kill supervisor", "stop supervisor", "kill warden", "stop ledger")
PAIRS = list(itertools.product(KINDS, OUTSIDE))
SESSIONS = int(os.environ.get("SUBLET_HOSTILE", "0")) or 2 * len(KINDS)

pytestmark = [pytest.mark.storm, pytest.mark.timeout(SESSIONS * 3 + 180)]


@dataclass
class Ended:
    kind: str
    outside: str
    late_us: int
    survivors: list[int]
    held: int
    quarantined: bool


def namespace_of(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def inhabitants(namespace: int) -> list[int]:
    """Everything in the session's PID namespace, which nothing inside can leave. Zombies hold nothing and do not count."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if namespace_of(int(name)) == namespace and not process_is_gone(int(name)):
                    found.append(int(name))
    return found


def runs_on(pid: int) -> bool:
    """One that was killed runs nothing more: on a crowded machine it may wait for a CPU, only to leave."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return not process_is_gone(pid) and not any(
            int(mask, 16) >> (signal.SIGKILL - 1) & 1
            for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", status, re.M)
        )
    return False


def pieces_of(device_id: str) -> set[int]:
    """The device memory in use, piece by piece: a later session on the device has others."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                link = f"/proc/{pid}/fd/{fd}"
                if memory_name(device_id) in os.readlink(link):
                    found.add(os.stat(link).st_ino)
    return found


@contextlib.contextmanager
def stopped_ledger(home: Home, seconds: float) -> Iterator[None]:
    """A process stopped in the middle of a write: nobody else can write, so nothing can be renewed, ended or settled."""
    code = (
        "import sys, time\n"
        "from sublet import wiring\n"
        "from sublet.settings import load_settings\n"
        "ledger = wiring.open_ledger(load_settings())\n"
        "def work(tx):\n"
        "    tx.pool\n"
        "    print('in', flush=True)\n"
        "    time.sleep(float(sys.argv[1]))\n"
        "ledger.engine.write(work, durable=False)\n"
    )
    with Forked(
        [sys.executable, "-c", code, str(seconds)], stdout=subprocess.PIPE, env=home.environment
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield


def session(home: Home, kind: str, outside: str, chance: random.Random) -> Ended | None:
    """One session, from lease to deadline + 1 s. None when no lease was to be had, or not in time."""
    ledger = wiring.open_ledger(home.settings)
    try:
        request = sublet.gpu(vram="32MiB", ttl="900ms", exclusivity="device", wait="20s", holder="worker")
        lease: Lease = request.ask()  # nobody renews it
    except SubletError:
        return None
    worker = lease._worker
    assert isinstance(worker, LocalWorker)
    # Held open, so that its number is not given to the next session's while we still ask for this one's.
    try:
        held_open = os.open(f"/proc/{worker.worker_pid}/ns/pid", os.O_RDONLY)
    except FileNotFoundError:  # on a crowded machine its time may be over before it could begin
        return None
    namespace = os.fstat(held_open).st_ino
    assert namespace != namespace_of(os.getpid())
    deadline = lease._ends_us
    started = threading.Thread(target=_misbehave, args=(lease, kind), daemon=True)
    started.start()
    time.sleep(chance.uniform(0.05, 0.3))
    mine = pieces_of(lease.devices[0])
    with contextlib.ExitStack() as stack:
        if outside == "revoke":
            with contextlib.suppress(SubletError):
                answer = ledger.revoke(
                    lease.id, reason=EndReason.REVOKED, detail="storm", grace_us=100_000, actor="storm"
                )
                deadline = time.monotonic_ns() // 1000 + answer.lease.ends_at - answer.at
        elif outside == "kill supervisor":
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.holder.pid, signal.SIGKILL)
        elif outside == "stop supervisor":
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.holder.pid, signal.SIGSTOP)
        elif outside == "kill warden":
            pid = home.warden_pid()
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)
        elif outside == "stop ledger":
            stack.enter_context(stopped_ledger(home, 1.5))
        pause = deadline + 1_000_000 - time.monotonic_ns() // 1000
        time.sleep(max(0, pause) / 1e6)
        late_us = time.monotonic_ns() // 1000 - deadline
        survivors = [pid for pid in inhabitants(namespace) if runs_on(pid)]
    wait_until(lambda: not inhabitants(namespace), 30)
    held = len(mine & pieces_of(lease.devices[0]))  # what a killed one holds goes with it
    os.close(held_open)
    wait_until(lambda: _settled(home, lease.id), 30)
    device = next(d for d in ledger.devices() if d.id == lease.devices[0])
    quarantined = device.state is DeviceState.QUARANTINED
    if quarantined:
        ledger.set_device(device.id, state="ready", note="", actor="storm")
    with contextlib.suppress(SubletError):
        lease.release()
    return Ended(kind, outside, late_us, survivors, held, quarantined)


def _settled(home: Home, lease_id: str) -> bool:
    """As any program that still renews would: see to it that there is a warden."""
    with contextlib.suppress(Misconfigured):  # another session killed it while it started
        warden_process.ensure_warden(home.settings)
    time.sleep(0.05)
    return bool(wiring.open_ledger(home.settings).look(lease_id).lease.settled_at)


def _misbehave(lease: Lease, kind: str) -> None:
    with contextlib.suppress(SubletError, OSError, ValueError):
        gpu = lease.open()
        gpu.alloc(MEMORY)
        if kind == "kernel":
            gpu.launch(gpu.load("def spin(grid):\n  while True: pass\n"), "spin")
        else:
            lease.run(getattr(hostile, kind))


def _rounds(chance: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Twice every kind, each time with something else."""
    kinds = chance.sample(KINDS, len(KINDS))
    for shift in chance.sample(range(len(OUTSIDE)), 2):
        pairs = [(kind, OUTSIDE[(n + shift) % len(OUTSIDE)]) for n, kind in enumerate(kinds)]
        yield chance.sample(pairs, len(pairs))


def test_nothing_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with capfd.disabled():
        print(f"\nhostile storm: {SESSIONS} sessions, SUBLET_SEED={SEED}", flush=True)
    home = make_home(tmp_path, f"sqlite:{tmp_path}/home/ledger.db", monkeypatch, f"host:{AT_ONCE}x64MiB")
    chance = random.Random(SEED)
    todo: queue.SimpleQueue[tuple[str, str, int]] = queue.SimpleQueue()
    planned = [pair for pairs in _rounds(chance) for pair in pairs]
    while len(planned) < SESSIONS:
        planned += chance.sample(PAIRS, len(PAIRS))
    for kind, outside in planned[:SESSIONS]:
        todo.put((kind, outside, chance.randrange(10**9)))
    done: list[Ended] = []
    refused = Counter[str]()
    warden_process.ensure_warden(home.settings)

    def run() -> None:
        while True:
            try:
                kind, outside, seed = todo.get_nowait()
            except queue.Empty:
                return
            ended = session(home, kind, outside, random.Random(seed))
            if ended is None:
                refused[outside] += 1
                todo.put((kind, outside, seed))
            else:
                done.append(ended)

    threads = [threading.Thread(target=run) for _ in range(AT_ONCE)]
    try:
        # Undone before `capfd` is: it would put back what that has closed by then.
        with monkeypatch.context() as quiet, open(os.devnull, "w") as nowhere:
            quiet.setattr("sys.stdout", nowhere)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        ledger = wiring.open_ledger(home.settings)
        receipts = [t.receipt for t in ledger.receipts(limit=10 * SESSIONS)]
        assert len(done) == SESSIONS
        assert [e for e in done if e.survivors] == []
        assert [e for e in done if e.held and not e.quarantined] == []
        assert not ledger.verify().faults
        # Every teardown is on record, and every rung of the ladder was needed by somebody.
        assert len(receipts) >= SESSIONS
        assert {"gone", "kill"} <= {r.ladder for r in receipts}
        assert not list((home.settings.home / "run").glob("worker-*"))
        with capfd.disabled():
            late = sorted(e.late_us for e in done)
            print(
                f"0 survivors of {len(done)}; quarantined {sum(e.quarantined for e in done)}; "
                f"ladder {dict(Counter(r.ladder for r in receipts))}; "
                f"containment {dict(Counter(r.containment for r in receipts))}; "
                f"looked {late[0] / 1e6:.2f}-{late[-1] / 1e6:.2f} s after the deadline",
                flush=True,
            )
    finally:
        close_home(home)
