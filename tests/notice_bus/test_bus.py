"""The Notice bus: signals in real processes, sources, leases; nothing heard twice, nothing lost, nothing left
behind.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

import sublet
from sublet import wiring
from sublet.core.leasing.lease import EndReason
from sublet.core.notice import Notice
from sublet.notice_bus.bus import NoticeBus
from sublet.processes.clock import HostClock
from sublet.settings import load_settings
from sublet.testing.clock import VirtualClock
from tests import forked
from tests.conftest import need
from tests.homes import wait_until

CLOCK = HostClock()
GRACE_US = 15_000_000


def notice(seconds: float, source: str = "cloud", reason: str = "reclaimed") -> Notice:
    return Notice(source=source, reason=reason, deadline_us=round(seconds * 1e6))


@pytest.fixture
def notice_bus() -> Iterator[NoticeBus]:
    with NoticeBus(VirtualClock(), grace_us=GRACE_US, signals=()) as made:
        yield made


# --- what the loop sees ---


def test_silence(notice_bus: NoticeBus) -> None:
    assert notice_bus.notice is None
    assert notice_bus.wait(0.01) is None
    assert not select.select([notice_bus], [], [], 0)[0]


def test_the_nearest_deadline_is_the_notice(notice_bus: NoticeBus) -> None:
    notice_bus.raise_notice(notice(60))
    notice_bus.raise_notice(notice(30, reason="nearer"))
    notice_bus.raise_notice(notice(90))
    assert notice_bus.notice == notice(30, reason="nearer")
    assert notice_bus.wait(0) == notice_bus.notice
    assert select.select([notice_bus], [], [], 0)[0]
    assert notice_bus.heard() == notice(30, reason="nearer")
    assert not select.select([notice_bus], [], [], 0)[0]
    notice_bus.raise_notice(notice(30, reason="again"))  # nothing new: nobody is woken for it
    assert not select.select([notice_bus], [], [], 0)[0]


def test_asking_costs_next_to_nothing() -> None:
    lease = FakeLease()
    with NoticeBus(CLOCK, grace_us=GRACE_US) as notice_bus:
        notice_bus.listen_to(lease)
        fastest = 1.0
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(10_000):
                assert notice_bus.notice is None
            fastest = min(fastest, (time.perf_counter() - began) / 10_000)
    assert fastest < 10e-6


def test_asking_makes_no_system_call() -> None:
    need(shutil.which("strace") is not None, "strace")
    code = """
        import os
        from sublet.processes.clock import HostClock
        from sublet.notice_bus.bus import NoticeBus
        with NoticeBus(HostClock(), grace_us=1) as notice_bus:
            os.getpgid(0)
            for _ in range(5000):
                notice_bus.notice
            os.getpgid(0)
    """
    done = subprocess.run(
        ["strace", "-e", "trace=!futex,clock_nanosleep", sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
    )
    need("getpgid" in done.stderr, "the right to trace a process")
    calls = done.stderr.splitlines()
    first, last = (i for i, line in enumerate(calls) if line.startswith("getpgid("))
    assert last - first < 10, calls[first:last]


def test_a_waiter_is_woken_from_another_thread(notice_bus: NoticeBus) -> None:
    threading.Timer(0.1, notice_bus.raise_notice, [notice(5)]).start()
    began = time.monotonic()
    assert notice_bus.wait(60) == notice(5)
    assert time.monotonic() - began < 30


def test_callbacks_are_told_of_each_new_warning_and_of_one_that_was_there(notice_bus: NoticeBus) -> None:
    heard: list[Notice] = []

    def broken(_: Notice) -> None:
        heard.append(notice(0, reason="broken"))
        raise RuntimeError("mine")

    notice_bus.raise_notice(notice(60))
    notice_bus.on_notice(heard.append)
    notice_bus._callbacks.insert(0, broken)
    notice_bus.raise_notice(notice(30))
    notice_bus.raise_notice(notice(30))
    assert [n.deadline_us for n in heard] == [60_000_000, 0, 30_000_000]


def test_many_threads_at_once(notice_bus: NoticeBus) -> None:
    def shout(first: int) -> None:
        for n in range(200):
            notice_bus.raise_notice(notice(10_000 - first - n))

    threads = [threading.Thread(target=shout, args=[1000 * i]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert notice_bus.notice == notice(10_000 - 7000 - 199)


def test_after_leaving_nothing_is_heard_and_nothing_is_left() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with NoticeBus(CLOCK, grace_us=GRACE_US) as notice_bus:
        pass
    notice_bus.raise_notice(notice(1))
    assert notice_bus.notice is None
    assert notice_bus.wait(5) is None
    with pytest.raises(ValueError, match="closed"):
        notice_bus.fileno()
    with pytest.raises(ValueError, match="closed"):
        notice_bus.__enter__()
    notice_bus.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("sublet-notices")]


# --- leases ---


@dataclass
class FakeLease:
    """As `leases.lease.Lease`: tells of a warning, and takes one back without a word."""

    notice: Notice | None = None
    callbacks: list[Callable[[Notice], None]] = field(default_factory=list)

    def on_notice(self, callback: Callable[[Notice], None]) -> None:
        self.callbacks.append(callback)
        if self.notice is not None:
            callback(self.notice)

    def warn(self, warning: Notice) -> None:
        self.notice = warning
        for callback in self.callbacks:
            callback(warning)


def test_a_lease_that_takes_its_warning_back_leaves_what_the_others_said(notice_bus: NoticeBus) -> None:
    lease = FakeLease()
    notice_bus.listen_to(lease)
    lease.warn(notice(10, source="keeper"))
    assert notice_bus.notice == notice(10, source="keeper")
    assert select.select([notice_bus], [], [], 0)[0]
    notice_bus.raise_notice(notice(60))
    lease.notice = None  # the ledger answered again
    assert notice_bus.notice == notice(60)
    lease.warn(notice(20, source="lease"))
    assert notice_bus.notice == notice(20, source="lease")


def test_a_waiter_goes_on_waiting_when_the_warning_was_taken_back(notice_bus: NoticeBus) -> None:
    lease = FakeLease()
    notice_bus.listen_to(lease)
    lease.warn(notice(10, source="keeper"))
    lease.notice = None
    threading.Timer(0.3, lease.warn, [notice(20, source="lease")]).start()
    assert notice_bus.wait(20) == notice(20, source="lease")


def test_a_lease_that_was_given_back_is_forgotten(notice_bus: NoticeBus) -> None:
    lease = FakeLease(notice(0, source="lease", reason="preempted"))
    notice_bus.listen_to(lease)
    assert notice_bus.notice is not None
    notice_bus.forget(lease)
    assert notice_bus.notice is None
    notice_bus.heard()
    lease.warn(notice(0, source="lease", reason="again"))
    assert not select.select([notice_bus], [], [], 0)[0]


def test_a_real_lease_that_is_revoked(sqlite_home: object) -> None:
    settings = load_settings()
    with sublet.gpu(vram="1GiB", ttl="30s") as lease, NoticeBus(CLOCK, grace_us=GRACE_US) as notice_bus:
        notice_bus.listen_to(lease)
        assert notice_bus.notice is None
        wiring.open_ledger(settings).revoke(
            lease.id,
            reason=EndReason.REVOKED,
            detail="the test takes it back",
            grace_us=10_000_000,
            actor="operator",
        )
        found = notice_bus.wait(20)
        assert found is not None
        assert (found.source, found.reason) == ("lease", "revoked: the test takes it back")
        assert 5 < found.seconds_left(CLOCK.monotonic_us()) <= 10


# --- sources ---


class Scripted:
    name = "scripted"

    def __init__(
        self, watch: Callable[[Callable[[Notice], None], threading.Event], None], risk: str = ""
    ) -> None:
        self.watch = watch
        self.risk = risk

    def here(self) -> bool:
        return True


def test_sources_are_watched_until_leaving() -> None:
    ended = threading.Event()

    def watch(raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        raise_notice(notice(60))
        stop.wait(20)
        ended.set()

    with NoticeBus(CLOCK, [Scripted(watch, risk="stormy")], grace_us=GRACE_US) as notice_bus:
        assert notice_bus.wait(60) == notice(60)
        assert notice_bus.risks == ("stormy",)
        assert not ended.is_set()
    assert ended.is_set()


def test_a_source_that_breaks_is_watched_again_and_named() -> None:
    tries = []

    def watch(raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("a plug-in's own fault")
        raise_notice(notice(60))

    with NoticeBus(CLOCK, [Scripted(watch)], grace_us=GRACE_US) as notice_bus:
        assert notice_bus.wait(60) == notice(60)
        assert notice_bus.failures == {"scripted": "RuntimeError: a plug-in's own fault"}


def test_a_source_that_does_not_stop_does_not_keep_us() -> None:
    over = threading.Event()
    began = time.monotonic()
    with NoticeBus(CLOCK, [Scripted(lambda raise_notice, stop: over.wait(60) and None)], grace_us=GRACE_US):
        pass
    assert time.monotonic() - began < 30
    over.set()


# --- signals, in real processes ---

PROLOGUE = """
import ctypes, os, signal, sys, threading, time, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # who forks beside our threads, from Python 3.12 on
from sublet.processes.clock import HostClock
from sublet.notice_bus.bus import NoticeBus
CLOCK = HostClock()
def say(*words): print(*words, flush=True)
def left(notice): return (notice.deadline_us - CLOCK.monotonic_us()) / 1e6
"""


@dataclass
class Program:
    process: subprocess.Popen[str]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: int, times: int = 1) -> None:
        for _ in range(times):
            os.kill(self.process.pid, number)

    def rest(self) -> tuple[int, list[str], str]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        out, error = self.process.stdout.read(), self.process.stderr.read()
        return self.process.wait(60), out.splitlines(), error


@pytest.fixture
def program() -> Iterator[Callable[[str], Program]]:
    started: list[Program] = []

    def start(code: str) -> Program:
        made = Program(
            forked.Forked(
                [sys.executable, "-u", "-c", PROLOGUE + textwrap.dedent(code)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        started.append(made)
        assert made.line() == "ready"
        return made

    yield start
    for made in started:
        try:
            os.killpg(made.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        made.process.wait()
        for stream in (made.process.stdout, made.process.stderr):
            if stream is not None:
                stream.close()


Start = Callable[[str], Program]


def test_sigterm_during_a_step(program: Start) -> None:
    child = program("""
        with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
            say("ready")
            steps = 0
            while notice_bus.notice is None:
                sum(range(1000)); steps += 1
            notice = notice_bus.notice
            say(notice.source, "|", notice.reason, "|", 13 < left(notice) <= 15)
        say("left")
    """)
    child.send(signal.SIGTERM)
    code, out, error = child.rest()
    assert (code, error) == (0, "")
    assert out == ["signal | SIGTERM: this process is asked to end | True", "left"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_one_is_harmless_and_does_not_move_the_deadline(program: Start, number: int) -> None:
    child = program("""
        with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
            say("ready")
            first = notice_bus.wait(20)
            say("first")
            time.sleep(0.5)
            say(notice_bus.notice == first)
    """)
    child.send(number)
    assert child.line() == "first"
    child.send(number, times=3)
    assert child.rest() == (0, ["True"], "")


def test_the_second_ctrl_c_is_the_users(program: Start) -> None:
    child = program("""
        try:
            with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
                say("ready")
                say(notice_bus.wait(20).reason)
                time.sleep(20)
        except KeyboardInterrupt:
            say("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """)
    child.send(signal.SIGINT)
    assert child.line() == "SIGINT: this process is asked to end; once more interrupts it"
    child.send(signal.SIGINT)
    assert child.rest() == (0, ["interrupted True"], "")


