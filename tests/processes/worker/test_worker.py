"""The worker as its caller sees it: what it prints, how it is interrupted, and what user code may do to it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.core.errors import CallFailed, LeaseLost, Misconfigured, WorkerLost
from sublet.machine import lease_environment
from sublet.processes.worker import local
from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.workers import LocalWorkers
from tests.homes import process_is_gone, wait_until
from tests.processes.conftest import moved_in, now_us, remove_group


def run(worker: LocalWorker, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return worker.call(function, args, kwargs)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- output ---


def test_every_line_arrives_in_order(worker: LocalWorker, capfd: pytest.CaptureFixture[str]) -> None:
    def talk(n: int) -> bytes:
        for i in range(n):
            print(i)
            print(-i, file=sys.stderr)
        return bytes(3_000_000)  # while the last of the output is still in the pipe

    assert len(run(worker, talk, 50_000)) == 3_000_000
    shown = capfd.readouterr()
    assert shown.out.split() == [str(i) for i in range(50_000)]
    assert shown.err.split() == [str(-i) for i in range(50_000)]


def test_bytes_from_below_keep_their_place(worker: LocalWorker, capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        libc = ctypes.CDLL(None)
        for i in range(20):
            print("python", i)
            os.write(1, b"write %d\n" % i)
            subprocess.run(["/bin/echo", "child", str(i)], check=True)
        # A stream of C's own, because PYTHONUNBUFFERED unbuffers its standard output too.
        libc.fdopen.restype = ctypes.c_void_p
        libc.fputs(b"from C\n", ctypes.c_void_p(libc.fdopen(1, b"w")))
        sys.stdout.write("no newline")

    run(worker, talk)
    lines = capsys.readouterr().out.split("\n")
    assert lines[:60] == [f"{who} {i}" for i in range(20) for who in ("python", "write", "child")]
    assert lines[60:] == ["no newlinefrom C", ""]


def test_output_that_is_not_text_is_shown_as_well_as_it_can(
    worker: LocalWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    def talk() -> None:
        os.write(1, b"bad \xff byte\n")
        os.write(1, "half ü".encode()[:-1])  # a character cut in two by two writes
        os.write(1, "half ü".encode()[-1:])
        print(" lone \ud800 surrogate")

    run(worker, talk)
    assert capsys.readouterr().out == "bad � byte\nhalf ü lone \\ud800 surrogate\n"


def test_output_without_a_newline_is_there_with_the_answer(
    worker: LocalWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream in ("stdout", "stderr", "__stdout__", "__stderr__"):
        run(worker, lambda name: getattr(sys, name).write("x") and None, stream)
        shown = capsys.readouterr()
        assert shown.out + shown.err == "x", stream


@pytest.mark.parametrize("new", ["None", "StringIO", "broken"])
def test_user_code_may_replace_standard_output(
    worker: LocalWorker, capsys: pytest.CaptureFixture[str], new: str
) -> None:
    class Broken:
        def write(self, text: str) -> None:
            pass

        def flush(self) -> None:
            raise RuntimeError("broken")

    def replace() -> int:
        sys.stdout.write("before")
        sys.stdout = {"None": None, "StringIO": io.StringIO(), "broken": Broken()}[new]  # type: ignore[assignment]
        return 1

    assert run(worker, replace) == 1
    assert capsys.readouterr().out == "before"

    def restore() -> None:
        sys.stdout = sys.__stdout__
        print("äfter")

    run(worker, restore)
    assert capsys.readouterr().out == "äfter\n"


def test_closed_output_does_not_keep_the_caller_busy(worker: LocalWorker) -> None:
    """Nobody can write to the pipe any more, which poll() reports without end."""

    def close() -> int:
        for fd in (0, 1, 2):
            os.close(fd)
        os.closerange(20, 100)
        time.sleep(0.4)
        return 5

    begun = time.thread_time()
    assert run(worker, close) == 5
    assert time.thread_time() - begun < 0.2
    assert run(worker, os.getpid) > 0


def test_what_is_printed_between_calls_and_at_the_end_is_shown(
    workers: LocalWorkers, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = moved_in(workers)

    def later(written: Path) -> None:
        threading.Timer(0.05, lambda: (os.write(1, b"between\n"), written.touch())).start()

    run(made, later, tmp_path / "first")
    wait_until((tmp_path / "first").exists)
    run(made, os.getpid)
    assert capsys.readouterr().out == "between\n"
    run(made, later, tmp_path / "last")
    wait_until((tmp_path / "last").exists)
    made.end("over")
    assert capsys.readouterr().out == "between\n"


def test_finally_blocks_see_the_end(workers: LocalWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    made = moved_in(workers)

    def wait() -> None:
        try:
            time.sleep(60)
        except Exception:
            print("this is no Exception")
        finally:
            print("leaving")

    threading.Timer(0.2, lambda: made._supervisor.order({"end": "told so"})).start()
    with pytest.raises(WorkerLost, match="told so"):
        run(made, wait)
    assert capsys.readouterr().out == "leaving\n"
    made.end("over")
    assert made.ending == "told so"


# --- answers belong to their calls ---


@contextlib.contextmanager
def alarm(seconds: float, error: type[BaseException]) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_answer_to_a_call_that_was_left_is_nobodys(worker: LocalWorker) -> None:
    """A signal handler's exception leaves the call: it is interrupted there, and what it answers is not the
    next one's result."""
    begun = time.monotonic()
    with (
        pytest.raises(TimeoutError),
        alarm(0.1, TimeoutError),
    ):  # on a crowded machine it rings before the call
        run(worker, lambda: time.sleep(30) or "late")
    assert run(worker, lambda: "mine") == "mine"
    assert time.monotonic() - begun < 10

    def stubborn() -> str:
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(0.4)
        return "late"

    with pytest.raises(TimeoutError), alarm(0.1, TimeoutError):
        run(worker, stubborn)
    assert run(worker, lambda: "mine") == "mine"


