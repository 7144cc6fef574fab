"""A studio's lease has the surface of a local one, and behaves as one."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import sublet
from sublet.client import lease as remote_lease
from sublet.client.lease import RemoteLease
from sublet.core.errors import (
    BadInput,
    CallFailed,
    LeaseLost,
    NeverFits,
    NoCapacity,
    WaitTimedOut,
    WorkerLost,
)
from sublet.core.notice import Notice
from sublet.leases.keeper import KeptLease
from sublet.leases.lease import Lease
from sublet.processes.worker.remote_exception import RemoteTraceback
from tests.client.conftest import House, settled
from tests.homes import wait_until


@pytest.fixture(scope="module")
def studio(shared: House) -> sublet.Studio:
    return shared.connect()


@pytest.fixture(scope="module")
def lease(studio: sublet.Studio) -> Any:
    with studio.gpu(vram="1GiB", ttl="5m") as held:
        yield held


def test_it_has_everything_a_local_lease_has() -> None:
    def public(cls: type) -> set[str]:
        return {name for name in vars(cls) if not name.startswith("_")}

    only_here = {
        "run_sealed",
        "interrupt",
        "containment",
        "host_lost",
    }  # between the session host and its worker
    only_here |= {"hosts", "ticket", "run_everywhere"}  # of a gang: a session is of one host
    only_here |= {"slices", "in_worker", "adopt", "seated"}  # between who asked for it and its worker
    only_here |= public(KeptLease) - {"id", "key", "status"}  # the studio's keeper renews a session's lease
    assert public(Lease) - only_here <= public(RemoteLease)
    for name in ("run", "run_many", "run_shown", "open", "on_notice", "keep_warm"):
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (RemoteLease, Lease))
        assert list(ours.parameters) == list(theirs.parameters)


def test_a_function_runs_there(studio: sublet.Studio, capsys: pytest.CaptureFixture[str]) -> None:
    def work(x: int, *, y: int) -> tuple[int, int]:
        print("said there")
        return x + y, os.getpid()

    with studio.gpu(vram="8GB", ttl="5m") as lease:
        assert lease.status == "active"
        assert lease.id.startswith("L")
        assert lease.vram_bytes == 8_000_000_000
        assert lease.tenant == "ann"
        assert 0 < lease.seconds_left <= 300
        value, pid = lease.run(work, 1, y=2)
    assert value == 3
    assert pid != os.getpid()
    assert capsys.readouterr().out == "said there\n"
    assert lease.status == "ended"
    with pytest.raises(LeaseLost):
        lease.run(work, 1, y=2)


def test_it_is_given_back_at_the_end_of_the_block_also_by_an_exception(
    house: House,
) -> None:
    studio = house.connect()
    with pytest.raises(ZeroDivisionError), studio.gpu(vram="1GiB"):
        assert len(house.live_leases()) == 1
        raise ZeroDivisionError
    settled(house)
    assert not studio.sessions()


# --- calls ---------------------------------------------------------------------------------------------------


def test_what_it_raises_arrives_as_itself_with_its_traceback_there(lease: RemoteLease) -> None:
    def fails(x: int) -> None:
        raise KeyError(f"no {x}")

    with pytest.raises(KeyError, match="no 3") as caught:
        lease.run(fails, 3)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in fails" in str(caught.value.__cause__)


def test_an_exception_that_cannot_travel_is_told(lease: RemoteLease) -> None:
    def fails() -> None:
        class Odd(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("no")

        raise Odd("what happened")

    with pytest.raises(CallFailed, match="Odd: what happened"):
        lease.run(fails)


def test_many_calls_in_one_trip(lease: RemoteLease) -> None:
    def inverse(x: int) -> float:
        return 1 / x

    found = lease.run_many(inverse, [((1,), {}), ((0,), {}), ((4,), {})])
    assert [fine for fine, _ in found] == [True, False, True]
    assert isinstance(found[1][1], ZeroDivisionError)
    assert found[2][1] == 0.25


def test_what_cannot_be_sent_is_told_here_and_costs_nothing(lease: RemoteLease) -> None:
    with pytest.raises(BadInput, match="cannot be sent"):
        lease.run(len, threading.Lock())
    assert lease.run(len, "four") == 4


def test_what_the_session_has_not_is_told_as_it_is(lease: RemoteLease) -> None:
    def wants() -> Any:
        import a_module_that_is_not_there

        return a_module_that_is_not_there

    with pytest.raises(ModuleNotFoundError):
        lease.run(wants)


def test_state_stays_between_calls(lease: RemoteLease) -> None:
    def remember(value: int) -> int:
        import sys

        sys.kept = value  # type: ignore[attr-defined]
        return value

    def recall() -> int:
        import sys

        return sys.kept  # type: ignore[attr-defined,no-any-return]

    lease.run(remember, 42)
    assert lease.run(recall) == 42


def test_large_arrays_both_ways(lease: RemoteLease) -> None:
    numpy = pytest.importorskip("numpy")
    given = numpy.arange(8 << 20, dtype=numpy.float64)  # 64 MiB

    def back(values: Any) -> Any:
        return {"sum": float(values.sum()), "values": values + 1}

    found = lease.run(back, given)
    assert found["sum"] == float(given.sum())
    assert numpy.array_equal(found["values"], given + 1)
    found["values"][0] = 7  # as from a worker here, it is ours to write to


def test_output_of_both_kinds_in_order(lease: RemoteLease, capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        import sys

        for i in range(300):
            print(i, file=sys.stderr if i % 3 == 0 else sys.stdout)
        print("ümläut ✓")

    lease.run(talk)
    out, err = capsys.readouterr()
    assert out.split() == [*(str(i) for i in range(300) if i % 3), "ümläut", "✓"]
    assert err.split() == [str(i) for i in range(300) if not i % 3]


def test_source_runs_there_and_its_names_stay(lease: RemoteLease, capsys: pytest.CaptureFixture[str]) -> None:
    lease.run_code("import math\nr = 2")
    lease.run_code("print('area')\nmath.pi * r ** 2")
    assert capsys.readouterr().out.splitlines() == ["area", "12.566370614359172"]
    with pytest.raises(CallFailed, match="ZeroDivisionError") as caught:
        lease.run_code("x = 1\nx / 0")
    assert "x / 0" in str(caught.value.__cause__)
    with pytest.raises(CallFailed, match="SyntaxError"):
        lease.run_code("def")


def test_a_call_from_another_thread_waits_its_turn(lease: RemoteLease) -> None:
    def slow(x: int) -> int:
        import time

        time.sleep(0.1)
        return x

    found: list[int] = []
    threads = [threading.Thread(target=lambda x=x: found.append(lease.run(slow, x))) for x in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [0, 1, 2, 3]


def test_a_gpu_session_there(studio: sublet.Studio) -> None:
    with studio.gpu(vram="1GiB") as lease, lease.open() as gpu:
        assert gpu.device_id == lease.devices[0]
        buffer = gpu.alloc(16)
        gpu.write(buffer, b"0123456789abcdef")
        assert gpu.read(buffer) == b"0123456789abcdef"
        assert gpu.used_bytes >= 16
        with pytest.raises(sublet.OutOfMemory):
            gpu.alloc(2 << 30)
        with pytest.raises(BadInput):
            lease.open(1)


def test_ctrl_c_interrupts_the_call_there_and_the_lease_stays(lease: RemoteLease) -> None:
    def sleeps() -> str:
        import time

        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted there", flush=True)
        return "slept"  # whoever interrupted it is not given an answer, as without a studio

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(
            0.7, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        ).start()
        lease.run(sleeps)
    assert time.monotonic() - began < 30
    assert lease.status == "active"
    assert lease.run(len, "abc") == 3


def test_a_second_ctrl_c_does_not_wait_and_ends_the_session(studio: sublet.Studio) -> None:
    def stubborn() -> None:
        import time

        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                print("no", flush=True)

    main = threading.main_thread().ident or 0
    with studio.gpu(vram="1GiB") as lease:
        lease.run(len, "")
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            for after in (0.7, 2.0):
                threading.Timer(after, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
            lease.run(stubborn)
        assert time.monotonic() - began < 30
        assert lease.status == "ended"
        assert studio.find(lease.session_id).status == "ended"


def test_another_python_is_told_before_anything_runs(
    lease: RemoteLease, studio: sublet.Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    with studio.gpu(vram="1GiB") as other:
        monkeypatch.setattr("sublet.client.worker.HERE", "3.99.1")
        with pytest.raises(sublet.Misconfigured, match=r"3\.99\.1") as caught:
            other.run(len, "")
        assert "run_code" in caught.value.remedy
        other.run_code("1 + 1")
        monkeypatch.undo()
        assert other.run(len, "") == 0


def test_a_forked_child_has_no_lease(lease: RemoteLease) -> None:
    pid = os.fork()
    if pid == 0:
        fine = lease.status == "ended"
        try:
            lease.run(len, "")
            fine = False
        except LeaseLost:
            pass
        lease.release()
        os._exit(0 if fine else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert lease.status == "active"
    assert lease.run(len, "a") == 1


def test_what_shows_output_may_raise_and_the_call_is_stopped(lease: RemoteLease) -> None:
    class Closed:
        def text(self, stream: str, text: str) -> None:
            raise BrokenPipeError

        def show(self, what: Any) -> None: ...

    def talks() -> None:
        import time

        for i in range(600):
            print(i)
            time.sleep(0.1)

    with pytest.raises(BrokenPipeError):
        lease.run_shown(talks, (), Closed(), lambda asked: None)
    began = time.monotonic()
    assert lease.run(len, "ab") == 2
    assert time.monotonic() - began < 20


def test_a_question_in_the_middle_is_answered_here(lease: RemoteLease) -> None:
    def asks() -> Any:
        from sublet.processes.worker.worker import ask_caller

        return [ask_caller({"question": i}) for i in range(3)]

    class Quiet:
        def text(self, stream: str, text: str) -> None: ...
        def show(self, what: Any) -> None: ...

    found = lease.run_shown(asks, (), Quiet(), lambda asked: asked["question"] ** 2)
    assert found == [0, 1, 4]


def test_a_worker_that_dies_is_worker_lost_and_the_reason_is_told(studio: sublet.Studio) -> None:
    def dies() -> None:
        import os

        os._exit(3)

    with studio.gpu(vram="1GiB") as lease:
        with pytest.raises(WorkerLost) as caught:
            lease.run(dies)
        assert caught.value.begun
        assert lease.status == "ended"
        with pytest.raises(LeaseLost):
            lease.run(len, "")


# --- asking --------------------------------------------------------------------------------------------------


def test_what_never_fits_is_refused(studio: sublet.Studio) -> None:
    with pytest.raises(NeverFits) as caught, studio.gpu(vram="900GB"):
        pass
    assert caught.value.remedy
    assert not [s for s in studio.sessions() if s.facts.asked_bytes == 900_000_000_000]


def test_now_or_never(house: House) -> None:
    studio = house.connect()
    with studio.gpu(vram="16GiB"):
        with pytest.raises(NoCapacity), studio.gpu(vram="16GiB", wait=0):
            pass
        with pytest.raises(WaitTimedOut), studio.gpu(vram="16GiB", wait="1s"):
            pass
    assert not studio.sessions()


def test_waiting_is_told_with_place_and_ends_with_a_gpu(house: House) -> None:
    first, second = house.connect("ann"), house.connect("bob")
    held = first.gpu(vram="16GiB", ttl="1m").acquire()
    waits: list[Any] = []

    def on_wait(wait: Any) -> None:
        waits.append(wait)
        threading.Timer(0.3, held.release).start()

    with second.gpu(vram="16GiB", on_wait=on_wait) as lease:
        assert lease.run(len, "abc") == 3
    assert waits[0].position == 1
    assert waits[0].reason


def test_an_offer_is_asked_about_and_taken(house: House) -> None:
    first, second = house.connect("ann"), house.connect("bob")
    with first.gpu(vram="8GiB", ttl="1m"):
        offers: list[Any] = []

        def on_offer(answer: Any) -> bool:
            offers.append(answer)
            return True

        with second.gpu(vram="16GiB", on_offer=on_offer) as lease:
            assert lease.vram_bytes < 16 << 30
            assert lease.vram_bytes == offers[0].lease.slices[0].vram_bytes
        assert len(offers) == 1
        assert offers[0].lease.request.vram_bytes == 16 << 30
        assert offers[0].lease.offer_until > offers[0].at


def test_an_offer_declined_keeps_the_place(house: House) -> None:
    first, second = house.connect("ann"), house.connect("bob")
    held = first.gpu(vram="8GiB", ttl="1m").acquire()

    def on_offer(answer: Any) -> bool:
        threading.Timer(0.3, held.release).start()
        return False

    with second.gpu(vram="16GiB", on_offer=on_offer) as lease:
        assert lease.vram_bytes == 16 << 30


def test_least_takes_the_smaller_one_at_once(house: House) -> None:
    studio = house.connect()
    with studio.gpu(vram="8GiB"), studio.gpu(vram="16GiB", least="4GiB") as lease:
        assert 4 << 30 <= lease.vram_bytes < 16 << 30


def test_an_interrupted_wait_leaves_the_waitlist(house: House) -> None:
    studio = house.connect()
    with studio.gpu(vram="16GiB"):

        def on_wait(wait: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), studio.gpu(vram="16GiB", on_wait=on_wait):
            pass
        wait_until(lambda: len(house.live_leases()) == 1)
        assert len(studio.sessions()) == 1


@pytest.mark.parametrize(
    "words",
    [
        {"vram": "lots"},
        {"ttl": "soon"},
        {"tier": "royal"},
        {"count": 1.5},
        {"least": "2GB", "vram": "1GB"},
        {"holder": "process"},
        {"tenant": "bob"},
        {"job": "a/b"},
    ],
)
def test_wrong_words_are_told_before_anything_is_sent(studio: sublet.Studio, words: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        studio.gpu(**words)


# --- its end -------------------------------------------------------------------------------------------------


def test_a_revoke_is_a_notice_and_then_the_end(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """While it is used: one that is not is given back when its keeper looks next, and may be over before anybody has seen the notice."""
    studio = house.connect()
    heard: list[tuple[Notice, str, float]] = []
    said: list[str] = []

    def sleeps() -> None:
        import time

        print("begun", flush=True)
        time.sleep(60)

    def has_begun() -> bool:
        said.append(capsys.readouterr().out)
        return "begun" in "".join(said)

    with studio.gpu(vram="1GiB", ttl="1m") as lease, ThreadPoolExecutor(1) as pool:
        # What it is like when it is told: this thread may come to look when it is over.
        lease.on_notice(lambda notice: heard.append((notice, lease.status, lease.seconds_left)))
        call = pool.submit(lease.run, sleeps)
        wait_until(has_begun)
        house.revoke(lease.id, grace_s=3, detail="ada needs it")
        wait_until(lambda: heard)
        notice, status, left = heard[0]
        assert status == "revoking"
        assert "ada needs it" in notice.reason
        assert 0 < left <= 3
        with pytest.raises(WorkerLost, match="ada needs it"):
            call.result()
        wait_until(lambda: lease.status == "ended")
        with pytest.raises(LeaseLost, match="ada needs it"):
            lease.run(len, "")


def test_a_revoke_of_one_that_is_not_used(house: House) -> None:
    studio = house.connect()
    heard: list[Notice] = []
    with studio.gpu(vram="1GiB", ttl="1m") as lease:
        lease.on_notice(heard.append)
        house.revoke(lease.id, grace_s=3, detail="ada needs it")
        wait_until(lambda: lease.status == "ended")
        assert "ada needs it" in heard[0].reason
        with pytest.raises(LeaseLost, match="ada needs it"):
            lease.run(len, "")


def test_lost_under_a_call(house: House) -> None:
    studio = house.connect()

    def sleeps() -> None:
        import time

        time.sleep(60)

    with studio.gpu(vram="1GiB", ttl="1m") as lease:
        threading.Timer(0.5, lambda: house.revoke(lease.id, detail="ada needs it")).start()
        with pytest.raises(WorkerLost, match="ada needs it") as caught:
            lease.run(sleeps)
    assert caught.value.begun
    assert "ada needs it" in caught.value.reason


def test_a_block_is_work_and_without_one_it_is_given_back(house: House) -> None:
    studio = house.connect()
    with studio.gpu(vram="1GiB", ttl="10s", warm="4s") as lease:
        time.sleep(7)
        assert lease.status == "active"
        assert lease.run(len, "ab") == 2
    idle = studio.gpu(vram="1GiB", ttl="10s", warm="1s").acquire()
    wait_until(lambda: idle.status == "ended")


def test_warm_is_longer_or_shorter_when_it_is_set_so(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        remote_lease, "LOOK_SECONDS", 2.0
    )  # a look that began before it was set shorter is not cut
    studio = house.connect()
    given_back = threading.Event()
    lease = studio.gpu(vram="1GiB", ttl="1m", warm="4s").acquire()
    lease.keep_warm(given_back.set)
    lease.warm_us = 60_000_000
    assert not given_back.wait(7)
    assert lease.run(len, "a") == 1
    lease.release()
    lease = studio.gpu(vram="1GiB", ttl="1m", warm="10m").acquire()
    lease.keep_warm(given_back.set)
    lease.warm_us = 500_000
    assert given_back.wait(20)
    assert lease.yielded
    settled(house)


def test_a_lease_nobody_holds_any_more_is_not_watched(house: House) -> None:
    studio = house.connect()
    lease = studio.gpu(vram="1GiB", ttl="2s").acquire()
    watcher = lease._watcher
    lease.release()
    del lease
    gc.collect()
    wait_until(lambda: not watcher.is_alive())


def test_released_at_exit(house: House) -> None:
    child = house.home.start(
        """
        import sublet, sys
        lease = sublet.connect(sys.argv[1], sys.argv[2]).gpu(vram="1GiB").acquire()
        print(lease.id, flush=True)
        """,
        house.url,
        house.token(),
    )
    assert child.stdout is not None
    assert child.stdout.readline().startswith("L")
    assert child.wait() == 0
    settled(house)


def test_two_clients_ask_at_once_and_ids_never_meet(house: House) -> None:
    ann, bob = house.connect("ann"), house.connect("bob")
    mine = ann.session(vram="1GiB")
    with pytest.raises((sublet.BadInput, sublet.Stale)):
        bob.session(vram="1GiB", id=mine.id)
    with pytest.raises(sublet.NotFound):
        bob.find(mine.id)
    again = ann.session(vram="1GiB", id=mine.id)
    assert again.id == mine.id
    assert len(ann.sessions()) == 1
    with pytest.raises((sublet.BadInput, sublet.Stale)):
        ann.session(vram="2GiB", id=mine.id)
    mine.end()


def test_more_than_the_studio_takes_is_told_and_not_sent_again(house: House) -> None:
    house.options = ["--max-call", "1MiB"]
    house.restart()
    studio = house.connect()
    with studio.gpu(vram="1GiB") as lease:
        lease.run(len, "")
        began = time.monotonic()
        with pytest.raises(sublet.TooLarge) as caught:
            lease.run(len, bytes(64 << 20))
        assert time.monotonic() - began < 30
        assert caught.value.remedy
        assert lease.run(len, bytes(1 << 19)) == 1 << 19