def test_a_handler_that_was_there_is_called_too_and_put_back(program: Start) -> None:
    child = program("""
        say("ready")
        def mine(number, frame): say("mine", signal.Signals(number).name, frame is not None)
        for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, mine)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        every = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
        with NoticeBus(CLOCK, grace_us=1, signals=every) as notice_bus:
            for number in (signal.SIGINT, signal.SIGINT, *every):
                os.kill(os.getpid(), number)
            inside = notice_bus.notice.source
        say(inside, signal.getsignal(signal.SIGTERM) is mine, signal.getsignal(signal.SIGINT) is mine,
            signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL)
    """)
    code, out, error = child.rest()
    assert (code, error) == (0, "")
    assert sorted(out[:-1]) == ["mine SIGINT True"] * 3 + ["mine SIGTERM True"]
    assert out[-1] == "signal True True True True"


def test_a_handler_somebody_installed_meanwhile_stays_theirs(program: Start) -> None:
    child = program("""
        say("ready")
        with NoticeBus(CLOCK, grace_us=1):
            signal.signal(signal.SIGTERM, lambda number, frame: say("theirs"))
        os.kill(os.getpid(), signal.SIGTERM)
    """)
    assert child.rest() == (0, ["theirs"], "")


def test_after_leaving_a_signal_does_what_it_did(program: Start) -> None:
    child = program("""
        with NoticeBus(CLOCK, grace_us=1): pass
        say("ready")
        time.sleep(20)
    """)
    child.send(signal.SIGTERM)
    assert child.rest()[0] == -signal.SIGTERM