def test_a_closed_standard_output_of_ours_ends_the_call_and_mixes_up_nothing(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Gone())
        with pytest.raises(BrokenPipeError):
            run(worker, lambda: print("x", flush=True) or time.sleep(30) or "late")
    assert run(worker, lambda: "mine") == "mine"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_is_one_interrupt(worker: LocalWorker) -> None:
    """Wherever it hits this process, the call is over, the next one gets its own answer, and the worker
    lives."""
    pid = run(worker, os.getpid)
    hit = 0
    for n in range(40):
        try:
            with alarm(0.0002 + n * 0.00008, KeyboardInterrupt):
                run(worker, lambda n: ("stale", n, bytes(200_000)), n)
                time.sleep(0.01)
        except KeyboardInterrupt:
            hit += 1
        assert run(worker, lambda n: n, n) == n
    assert hit > 30  # one that hits a destructor is lost, whoever's process it is
    assert run(worker, os.getpid) == pid


def test_an_interrupt_that_the_call_answers_late_is_passed_on_at_once(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor's word that it sent the interrupt is waited for once: not again when the answer
    comes."""
    monkeypatch.setattr(local, "OBEY_MS", 20_000)

    def slow_to_leave() -> None:
        try:
            time.sleep(30)
        finally:
            time.sleep(0.3)

    begun = time.monotonic()
    with alarm(0.2, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run(worker, slow_to_leave)
    assert time.monotonic() - begun < 10
    assert run(worker, os.getpid) > 0


def test_a_second_interrupt_ends_the_worker(workers: LocalWorkers) -> None:
    made = moved_in(workers)

    def stubborn() -> None:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(30)

    def ring(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        with pytest.raises(KeyboardInterrupt):
            run(made, stubborn)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    wait_until(lambda: process_is_gone(made.holder.pid))
    assert made.ending == "interrupted twice"
    made.end("over")


# --- interrupts ---


def interrupt_soon(worker: LocalWorker, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, lambda: os.kill(worker.worker_pid, signal.SIGINT))
    timer.start()
    return timer


def test_sigint_is_raised_in_the_code_that_runs(worker: LocalWorker) -> None:
    def catch() -> str:
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            return "caught"
        return "slept"

    interrupt_soon(worker, 0.2)
    assert run(worker, catch) == "caught"
    interrupt_soon(worker, 0.2)
    with pytest.raises(KeyboardInterrupt):
        run(worker, time.sleep, 30)
    assert run(worker, os.getpid) > 0


def test_sigint_between_calls_and_while_an_answer_is_sent_is_ignored(worker: LocalWorker) -> None:
    pid = run(worker, os.getpid)
    os.kill(worker.worker_pid, signal.SIGINT)
    time.sleep(0.05)
    assert run(worker, os.getpid) == pid
    stop = threading.Event()

    def pester() -> None:
        while not stop.wait(0.0003):
            os.kill(worker.worker_pid, signal.SIGINT)

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        for _ in range(60):
            with contextlib.suppress(KeyboardInterrupt):
                run(worker, bytes, 300_000)
    finally:
        stop.set()
        thread.join()
    assert run(worker, os.getpid) == pid


def test_a_handler_of_the_users_stays_in_place(worker: LocalWorker) -> None:
    def install() -> None:
        signal.signal(signal.SIGINT, lambda *_: os.write(1, b""))

    run(worker, install)
    interrupt_soon(worker, 0.1)
    assert run(worker, lambda: time.sleep(0.4) or "undisturbed") == "undisturbed"
    run(worker, lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None)
    assert run(worker, lambda: signal.getsignal(signal.SIGINT) is signal.default_int_handler)


# --- what user code raises ---


class NoMessage(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


class Picky(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class OnlyThere(Exception):
    """Unpickles in the worker and nowhere else."""

    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def _only_in(pid: int) -> OnlyThere:
    if os.getpid() != pid:
        raise RuntimeError("not here")
    return OnlyThere("was there")


def throw(error: BaseException) -> None:
    raise error


def make_and_throw(kind: type[BaseException], *args: Any) -> None:
    raise kind(*args)


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt("k"), GeneratorExit("g"), StopIteration(4)]
)
def test_every_exception_is_the_callers(worker: LocalWorker, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        run(worker, throw, error)
    assert caught.value.args == error.args
    assert run(worker, os.getpid) > 0


def test_exceptions_that_cannot_travel_are_told(worker: LocalWorker) -> None:
    with pytest.raises(NoMessage):
        run(worker, make_and_throw, NoMessage)
    with pytest.raises(CallFailed, match="Picky: 1 and 2"):
        run(worker, make_and_throw, Picky, 1, 2)
    with pytest.raises(CallFailed, match="OnlyThere"):
        run(worker, make_and_throw, OnlyThere)

    def both() -> None:
        class Both(NoMessage):
            def __reduce__(self) -> Any:
                raise RuntimeError("nor pickle")

        raise Both

    with pytest.raises(CallFailed, match="Both: its message cannot be shown"):
        run(worker, both)
    with pytest.raises(TypeError, match="generator"):
        run(worker, lambda: (x for x in ()))
    with pytest.raises(pickle.PicklingError, match="deep"):
        run(worker, deep)
    assert run(worker, os.getpid) > 0


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def test_one_of_many_that_fails_is_the_only_one(worker: LocalWorker) -> None:
    outcomes = worker.call_many(divide, [((6, n), {}) for n in (1, 0, 3)])
    assert [fine for fine, _ in outcomes] == [True, False, True]
    assert isinstance(outcomes[1][1], ZeroDivisionError)
    assert [outcomes[0][1], outcomes[2][1]] == [6, 2]


def divide(a: int, b: int) -> float:
    return a / b


def test_a_result_there_is_no_room_for_is_an_exception(worker: LocalWorker) -> None:
    def huge() -> bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return bytes(5_000_000)

    with pytest.raises(OSError, match="too large"):
        run(worker, huge)
    assert run(worker, os.getpid) > 0


# --- processes and threads of user code ---


def test_a_forked_child_that_comes_back_answers_nothing(
    worker: LocalWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a return, by sys.exit(), by an exception: one call has one answer, the parent's."""

    def fork(how: str) -> tuple[str, int]:
        child = os.fork()
        if child == 0:
            if how == "return":
                return "child", 0
            if how == "exit":
                sys.exit(3)
            raise ValueError("in the child")
        return "parent", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run(worker, fork, "return") == ("parent", 0)
    assert run(worker, fork, "exit") == ("parent", 3)
    assert run(worker, fork, "raise") == ("parent", 1)
    assert "ValueError: in the child" in capsys.readouterr().err
    assert worker.call_many(fork, [(("return",), {}), (("exit",), {})]) == [
        (True, ("parent", 0)),
        (True, ("parent", 3)),
    ]
    assert run(worker, lambda: "next") == "next"


def test_a_child_can_be_terminated(worker: LocalWorker, capsys: pytest.CaptureFixture[str]) -> None:
    """The worker's own answer to SIGTERM is not its children's."""

    def terminate() -> int | None:
        import multiprocessing

        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(0.1)
        child.terminate()
        child.join(60)
        return child.exitcode

    assert run(worker, terminate) == -signal.SIGTERM
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pools(worker: LocalWorker, capsys: pytest.CaptureFixture[str], method: str) -> None:
    def pool() -> list[int]:
        import multiprocessing

        with multiprocessing.get_context(method).Pool(2) as workers:
            return workers.map(abs, [-1, 2, -3])

    assert run(worker, pool) == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_data_loader_with_workers(torch_worker: LocalWorker) -> None:
    def load() -> list[float]:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2)
        return [float(batch.sum()) for (batch,) in loader]

    assert run(torch_worker, load) == [1.0, 5.0, 9.0, 13.0]


