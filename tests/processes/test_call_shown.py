"""A call with a screen: its output and displays in order, questions in its middle, and every way it may be
interrupted or left.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.core.errors import BadInput, WorkerLost
from sublet.processes.worker import worker as there
from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.screen import OUT
from tests.homes import wait_until
from tests.processes.shown_targets import ask, frames, here, sleep_through, talk
from tests.processes.worker.test_screen import Seen


def shown(
    worker: LocalWorker,
    function: Callable[..., Any],
    *args: Any,
    screen: Seen | None = None,
    answer: Callable[[Any], Any] = lambda asked: asked,
) -> Any:
    return worker.call_shown(function, args, screen or Seen(), answer)


@pytest.fixture
def interrupts() -> Iterator[Callable[[float], threading.Timer]]:
    """Ctrl-C here, in so many seconds."""
    timers: list[threading.Timer] = []

    def later(seconds: float) -> threading.Timer:
        timers.append(threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)))
        timers[-1].start()
        return timers[-1]

    yield later
    for timer in timers:
        timer.cancel()
        timer.join()


# --- output ---


def test_everything_is_on_the_screen_when_the_call_returns_and_in_order(worker: LocalWorker) -> None:
    screen = Seen()
    assert shown(worker, talk, 20_000, screen=screen) == 20_000
    assert screen.of("stdout") == "".join(f"{i}\n" for i in range(20_000)) + "the end"
    expected: list[tuple[str, Any]] = []
    for i in range(0, 20_000, 100):
        expected += [("stdout", f"{i}\n"), ("stderr", f"{-i}\n"), ("show", {"i": i})]
        expected.append(("stdout", "".join(f"{j}\n" for j in range(i + 1, i + 100))))
    order = screen.order
    assert order[:2] == [("stdout", "0\n"), ("stderr", "0\n")]
    assert [what for kind, what in order if kind == "show"] == [
        what for kind, what in expected if kind == "show"
    ]
    flat = "".join(f"{kind}:{what}|" for kind, what in order if kind != "stdout")
    assert flat == "".join(f"{kind}:{what}|" for kind, what in expected if kind != "stdout")


def test_what_c_code_and_subprocesses_write_comes_by_the_other_pipes(
    worker: LocalWorker, capfd: pytest.CaptureFixture[str]
) -> None:
    def write() -> None:
        import subprocess

        frames()
        os.write(1, b"from C\n")
        os.write(2, b"to err \xff\n")
        subprocess.run(["/bin/echo", "child"], check=True)
        subprocess.run(["/bin/echo", "to our stream"], check=True, stdout=sys.stdout)
        print("python")

    screen = Seen()
    shown(worker, write, screen=screen)
    assert screen.parts == [("stdout", "python\n")]
    said = capfd.readouterr()
    assert said.out.splitlines() == ["from C", "child", "to our stream"]
    assert said.err == "to err �\n"


def test_a_worker_killed_in_the_middle_of_a_frame_is_lost_and_all_that_came_of_it_is_shown(
    worker: LocalWorker,
) -> None:
    def die() -> None:
        frames().text(OUT, b"before\n")
        frames().flush()
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        # Larger than the pipe, and nobody reads: the screen on the other side takes its time.
        frames().text(OUT, b"x" * 1_000_000)

    slow = Seen(lambda what: time.sleep(0.6) if what.startswith("before") else None)
    with pytest.raises(WorkerLost, match="signal 9"):
        shown(worker, die, screen=slow)
    text = slow.of("stdout")
    assert text.startswith("before\nxxx")
    assert set(text[7:]) == {"x"}
    assert 1000 < len(text) < 1_000_000
    with pytest.raises(WorkerLost):
        shown(worker, die)


def test_a_thread_that_goes_on_printing_between_calls_neither_blocks_the_next_nor_loses_a_line(
    worker: LocalWorker,
) -> None:
    def begin() -> None:
        def go_on() -> None:
            for i in range(30_000):
                print(f"behind {i}")
            here()["done"] = True

        frames()
        threading.Thread(target=go_on, daemon=True).start()

    def look() -> bool:
        print("in front", file=sys.stderr)
        return bool(here().get("done"))

    screen = Seen()
    shown(worker, begin, screen=screen)
    time.sleep(0.3)  # the pipe is full long before, and nobody reads it
    wait_until(lambda: shown(worker, look, screen=screen), 20)
    shown(worker, look, screen=screen)
    assert screen.of("stdout") == "".join(f"behind {i}\n" for i in range(30_000))
    assert screen.of("stderr").count("in front\n") >= 2


def test_what_a_thread_prints_after_the_last_call_is_shown_when_the_worker_is_let_go(
    worker: LocalWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin() -> None:
        frames()
        threading.Timer(0.1, lambda: print("a last word")).start()

    shown(worker, begin)
    time.sleep(0.4)
    worker.end("over")
    assert capsys.readouterr().out == "a last word\n"


def test_a_plain_call_prints_plainly_although_the_worker_has_a_screen(
    worker: LocalWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(worker, talk, 1)
    worker.call(talk, (2,), {})
    said = capsys.readouterr()
    assert (said.out, said.err) == ("0\n1\nthe end", "0\n")


def test_a_forked_child_prints_and_the_worker_goes_on(
    worker: LocalWorker, capfd: pytest.CaptureFixture[str]
) -> None:
    def fork() -> int:
        frames()
        sys.stdout.write("parent, ")
        pid = os.fork()
        if pid == 0:
            print("child", "c" * 100_000)
            return 0
        os.waitpid(pid, 0)
        print("still parent")
        return 1

    screen = Seen()
    assert shown(worker, fork, screen=screen) == 1
    assert screen.parts
    assert screen.of("stdout") == "parent, still parent\n"
    assert capfd.readouterr().out == "child " + "c" * 100_000 + "\n"
    assert shown(worker, talk, 1, screen=screen) == 1


# --- questions ---


def test_a_call_may_ask_the_one_who_made_it_as_often_as_it_likes(worker: LocalWorker) -> None:
    big = bytes(range(256)) * 10_000
    assert shown(worker, ask, 1, "two", big, answer=lambda asked: (asked, asked)) == [
        (1, 1),
        ("two", "two"),
        (big, big),
    ]
    assert shown(worker, ask) == []


def test_what_was_printed_before_a_question_is_shown_before_it_is_answered(worker: LocalWorker) -> None:
    def print_and_ask() -> Any:
        frames()
        print("before")
        sys.stdout.flush()
        return there.ask_caller("?")

    screen = Seen()

    def answer(asked: Any) -> str:
        return screen.of("stdout")

    assert shown(worker, print_and_ask, screen=screen, answer=answer) == "before\n"


def test_when_answering_fails_the_call_is_interrupted_and_the_worker_serves_the_next(
    worker: LocalWorker,
) -> None:
    def fail(asked: Any) -> Any:
        raise ZeroDivisionError("in the answer")

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            shown(worker, ask, 1, answer=fail)
        assert shown(worker, ask, 2) == [2]


def test_when_answering_fails_the_call_need_not_wait_for_the_next_to_learn_it(
    worker: LocalWorker, tmp_path: Path
) -> None:
    def ask_and_note(path: Path) -> None:
        try:
            there.ask_caller(1)
        except KeyboardInterrupt:
            try:
                path.touch()
            except (
                KeyboardInterrupt
            ):  # the question is refused and the call is interrupted: the second may come in here
                path.touch()
            raise

    def fail(asked: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shown(worker, ask_and_note, tmp_path / "told", answer=fail)
    wait_until((tmp_path / "told").exists)


def test_an_answer_that_cannot_travel_is_the_answerers_error(worker: LocalWorker) -> None:
    with pytest.raises((TypeError, pickle.PicklingError)):
        shown(worker, ask, 1, answer=lambda asked: threading.Lock())
    assert shown(worker, ask, 2) == [2]


def test_nobody_answers_a_plain_call_and_it_is_told_so(worker: LocalWorker) -> None:
    with pytest.raises(KeyboardInterrupt):
        worker.call(ask, (1,), {})
    assert shown(worker, ask, 2) == [2]


def test_only_the_thread_of_the_call_may_ask(worker: LocalWorker) -> None:
    def ask_elsewhere() -> str:
        said = []

        def elsewhere() -> None:
            try:
                there.ask_caller(1)
            except RuntimeError as e:
                said.append(str(e))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return said[0]

    assert "only the thread" in shown(worker, ask_elsewhere)
    assert shown(worker, ask, 2) == [2]


def test_who_answers_cannot_call_the_worker_that_waits_for_him(worker: LocalWorker) -> None:
    with pytest.raises(BadInput, match="in the middle of a call"):
        shown(worker, ask, 1, answer=lambda asked: worker.call(ask, (2,), {}))
    assert shown(worker, ask, 3) == [3]


@pytest.mark.parametrize("beside", [False, True])
def test_an_interrupt_while_a_question_is_open_waits_for_the_answer_and_no_answer_is_anothers(
    worker: LocalWorker, interrupts: Callable[[float], threading.Timer], beside: bool
) -> None:
    """With a thread beside the call, the signal is that thread's: its mask does not help."""

    def ask_slowly(beside: bool) -> list[Any]:
        if beside and "beside" not in here():
            here()["beside"] = threading.Thread(target=time.sleep, args=(60,), daemon=True)
            here()["beside"].start()
        said: list[Any] = []
        try:
            said.append(there.ask_caller("first"))
            for _ in range(1000):
                time.sleep(0.01)
        except KeyboardInterrupt:
            said.append("interrupted")
        said.append(there.ask_caller("second"))
        return said

    def answer(asked: Any) -> Any:
        if asked == "first":
            os.kill(worker.worker_pid, signal.SIGINT)
            time.sleep(0.1)
        return f"answer to {asked}"

    for _ in range(5):
        said = shown(worker, ask_slowly, beside, answer=answer)
        assert said[-2:] == ["interrupted", "answer to second"]
        assert shown(worker, ask, "next", answer=answer) == ["answer to next"]