def test_left_by_another_thread_a_signal_does_what_it_did(program: Start) -> None:
    child = program("""
        notice_bus = NoticeBus(CLOCK, grace_us=1).__enter__()
        other = threading.Thread(target=notice_bus.close); other.start(); other.join()
        say("ready")
        time.sleep(20)
    """)
    child.send(signal.SIGTERM)
    assert child.rest()[0] == -signal.SIGTERM


CLOSED_BY_ANOTHER = """
def leave(notice_bus):
    other = threading.Thread(target=notice_bus.close); other.start(); other.join()
"""


def test_those_another_thread_has_left_are_no_part_of_the_next(program: Start) -> None:
    """A cell's notice bus closed by its keeper, and a training run after it: SIGTERM is a Notice, and not the
    end."""
    child = program(
        CLOSED_BY_ANOTHER
        + """
for _ in range(3):
    leave(NoticeBus(CLOCK, grace_us=1).__enter__())
fds = len(os.listdir("/proc/self/fd"))
with NoticeBus(CLOCK, grace_us=5_000_000) as notice_bus:
    say("ready")
    say(notice_bus.wait(20).source)
say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1))
say(fds - len(os.listdir("/proc/self/fd")) <= 2)
"""
    )
    child.send(signal.SIGTERM)
    assert child.rest() == (0, ["signal", "True -1", "True"], "")