def test_threads_outlive_the_call(worker: LocalWorker) -> None:
    def start() -> None:
        import builtins

        builtins.ticks = 0  # type: ignore[attr-defined]

        def tick() -> None:
            while True:
                builtins.ticks += 1  # type: ignore[attr-defined]
                time.sleep(0.005)

        threading.Thread(target=tick, daemon=True).start()

    def ticks() -> int:
        import builtins

        return builtins.ticks  # type: ignore[attr-defined,no-any-return]

    run(worker, start)
    first = run(worker, ticks)
    wait_until(lambda: run(worker, ticks) > first)


def test_the_worker_looks_like_a_process_of_its_own(worker: LocalWorker) -> None:
    def look() -> tuple[int, str, int, str, list[int]]:
        import psutil

        stat = Path("/proc/self/stat").read_text()
        return os.getpid(), os.readlink("/proc/self"), psutil.Process().pid, stat.split()[0], psutil.pids()

    pid, link, by_psutil, by_stat, visible = run(worker, look)
    assert str(pid) == link == by_stat
    assert by_psutil == pid
    assert pid in visible


def open_there() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def test_a_worker_has_no_descriptors_but_its_own(workers: LocalWorkers) -> None:
    """Nothing of the zygote's: not its lock, which would keep the next one from starting, nor a way to speak
    to it. Nothing of its supervisor's either, also when it was forked on demand because the spare had just
    been given away."""
    several = [moved_in(workers) for _ in range(3)]
    for made in several:
        found = run(made, open_there)
        others = sorted(target.split(":")[0] for fd, target in found.items() if fd > 2)
        assert others == ["/memfd", "pipe", "socket"], str(found)  # the pipe is what it shows by
        assert found[0] == "/dev/null"
    for made in several:
        held = [
            os.readlink(f"/proc/{made.holder.pid}/fd/{n}") for n in os.listdir(f"/proc/{made.holder.pid}/fd")
        ]
        # Its control socket; the pipe that signals wake it by. None of the worker's output, calls and page.
        assert len([h for h in held if h.startswith("socket")]) == 1, held
        assert len([h for h in held if h.startswith("pipe")]) == 2, held
        assert not [h for h in held if "memfd" in h or "lock" in h], held
        made.end("over")


