"""Leased workers: what runs there, what comes back, and that lease, worker and device memory end together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import sublet
from sublet import wiring
from sublet.core.errors import BadInput, CallFailed, LeaseLost, OutOfMemory, WorkerLost
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.scheduling.device import DeviceState
from sublet.devices.host import leaks
from sublet.leases.lease import Lease
from sublet.leases.warden import warden_process
from sublet.processes.worker.local import LocalWorker
from tests.conftest import need
from tests.homes import Home, close_home, make_home, process_is_gone, wait_until


def worker_of(lease: Lease) -> LocalWorker:
    assert isinstance(lease._worker, LocalWorker)
    return lease._worker


def settled(home: Home, lease_id: str) -> bool:
    return bool(wiring.open_ledger(home.settings).look(lease_id).lease.settled_at)


def loop() -> None:
    while True:
        pass


class Unsendable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raise_unsendable() -> None:
    raise Unsendable(1, 2)


def test_work_runs_elsewhere_and_comes_back(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(n: int) -> list[int]:
        print("counting")
        print("careful", file=sys.stderr)
        os.write(1, b"from below\n")
        return list(range(n))

    with sublet.gpu(vram="1GiB", ttl="30s", holder="worker") as lease:
        assert lease.run(os.getpid) != os.getpid()
        assert lease.run(noisy, 3) == [0, 1, 2]
        shown = capsys.readouterr()
        assert shown.out.splitlines() == ["counting", "from below"]
        assert shown.err == "careful\n"
        assert lease.run(dict, a=1) == {"a": 1}
        environment = lease.run(lambda: dict(os.environ))
        assert environment["SUBLET_LEASE_ID"] == lease.id
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        # Nothing in there says where the ledger is.
        assert not [k for k in environment if k in ("SUBLET_LEDGER", "SUBLET_HOME", "SUBLET_TOKEN")]
        worker_pid, holder_pid = worker_of(lease).worker_pid, worker_of(lease).holder.pid
    assert process_is_gone(worker_pid)
    assert process_is_gone(holder_pid)
    wait_until(lambda: settled(home, lease.id))
    ended = wiring.open_ledger(home.settings).look(lease.id).lease
    assert ended.reason is EndReason.RELEASED
    (torn,) = wiring.open_ledger(home.settings).receipts()
    assert torn.lease_id == lease.id
    assert torn.receipt.proven
    assert {worker_pid, holder_pid} <= set(torn.receipt.pids)


def test_exceptions_come_back_with_their_traceback(sqlite_home: Home) -> None:
    def deep(x: int) -> float:
        return 1 / x

    with sublet.gpu(vram="1GiB", ttl="30s", holder="worker") as lease:
        with pytest.raises(ZeroDivisionError) as caught:
            lease.run(deep, 0)
        assert "return 1 / x" in str(caught.value.__cause__)
        with pytest.raises(CallFailed, match="1 and 2") as failed:
            lease.run(raise_unsendable)
        assert "raise Unsendable(1, 2)" in str(failed.value.__cause__)
        with pytest.raises(SystemExit):
            lease.run(sys.exit, 3)
        with pytest.raises(BadInput, match="cannot be sent"):
            lease.run(print, (x for x in [1]))
        # None of it hurt the worker.
        assert lease.run(deep, 2) == 0.5


def test_a_lease_held_by_this_process_has_no_worker(sqlite_home: Home) -> None:
    with sublet.gpu(vram="1GiB", ttl="30s") as lease, pytest.raises(BadInput, match="no worker"):
        lease.run(os.getpid)


def test_state_in_the_worker_lasts_and_changed_globals_arrive(sqlite_home: Home) -> None:
    """A script's own globals: sent when they change, and what the worker keeps in them stays."""
    script = sqlite_home.start(
        """
        import functools, sublet
        scale, loaded, calls = 2, None, []

        @functools.cache
        def slow(n):
            calls.append(n)
            return len(calls)

        def helper(x):
            return x * scale

        class Point:
            def __init__(self, x): self.x = x
            def doubled(self): return Point(helper(self.x))

        @sublet.on_gpu(vram="1GiB", ttl="30s")
        def work(x):
            global loaded
            first = loaded is None
            loaded = "model"
            slow(1)
            return helper(x), first, slow(1)

        @sublet.on_gpu(vram="1GiB", ttl="30s")
        def double(point):
            return point.doubled()

        @sublet.on_gpu(vram="1GiB", ttl="30s")
        def apply(function, x):
            return function(x)

        print(work(5))
        print(work(5))
        scale = 3
        print(work(5))
        print(type(double(Point(4))) is Point, double(Point(4)).x)
        print(apply(helper, 7), apply(lambda v: v + scale, 1))
        def helper(x):
            return -x
        print(work(5)[0])
        print(loaded)
        """
    )
    out, _ = script.communicate(timeout=60)
    assert out.splitlines() == [
        "(10, True, 1)",
        "(10, False, 1)",
        "(15, False, 1)",
        "True 12",
        "21 4",
        "-5",
        "None",
    ]