def test_left_by_another_thread_no_signal_is_written_into_a_strangers_file(program: Start) -> None:
    """The interpreter goes on writing to the descriptor it was given, whoever has that number by now."""
    child = program(
        CLOSED_BY_ANOTHER
        + """
signal.signal(signal.SIGUSR1, lambda *_: None)
notice_bus = NoticeBus(CLOCK, grace_us=1).__enter__()
leave(notice_bus)
pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(8)]  # the lowest numbers there are
say("ready")
time.sleep(0.3)
for read, _ in pipes:
    try:
        say("strange:", os.read(read, 9))
    except BlockingIOError:
        pass
"""
    )
    child.send(signal.SIGUSR1)
    assert child.rest() == (0, [], "")


def test_left_by_another_thread_one_that_calls_what_was_before_still_does(program: Start) -> None:
    child = program(
        CLOSED_BY_ANOTHER
        + """
signal.signal(signal.SIGTERM, lambda *_: say("the first"))
notice_bus = NoticeBus(CLOCK, grace_us=1).__enter__()
before = signal.getsignal(signal.SIGTERM)
def later(number, frame):
    say("the later")
    before(number, frame)
signal.signal(signal.SIGTERM, later)
leave(notice_bus)
say("ready")
time.sleep(0.5)
"""
    )
    child.send(signal.SIGTERM)
    assert child.rest() == (0, ["the later", "the first"], "")


def test_a_notice_bus_within_another(program: Start) -> None:
    child = program("""
        with NoticeBus(CLOCK, grace_us=9_000_000) as outer:
            with NoticeBus(CLOCK, grace_us=5_000_000) as inner:
                say("ready")
                say(inner.wait(20).source, outer.wait(20).source)
            say(outer.notice.source)
            handler = signal.getsignal(signal.SIGTERM)
            say(handler == outer._on_signal)
        say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1))
    """)
    child.send(signal.SIGTERM)
    assert child.rest() == (0, ["signal signal", "signal", "True", "True -1"], "")


def test_notice_buses_left_in_the_order_they_were_entered(program: Start) -> None:
    """Two runs in one process, the first ended first: the second still hears, and leaves nothing of either
    behind."""
    child = program("""
        read, write = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        first, second = NoticeBus(CLOCK, grace_us=9_000_000), NoticeBus(CLOCK, grace_us=5_000_000)
        first.__enter__()
        second.__enter__()
        first.close()
        say("ready")
        say(second.wait(20).source)
        second.close()
        say(os.read(read, 1) == bytes((signal.SIGUSR1,)), signal.set_wakeup_fd(-1) == write)
    """)
    child.send(signal.SIGUSR1)
    assert child.rest() == (0, ["signal", "True True"], "")