def test_interrupts_at_any_moment_leave_questions_and_answers_matched(worker: LocalWorker) -> None:
    def storm() -> list[int]:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        wrong, asked, interrupted = [], 0, 0
        over = time.monotonic() + 1.0
        while time.monotonic() < over:
            try:
                while time.monotonic() < over:
                    asked += 1
                    mine = asked
                    # Large enough for shared memory, of which nothing may get lost either.
                    answer = there.ask_caller((mine, bytes(100_000)))
                    if answer != (mine, bytes(100_000)):
                        wrong.append(mine)
            except KeyboardInterrupt:
                interrupted += 1
        return [len(wrong), asked, interrupted]

    def interrupted_all_the_time() -> list[int]:
        over = threading.Event()

        def send() -> None:
            time.sleep(0.05)
            while not over.wait(0.002):
                os.kill(worker.worker_pid, signal.SIGINT)

        sender = threading.Thread(target=send)
        sender.start()
        threading.Timer(0.9, over.set).start()
        try:
            return list(shown(worker, storm))
        except KeyboardInterrupt:  # one came as another was counted: the storm itself was left
            return []
        finally:
            over.set()
            sender.join()

    found: list[int] = []
    wait_until(lambda: bool(found or found.extend(interrupted_all_the_time()) or found))
    wrong, asked, interrupted = found
    assert wrong == 0
    assert asked > 50
    assert interrupted > 10
    assert shown(worker, ask, "next") == ["next"]