def test_folder_path_and_environment_are_the_callers(
    workers: LocalWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOMETHING", "of mine")
    monkeypatch.setenv("SUBLET_TOKEN", "secret")
    monkeypatch.syspath_prepend(str(tmp_path / "x"))
    monkeypatch.setattr(sys, "argv", ["prog", "--flag"])
    made = moved_in(workers)
    try:
        folder, environment, path, arguments = run(
            made, lambda: (os.getcwd(), dict(os.environ), list(sys.path), list(sys.argv))
        )
        assert folder == str(tmp_path)
        assert environment["SOMETHING"] == "of mine"
        assert "SUBLET_TOKEN" not in environment
        assert (path, arguments) == (sys.path, ["prog", "--flag"])
        run(made, os.chdir, "/")
        assert run(made, os.getcwd) == "/"
    finally:
        made.end("over")


def test_the_process_lease_follows_the_deadline(worker: LocalWorker) -> None:
    def check() -> tuple[str, int]:
        process_lease = lease_environment.process_lease()
        assert process_lease is not None
        process_lease.check()
        return process_lease.id, process_lease.epoch

    assert run(worker, check) == ("lease-1", 7)
    worker.arm(now_us() - 1, now_us() + 60_000_000)
    with pytest.raises(LeaseLost):
        run(worker, check)
    worker.arm(now_us() + 60_000_000, now_us() + 60_000_000)
    assert run(worker, check) == ("lease-1", 7)


# --- the caller's own resources ---


def test_a_worker_leaves_no_descriptor_with_its_caller(workers: LocalWorkers) -> None:
    def once() -> None:
        made = moved_in(workers)
        run(made, bytes, 100_000)
        made.end("over")
        assert made.ending == "over"
        with pytest.raises(WorkerLost, match="had ended: over"):
            run(made, os.getpid)

    once()
    gc.collect()  # what tests before this one have left is not counted
    before = descriptors()
    for _ in range(3):
        once()
    assert descriptors() <= before


def test_ended_under_a_call_in_another_thread_it_leaves_none_either(workers: LocalWorkers) -> None:
    before = descriptors()
    made = moved_in(workers)
    lost: list[BaseException] = []

    def call() -> None:
        try:
            run(made, time.sleep, 60)
        except WorkerLost as e:
            lost.append(e)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    made.end("taken away")
    thread.join(60)
    assert "taken away" in str(lost[0])
    made._page.close()
    assert descriptors() == before


def test_a_start_that_failed_leaves_no_descriptor() -> None:
    def refuse(_: list[int]) -> None:
        raise Misconfigured("no zygote")

    before = descriptors()
    for ask in (refuse, lambda fds: None):
        with pytest.raises(Misconfigured):
            LocalWorker(ask, "here")
    assert descriptors() == before


def test_a_forked_child_of_the_caller_has_no_worker(worker: LocalWorker) -> None:
    child = os.fork()
    if child == 0:
        try:
            run(worker, os.getpid)
        except WorkerLost:
            worker.end("not mine to end")
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert run(worker, os.getpid) > 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("os._exit(7)", "exited with code 7"),
        ("os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("os.abort()", "signal 6"),
    ],
)
def test_how_it_ended_is_said(workers: LocalWorkers, how: str, said: str) -> None:
    made = moved_in(workers)
    with pytest.raises(WorkerLost, match=said) as lost:
        run(made, eval, how, {"os": os})
    assert lost.value.begun
    assert said in made.ending
    with pytest.raises(WorkerLost) as again:
        run(made, os.getpid)
    assert not again.value.begun
    made.end("over")
    assert process_is_gone(made.holder.pid)


def test_a_lost_supervisor_is_said_and_takes_the_worker_along(workers: LocalWorkers) -> None:
    made = moved_in(workers)
    threading.Timer(0.2, lambda: os.kill(made.holder.pid, signal.SIGKILL)).start()
    with pytest.raises(WorkerLost, match="its supervisor was killed"):
        run(made, time.sleep, 60)
    wait_until(lambda: process_is_gone(made.worker_pid))
    made.end("over")
    remove_group(made.holder.pid, made.holder.started)