def test_not_in_the_main_thread_only_the_other_sources_are_heard(program: Start) -> None:
    child = program("""
        from sublet.core.notice import Notice
        def work():
            with NoticeBus(CLOCK, grace_us=1) as notice_bus:
                say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
                notice_bus.raise_notice(Notice(source="cloud", reason="x", deadline_us=1))
                say(notice_bus.wait(60).source)
        say("ready")
        thread = threading.Thread(target=work); thread.start(); thread.join()
    """)
    assert child.rest() == (0, ["True", "cloud"], "")


def test_a_flood_of_signals(program: Start) -> None:
    child = program("""
        with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
            told = []
            notice_bus.on_notice(told.append)
            say("ready")
            end = time.monotonic() + 20
            while len(told) < 1 and time.monotonic() < end: pass
            first = notice_bus.notice
            say("first")
            seen = time.monotonic() + 1.0
            while time.monotonic() < seen: sum(range(100))
            say(notice_bus.notice == first, len(told))
        say("left")
    """)
    child.send(signal.SIGTERM, times=500)
    assert child.line() == "first"
    child.send(signal.SIGTERM, times=500)
    assert child.rest() == (0, ["True 1", "left"], "")


def test_a_signal_during_a_long_call_into_c_is_heard_at_once_by_the_other_threads(program: Start) -> None:
    """As in a long kernel: Python cannot run a handler until the call is over, and the deadline counts all
    the same."""
    child = program("""
        import hashlib
        with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
            heard = []
            notice_bus.on_notice(lambda notice: heard.append(CLOCK.monotonic_us()))
            say("ready")
            hashlib.pbkdf2_hmac("sha512", b"x", b"y", 900_000)  # releases the GIL, and comes back when it is done
            done = CLOCK.monotonic_us()
            say(len(heard), done - heard[0] > 100_000, done - (notice_bus.notice.deadline_us - 15_000_000) > 100_000)
    """)
    time.sleep(0.2)
    child.send(signal.SIGTERM)
    code, out, error = child.rest()
    assert (code, error) == (0, "")
    assert out == ["1 True True"]


FORKED = """
    r, w = os.pipe()
    with NoticeBus(CLOCK, grace_us=15_000_000, signals=(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)) as notice_bus:
        children = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                os.write(w, b"c")
                try:
                    end = time.monotonic() + 20
                    while time.monotonic() < end: time.sleep(0.01)
                except KeyboardInterrupt:
                    os._exit(7)
                os._exit(0 if notice_bus.notice is None else 9)
            children.append(pid)
        for _ in children: os.read(r, 1)
        say("ready")
        say(*children)
        notice = notice_bus.wait(%s)
        say(notice and notice.source)
        time.sleep(0.5)
        for pid in children:
            ended, status = os.waitpid(pid, os.WNOHANG)
            say(os.waitstatus_to_exitcode(status) if ended else "lives")
            if not ended: os.kill(pid, signal.SIGKILL)
"""


def test_sigterm_to_the_whole_group_reaches_the_leader_and_ends_the_children_as_before(
    program: Start,
) -> None:
    child = program(FORKED % 20)
    child.line()
    os.killpg(child.process.pid, signal.SIGTERM)
    code, out, error = child.rest()
    assert (code, error) == (0, "")
    assert out == ["signal", *["-15"] * 3]


def test_a_warning_to_the_whole_group_does_not_kill_the_children_before_the_leader_has_decided(
    program: Start,
) -> None:
    for number in (signal.SIGUSR1, signal.SIGINT):
        child = program(FORKED % 20)
        child.line()
        os.killpg(child.process.pid, number)
        code, out, error = child.rest()
        assert (code, error) == (0, "")
        assert out == ["signal", *["lives"] * 3]


def test_a_signal_to_a_child_is_not_the_leaders(program: Start) -> None:
    child = program(FORKED % 1)
    for pid in child.line().split():
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(int(pid), number)
    code, out, error = child.rest()
    assert (code, error) == (0, "")
    assert out == ["None", *["-15"] * 3]


def test_no_signal_falls_between_the_fork_and_the_child(program: Start) -> None:
    """Children are signalled as early as can be, hundreds of times: never does one write into the leader's
    pipe."""
    child = program("""
        say("ready")
        with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
            ends = []
            for _ in range(200):
                pid = os.fork()
                if pid == 0:
                    time.sleep(20)
                    os._exit(0)
                os.kill(pid, signal.SIGTERM)
                ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            say(set(ends), notice_bus.notice, signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """)
    assert child.rest() == (0, ["{-15} None set()"], "")