def test_a_call_that_was_left_with_its_question_unread_is_not_mistaken_for_the_next(
    worker: LocalWorker,
) -> None:
    """The one who called leaves by an error of his screen just as the worker asks: the question waits in the
    socket, and the next call arrives where its answer is expected."""

    def print_then_ask(n: int) -> str:
        frames()
        print("x")
        sys.stdout.flush()
        try:
            return str(there.ask_caller(n))
        except KeyboardInterrupt:
            here()["left"] = n
            raise

    def left() -> Any:
        return here().get("left")

    def refuse(what: str) -> None:
        time.sleep(0.1)  # meanwhile it asks
        raise BrokenPipeError

    for n in range(4):
        with pytest.raises(BrokenPipeError):
            shown(worker, print_then_ask, n, screen=Seen(refuse))
        if n % 2:  # the next asks something itself, where the old answer arrives
            assert shown(worker, ask, "at once") == ["at once"]
        assert shown(worker, left) == n
        assert shown(worker, ask, "next") == ["next"]


def test_a_worker_killed_while_its_question_is_answered_is_lost(worker: LocalWorker) -> None:
    def answer(asked: Any) -> None:
        os.kill(worker.worker_pid, signal.SIGKILL)
        time.sleep(0.1)

    with pytest.raises(WorkerLost):
        shown(worker, ask, 1, answer=answer)


def test_sigterm_in_the_middle_of_a_question_ends_the_worker(worker: LocalWorker) -> None:
    def answer(asked: Any) -> None:
        os.kill(worker.worker_pid, signal.SIGTERM)
        time.sleep(0.1)

    with pytest.raises(WorkerLost):
        shown(worker, ask, 1, answer=answer)


# --- interrupts ---


def test_an_interrupted_call_returns_what_it_says_of_it(
    worker: LocalWorker, interrupts: Callable[[float], threading.Timer]
) -> None:
    assert (
        shown(worker, sleep_through, 30, screen=Seen(lambda what: interrupts(0.1) and None)) == "interrupted"
    )
    assert shown(worker, sleep_through, 0.05) == "slept"