def test_on_gpu_in_a_module_keeps_a_warm_worker(
    sqlite_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "embedding.py").write_text(
        textwrap.dedent(
            """
            import os, sublet
            seen = []

            @sublet.on_gpu(vram="1GiB", ttl=lambda n=0: f"{20 + n}s", batch=4)
            def where(n=0):
                seen.append(n)
                return os.getpid(), len(seen)

            @sublet.on_gpu(vram="1GiB", ttl="20s")
            def nested():
                return where()

            class Model:
                @sublet.on_gpu
                def name(self, ending):
                    return type(self).__name__ + ending
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import embedding  # type: ignore[import-not-found]

    first, second = embedding.where(), embedding.where()
    assert first[0] == second[0] != os.getpid()
    assert second[1] == 2
    # The same request shares the worker, and inside it an on_gpu function is a plain one.
    assert embedding.nested() == (first[0], 3)
    assert [count for _, count in embedding.where.map(range(5))] == [4, 5, 6, 7, 8]
    assert embedding.Model().name("!") == "Model!"
    leases = wiring.open_ledger(sqlite_home.settings).leases(live_only=False)
    assert len(leases) == 1
    embedding.where.release()
    assert embedding.where(n=40)[1] == 1
    ended = wiring.open_ledger(sqlite_home.settings).leases(live_only=False)
    assert sorted(a.lease.request.ttl_us // 1_000_000 for a in ended) == [20, 60]
    monkeypatch.setenv("SUBLET_DISABLE", "1")
    assert embedding.where()[0] == os.getpid()


def test_threads_share_one_trip(sqlite_home: Home) -> None:
    import threading

    @sublet.on_gpu(vram="1GiB", ttl="30s", batch=8)
    def slow(n: int) -> int:
        time.sleep(0.02)
        if n == 5:
            raise ValueError("five")
        return n * n

    outcomes: dict[int, object] = {}

    def ask(n: int) -> None:
        try:
            outcomes[n] = slow(n)
        except ValueError as e:
            outcomes[n] = str(e)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {n: n * n for n in range(8) if n != 5} | {5: "five"}


def test_a_lost_worker_is_said_and_the_next_call_takes_a_new_one(sqlite_home: Home) -> None:
    @sublet.on_gpu(vram="1GiB", ttl="30s")
    def crash(how: str) -> int:
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    assert crash("") > 0
    with pytest.raises(WorkerLost, match="exited with code 7"):
        crash("exit")
    with pytest.raises(WorkerLost, match="killed by signal 9"):
        crash("kill")
    assert crash("") > 0
    wait_until(
        lambda: all(
            a.lease.settled_at for a in wiring.open_ledger(sqlite_home.settings).leases(live_only=False)[1:]
        )
    )
    assert sqlite_devices(sqlite_home) == [DeviceState.READY]


def sqlite_devices(home: Home) -> list[DeviceState]:
    return [d.state for d in wiring.open_ledger(home.settings).devices()]


def test_a_worker_that_ran_out_between_calls_is_replaced(sqlite_home: Home) -> None:
    @sublet.on_gpu(vram="1GiB", ttl="3s")
    def count() -> int:
        return os.getpid()

    count()
    (held,) = wiring.open_ledger(sqlite_home.settings).leases()
    wait_until(lambda: settled(sqlite_home, held.lease.id))
    ended = wiring.open_ledger(sqlite_home.settings).look(held.lease.id).lease
    assert ended.reason is EndReason.RELEASED  # by its holder, a ttl after the last call and no renewal later
    assert ended.ended_at - ended.granted_at >= 3_000_000
    count()  # no error: nothing had been sent to the old one
    assert len(wiring.open_ledger(sqlite_home.settings).leases(live_only=False)) == 2


def test_a_warm_worker_goes_at_once_when_somebody_waits(home: Home) -> None:
    """Its grace is for work in flight; there is none, so nobody waits for its end."""
    ledger = wiring.open_ledger(home.settings)
    ledger.set_policy(replace(ledger.policy(), idle_after_us=300_000, grace_us=60_000_000), actor="test")
    where = sublet.on_gpu(vram="16GiB", ttl="10m")(lambda: os.environ["SUBLET_LEASE_ID"])
    first = where()
    began = time.monotonic()
    with sublet.gpu(vram="16GiB", ttl="1m", wait="30s", holder="worker") as lease:
        assert time.monotonic() - began < 20  # not the grace
        idle = ledger.look(first).lease
        assert idle.reason is EndReason.IDLE
        wait_until(lambda: process_is_gone(idle.holder.pid))
    assert where() not in (first, lease.id)


def test_a_call_in_flight_keeps_its_grace(sqlite_home: Home) -> None:
    """And when it is over, within the grace, the GPU goes at once."""
    ledger = wiring.open_ledger(sqlite_home.settings)

    def busy() -> str:
        time.sleep(1.0)
        return "whole"

    with ThreadPoolExecutor(1) as pool:
        slow = sublet.on_gpu(vram="16GiB", ttl="10m")(busy)
        call = pool.submit(slow)
        wait_until(
            lambda: [a for a in ledger.leases() if a.lease.busy and a.lease.state is LeaseState.ACTIVE]
        )
        (held,) = ledger.leases()
        ledger.revoke(
            held.lease.id, reason=EndReason.REVOKED, detail="test", grace_us=60_000_000, actor="test"
        )
        assert call.result(30) == "whole"
    wait_until(lambda: ledger.look(held.lease.id).lease.state is LeaseState.ENDED)


def test_a_call_that_meets_the_giving_back_takes_a_new_worker(sqlite_home: Home) -> None:
    """Whichever comes first, nothing is lost: the call runs, once, in this worker or the next."""
    ledger = wiring.open_ledger(sqlite_home.settings)
    ran = sqlite_home.settings.home / "ran"

    def note(turn: int) -> int:
        with open(ran, "a") as file:
            file.write(f"{turn}\n")
        return turn

    noted = sublet.on_gpu(vram="1GiB", ttl="10m")(note)
    for turn in range(12):
        assert noted(turn) == turn
        time.sleep(0.002 * (turn % 4))
        for answer in ledger.leases():
            with contextlib.suppress(sublet.LeaseLost, sublet.BadInput):
                ledger.revoke(
                    answer.lease.id,
                    reason=EndReason.REVOKED,
                    detail="test",
                    grace_us=60_000_000,
                    actor="test",
                )
    assert ran.read_text().split() == [str(turn) for turn in range(12)]


def test_a_long_call_is_renewed(sqlite_home: Home) -> None:
    @sublet.on_gpu(vram="1GiB", ttl="3s")
    def long() -> str:
        time.sleep(5.0)
        return "done"

    assert long() == "done"


def test_revoked_under_a_call(home: Home) -> None:
    """The worker dies at the deadline although it never listens; the caller learns why then, not when the lease would have ended."""
    ledger = wiring.open_ledger(home.settings)
    with sublet.gpu(vram="1GiB", ttl="30s", holder="worker") as lease:
        pid = worker_of(lease).worker_pid
        import threading

        def revoke() -> None:
            ledger.revoke(
                lease.id, reason=EndReason.REVOKED, detail="maintenance", grace_us=300_000, actor="test"
            )

        threading.Timer(0.3, revoke).start()
        begun = time.monotonic()
        with pytest.raises(WorkerLost, match=r"revoked: maintenance"):
            lease.run(loop)
        assert time.monotonic() - begun < 20
        assert process_is_gone(pid)
        with pytest.raises(LeaseLost):
            lease.run(os.getpid)
    wait_until(lambda: settled(home, lease.id))
    assert not ledger.verify().faults


def test_a_worker_dies_with_the_process_that_asked_for_it(home: Home) -> None:
    """Killed, with a child of its own still holding every descriptor: the worker does not outlive it."""
    script = home.start(
        """
        import os, time, sublet
        lease = sublet.gpu(vram="1GiB", ttl="60s", holder="worker").acquire()
        lease.run(os.getpid)
        if os.fork() == 0:
            time.sleep(30)
        print(lease.id, lease._worker.worker_pid, lease._worker.holder.pid, flush=True)
        time.sleep(60)
        """
    )
    assert script.stdout is not None
    lease_id, worker, supervisor = script.stdout.readline().split()
    script.kill()
    wait_until(lambda: process_is_gone(int(worker)), 20)  # before its child ends, and the ttl
    wait_until(lambda: process_is_gone(int(supervisor)), 20)
    wait_until(lambda: settled(home, lease_id), 20)
    assert wiring.open_ledger(home.settings).look(lease_id).lease.reason is EndReason.HOLDER_LOST


def test_sessions_run_in_the_worker(home: Home) -> None:
    source = "def add(grid, n, buf):\n  for i in range(grid[0]):\n    buf[i] = (buf[i] + n) % 256\n"
    with sublet.gpu(vram="1MiB", ttl="30s", holder="worker") as lease:
        with lease.open() as gpu:
            buffer = gpu.alloc(300_000)
            gpu.write(buffer, bytes(300_000))
            module = gpu.load(source)
            gpu.launch(module, "add", grid=(4,), args=[sublet.u32(7), buffer])
            gpu.sync()
            assert gpu.read(buffer, 6) == bytes([7, 7, 7, 7, 0, 0])
            assert gpu.used_bytes == 300_000
            with pytest.raises(OutOfMemory, match="leased 1MiB"):
                gpu.alloc(2 << 20)
            with pytest.raises(BadInput, match="outside the buffer"):
                gpu.read(buffer, 300_001)
            # The memory is the worker's, not ours.
            used = warden_process.installed_drivers()["host"].used_bytes(lease.devices[0], 0)
            assert used == 300_000
        assert gpu.close().left_buffers == 1
    with pytest.raises(LeaseLost):
        gpu.alloc(1)


def test_an_interrupt_stops_the_call_and_not_the_worker(sqlite_home: Home) -> None:
    script = sqlite_home.start(
        """
        import os, sublet
        def loop():
            print("looping", flush=True)
            while True: pass
        with sublet.gpu(vram="1GiB", ttl="30s", holder="worker") as lease:
            before = lease.run(os.getpid)
            try:
                lease.run(loop)
            except KeyboardInterrupt:
                print("interrupted", lease.run(os.getpid) == before, flush=True)
        """
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "looping\n"
    script.send_signal(signal.SIGINT)
    assert script.stdout.readline() == "interrupted True\n"


@pytest.mark.parametrize("fault", ["leak", "wedge"])
def test_a_device_that_keeps_memory_is_withheld_with_a_message(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K1, threat 17: memory still in use after every process is gone: quarantine, until an operator clears it."""
    home = make_home(tmp_path, f"sqlite:{tmp_path}/home/ledger.db", monkeypatch, f"host:1x4GiB!{fault}")
    try:
        ledger = wiring.open_ledger(home.settings)
        with sublet.gpu(vram="1GiB", ttl="30s", holder="worker") as lease:
            gpu = lease.open()
            gpu.alloc(1000)
            if fault == "leak":
                gpu.close()
            else:
                os.kill(worker_of(lease).worker_pid, signal.SIGKILL)
        wait_until(lambda: settled(home, lease.id))
        (device,) = ledger.devices()
        assert device.state is DeviceState.QUARANTINED
        assert (
            f"teardown of lease {lease.id} was not proven: 64MiB of {device.id} were still in use"
            in device.note
        )
        (torn,) = ledger.receipts()
        assert not torn.receipt.proven
        assert torn.receipt.ladder == "unproven"
        with pytest.raises(sublet.Refused):
            sublet.gpu(vram="1GiB", ttl="30s", wait=0).acquire()
        leaks(device.id).unlink()  # the operator's part
        ledger.set_device(device.id, state="ready", note="looked at", actor="test")
        sublet.gpu(vram="1GiB", ttl="30s", wait="5s").acquire().release()
    finally:
        leaks(f"{home.settings['host']}-host0").unlink(missing_ok=True)
        close_home(home)


def test_a_process_that_gave_its_lease_back_and_lives_on_is_not_a_leak(sqlite_home: Home) -> None:
    """Its context is its own business: the next lease's teardown must not be blamed for it."""
    script = sqlite_home.start(
        """
        import sublet, time
        from sublet.devices.host import HostDriver
        with sublet.gpu(vram="1GiB", ttl="30s") as lease:
            kept = HostDriver().open(lease.devices[0], 0, lease.id).alloc(32 << 20)
        print("released", flush=True)
        time.sleep(60)
        """
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "released\n"
    with sublet.gpu(vram="1GiB", ttl="30s", holder="worker") as lease:
        lease.run(os.getpid)
    wait_until(lambda: settled(sqlite_home, lease.id))
    assert sqlite_devices(sqlite_home) == [DeviceState.READY]
    assert wiring.open_ledger(sqlite_home.settings).look(lease.id).lease.state is LeaseState.ENDED


def test_a_gang_opens_one_session_per_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(tmp_path, f"sqlite:{tmp_path}/home/ledger.db", monkeypatch, "host:2x1GiB")
    try:
        with sublet.gpu(vram="16MiB", ttl="30s", count=2, holder="worker") as lease:
            sessions = [lease.open(n) for n in range(2)]
            buffers = [gpu.alloc(4) for gpu in sessions]
            for gpu, buffer, byte in zip(sessions, buffers, b"xy", strict=True):
                gpu.write(buffer, bytes([byte]) * 4)
            assert [gpu.read(b) for gpu, b in zip(sessions, buffers, strict=True)] == [b"xxxx", b"yyyy"]
            with pytest.raises(BadInput, match="another session"):
                sessions[0].read(buffers[1])
            assert len({getattr(gpu, "device_id", "") for gpu in sessions}) == 2
    finally:
        close_home(home)


def test_in_ipython_the_user_s_own_process_is_never_the_holder(sqlite_home: Home, tmp_path: Path) -> None:
    """Revoked under a cell: the worker dies, the interpreter and its variables stay."""
    need(find_spec("IPython") is not None, "IPython")
    (tmp_path / "session.ipy").write_text(
        textwrap.dedent(
            """
            import os, threading, time, sublet
            from sublet import wiring
            from sublet.core.leasing.lease import EndReason
            from sublet.settings import load_settings
            mine = [1, 2, 3]
            lease = sublet.gpu(vram="1GiB", ttl="30s").acquire()
            print("elsewhere", lease.run(os.getpid) != os.getpid(), lease._row.holder.pid != os.getpid())
            with lease.open() as gpu:
                buffer = gpu.alloc(4); gpu.write(buffer, b"abcd"); print(gpu.read(buffer))
            ledger = wiring.open_ledger(load_settings())
            threading.Timer(0.2, lambda: ledger.revoke(
                lease.id, reason=EndReason.REVOKED, detail="wanted", grace_us=0, actor="t")).start()
            try:
                lease.run(time.sleep, 60)
            except sublet.LeaseLost as lost:
                print(lost.message)
            print(mine, lease.status)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", str(tmp_path / "session.ipy")],
        capture_output=True,
        text=True,
        env=sqlite_home.environment | {"IPYTHONDIR": str(tmp_path / "ipython")},
        timeout=60,
        check=False,
    )
    said = done.stdout.splitlines()
    assert said[:2] == ["elsewhere True True", "b'abcd'"], done.stdout + done.stderr
    assert said[2].startswith("GPU session ended (revoked: wanted)")
    assert said[3] == "[1, 2, 3] ended"


def test_accounts_are_taken_away(sqlite_home: Home) -> None:
    """Of a worker that had a lease, when it is settled; of one that never got one, none is kept."""
    with sublet.gpu(vram="16GiB", ttl="30s", exclusivity="device", holder="worker") as lease:
        assert len(list((sqlite_home.settings.home / "run").glob("worker-*.json"))) == 1
        with pytest.raises(sublet.Refused):
            sublet.gpu(vram="1GiB", ttl="30s", wait=0, holder="worker").acquire()
    wait_until(lambda: settled(sqlite_home, lease.id))
    wait_until(lambda: not list((sqlite_home.settings.home / "run").glob("worker-*")))