def test_processes_of_multiprocessing_end_as_they_are_told(program: Start) -> None:
    child = program("""
        import multiprocessing
        def work():
            time.sleep(20)
        context = multiprocessing.get_context("fork")
        with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
            say("ready")
            made = context.Process(target=work); made.start()
            made.terminate(); made.join(60)
            say(made.exitcode)
            with context.Pool(2) as pool:
                say(pool.map(abs, [-1, -2]))
            say(notice_bus.notice)
    """)
    assert child.rest() == (0, ["-15", "[1, 2]", "None"], "")


def test_a_forked_child_that_leaves_the_block_takes_nothing_with_it(program: Start) -> None:
    child = program("""
        say("ready")
        with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
            pid = os.fork()
        if pid == 0:
            os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    assert child.rest() == (0, ["0"], "")


def test_an_event_loop_keeps_its_signals(program: Start) -> None:
    child = program("""
        import asyncio
        async def main():
            loop = asyncio.get_running_loop()
            mine = asyncio.Event()
            loop.add_signal_handler(signal.SIGUSR2, mine.set)
            with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
                woken = asyncio.Event()
                loop.add_reader(notice_bus.fileno(), woken.set)
                say("ready")
                await asyncio.wait_for(mine.wait(), 20)
                say("mine", notice_bus.notice)
                await asyncio.wait_for(woken.wait(), 20)
                loop.remove_reader(notice_bus.fileno())
                say(notice_bus.heard().source)
        asyncio.run(main())
    """)
    child.send(signal.SIGUSR2)
    assert child.line() == "mine None"
    child.send(signal.SIGTERM)
    assert child.rest() == (0, ["signal"], "")


def test_handlers_python_does_not_know_are_left_alone(program: Start) -> None:
    child = program("""
        import faulthandler
        faulthandler.register(signal.SIGUSR1)
        with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
            say("ready")
            os.kill(os.getpid(), signal.SIGUSR1)
            say(notice_bus.notice)
        os.kill(os.getpid(), signal.SIGUSR1)
    """)
    code, out, error = child.rest()
    assert (code, out) == (0, ["None"])
    assert error.count("Current thread") == 2


C_HANDLER = """
import ctypes
HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: os._exit(7))
def from_c():
    ctypes.CDLL(None).signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.cast(HANDLER, ctypes.c_void_p))
from_c()
"""


def test_sigterm_is_heard_where_a_library_took_it_from_c_and_is_theirs_again_after_us(program: Start) -> None:
    """LLVM does, when the first kernel is compiled: a run that begins later must not die of it with its steps
    unsaved."""
    child = program(
        C_HANDLER
        + """
with NoticeBus(CLOCK, grace_us=15_000_000):
    with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
        say("ready")
        say(notice_bus.wait(20).source)
pid = os.fork()
if not pid:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), notice_bus.notice)
"""
    )
    child.send(signal.SIGTERM)
    assert child.rest() == (0, ["signal", "7", "7 None"], "")


def test_left_in_the_order_they_were_entered_a_library_gets_its_own_back(program: Start) -> None:
    child = program(
        C_HANDLER
        + """
first, second = NoticeBus(CLOCK, grace_us=9_000_000), NoticeBus(CLOCK, grace_us=5_000_000)
first.__enter__()
second.__enter__()
first.close()
second.close()
say("ready")
time.sleep(20)
"""
    )
    child.send(signal.SIGTERM)
    assert child.rest()[0] == 7


def test_an_interrupt_that_is_ignored_stays_ignored(program: Start) -> None:
    child = program("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
            say("ready")
            os.kill(os.getpid(), signal.SIGINT)
            say(notice_bus.notice)
    """)
    assert child.rest() == (0, ["None"], "")


def test_the_loops_own_wait_is_woken_by_a_signal(program: Start) -> None:
    child = program("""
        with NoticeBus(CLOCK, grace_us=15_000_000) as notice_bus:
            say("ready")
            began = time.monotonic()
            say(notice_bus.wait(30).source, time.monotonic() - began < 10)
    """)
    child.send(signal.SIGTERM)
    assert child.rest() == (0, ["signal True"], "")


def test_waiting_has_no_end_of_its_own(notice_bus: NoticeBus) -> None:
    done: list[Notice | None] = []
    thread = threading.Thread(target=lambda: done.append(notice_bus.wait()))
    thread.start()
    time.sleep(0.2)
    assert not done
    notice_bus.raise_notice(notice(3))
    thread.join(60)
    wait_until(lambda: done == [notice(3)])