class SlowToArrive:
    def __reduce__(self) -> tuple[Any, tuple[float]]:
        return time.sleep, (0.5,)


def test_an_interrupt_before_the_call_has_begun_is_not_lost(
    worker: LocalWorker, interrupts: Callable[[float], threading.Timer]
) -> None:
    def begin(thing: Any) -> None:
        here()["begun"] = True
        time.sleep(30)

    def begun() -> bool:
        return "begun" in here()

    shown(worker, talk, 1)
    with pytest.raises(KeyboardInterrupt):
        interrupts(0.2)
        shown(worker, begin, SlowToArrive())
    assert not shown(worker, begun)


def test_an_interrupt_is_never_the_next_calls(
    worker: LocalWorker, interrupts: Callable[[float], threading.Timer]
) -> None:
    """Pressed just as a call is over, it may count or not; the call after it is not hit."""
    for n in range(12):
        with contextlib.suppress(
            KeyboardInterrupt
        ):  # it came between the calls, or on a crowded machine before the first
            pressed = interrupts(0.03)
            assert shown(worker, sleep_through, 0.02 + n / 1000) in ("slept", "interrupted")
            assert shown(worker, sleep_through, 0.05) in ("slept", "interrupted")
            pressed.join()
        assert shown(worker, sleep_through, 0.05) == "slept"


def test_an_interrupt_while_its_output_is_shown_counts_and_loses_no_output(worker: LocalWorker) -> None:
    raised = []

    def fail(what: str) -> None:
        if not raised:
            raised.append(what)
            raise KeyboardInterrupt

    def talk_and_wait() -> str:
        show = frames().show
        try:
            for i in range(500):
                show({"i": i})
            for _ in range(1000):
                time.sleep(0.01)
        except KeyboardInterrupt:
            print("interrupted")
        return "returned"

    screen = Seen(fail)
    assert shown(worker, talk_and_wait, screen=screen) == "returned"
    seen = [what["i"] for kind, what in screen.parts if kind == "show"]
    assert seen == list(range(1, 1 + len(seen)))
    assert screen.of("stdout") == "interrupted\n"


def test_an_interrupt_that_comes_when_the_answer_is_here_does_not_cost_the_answer(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_words() -> str:
        frames().text(OUT, b"one")
        frames().show({"n": 1})
        frames().text(OUT, b"two")
        return "the answer"

    drain, pressed = worker._shown.drain, [True]

    def interrupted(screen: Any) -> None:
        drain(screen)
        if pressed.pop():
            pressed.append(False)
            raise KeyboardInterrupt

    monkeypatch.setattr(worker._shown, "drain", interrupted)
    assert shown(worker, two_words) == "the answer"
    pressed[:] = [True]
    with pytest.raises(KeyboardInterrupt):
        worker.call(two_words, (), {})


def test_a_second_interrupt_ends_a_worker_that_ignores_the_first(
    worker: LocalWorker, interrupts: Callable[[float], threading.Timer]
) -> None:
    def ignore() -> None:
        while True:
            try:
                time.sleep(30)
            except KeyboardInterrupt:
                continue

    with pytest.raises(KeyboardInterrupt):
        interrupts(0.2)
        interrupts(0.5)
        shown(worker, ignore)
    with pytest.raises(WorkerLost):
        shown(worker, ignore)


def test_when_the_screen_breaks_the_call_is_interrupted_and_its_answer_is_nobodys(
    worker: LocalWorker,
) -> None:
    def refuse(what: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        shown(worker, sleep_through, 30, screen=Seen(refuse))
    began = time.monotonic()
    assert shown(worker, sleep_through, 0.01) == "slept"
    assert time.monotonic() - began < 10


def test_what_the_call_raises_is_raised_here_after_its_output(worker: LocalWorker) -> None:
    def fail() -> None:
        frames()
        print("last words")
        raise LookupError("there")

    screen = Seen()
    with pytest.raises(LookupError, match="there"):
        shown(worker, fail, screen=screen)
    assert screen.of("stdout") == "last words\n"


def test_a_warning_is_seen_inside_without_a_message(worker: LocalWorker) -> None:
    def warned() -> bool:
        from sublet.machine import lease_environment

        process_lease = lease_environment.process_lease()
        assert process_lease is not None
        return process_lease.warned

    assert shown(worker, warned) is False
    worker.warn()
    assert shown(worker, warned) is True
