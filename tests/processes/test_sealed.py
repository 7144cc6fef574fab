"""Sealed calls: bytes in and bytes out, and nothing a worker says is opened or believed where it was called
from.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sublet.core.errors import BadInput, WorkerLost
from sublet.core.studio.frames import TEXT_MOST_BYTES
from sublet.ports.worker import Part
from sublet.processes.channel.pickling import pack, unpack
from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.main_module import Shipped
from sublet.processes.worker.screen import SealedScreen
from sublet.processes.worker.worker import Failure
from tests.homes import process_is_gone, wait_until
from tests.processes.conftest import PRELOAD, REPOSITORY, now_us
from tests.processes.shown_targets import ask as ask_two

HERE = "tests.processes.sealed_targets"
CODE = "sublet.processes.worker.sealed_calls:code"
PICKLED = "sublet.processes.worker.sealed_calls:pickled"

Answer = Callable[[Mapping[str, Any], Sequence[memoryview]], tuple[bool, Sequence[Part]]]


def echoed(head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
    return True, [json.dumps(dict(head)).encode(), *parts]


class Heard:
    """A sink that remembers."""

    def __init__(self, answer: Answer = echoed, on_text: Callable[[str], None] = lambda text: None) -> None:
        self.parts: list[tuple[str, Any]] = []
        self.interrupted = False
        self._answer, self._on_text = answer, on_text

    def text(self, stream: str, text: str) -> None:
        self.parts.append((stream, text))
        self._on_text(text)

    def show(self, display: bytes) -> None:
        assert type(display) is bytes
        self.parts.append(("show", display))

    def ask(self, head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        self.parts.append(("ask", dict(head)))
        return self._answer(head, parts)

    def of(self, kind: str) -> str:
        return "".join(text for found, text in self.parts if found == kind)

    @property
    def shown(self) -> list[Any]:
        return [json.loads(what) for kind, what in self.parts if kind == "show"]


def call(worker: LocalWorker, name: str, *parts: Part, sink: Heard | None = None) -> tuple[bool, list[bytes]]:
    fine, found = worker.call_sealed(f"{HERE}:{name}", parts, sink or Heard())
    return fine, [bytes(part) for part in found]


def run(
    worker: LocalWorker, source: str, *, name: str = "", sink: Heard | None = None
) -> tuple[bool, dict[str, Any]]:
    order = json.dumps({"code": textwrap.dedent(source), "name": name}).encode()
    fine, (answer,) = worker.call_sealed(CODE, [order], sink or Heard())
    return fine, json.loads(bytes(answer))


def shipped(
    worker: LocalWorker,
    function: Callable[..., Any],
    *args: Any,
    sink: Heard | None = None,
    by: Shipped | None = None,
) -> tuple[bool, Any]:
    """As a client elsewhere does it."""
    by = by or Shipped()
    parcel = by.parcel(function, (args, {}))
    fine, parts = worker.call_sealed(PICKLED, parcel.packed, sink or Heard())
    value = unpack(parts)
    if fine or value.begun:
        by.took(parcel)
    return fine, value


# --- when something dies ---


def test_a_worker_killed_in_the_middle_is_lost_and_its_last_words_are_heard(worker: LocalWorker) -> None:
    sink = Heard()
    with pytest.raises(WorkerLost, match="signal 9") as lost:
        call(worker, "die", sink=sink)
    assert lost.value.begun
    assert sink.of("stdout") == "last words\n"
    with pytest.raises(WorkerLost) as lost:
        call(worker, "echo")
    assert not lost.value.begun


def test_a_supervisor_killed_in_the_middle_takes_the_worker_along(worker: LocalWorker) -> None:
    sink = Heard(on_text=lambda text: os.kill(worker.holder.pid, signal.SIGKILL))
    with pytest.raises(WorkerLost):
        call(worker, "sleep", sink=sink)
    wait_until(lambda: process_is_gone(worker.worker_pid))


def test_a_caller_killed_in_the_middle_leaves_no_worker(
    folder: Path, workers: object, tmp_path: Path
) -> None:
    told = tmp_path / "pid"
    script = f"""
        import sys, time
        from pathlib import Path
        from sublet.processes.worker.workers import LocalWorkers
        from tests.processes.conftest import moved_in
        from tests.processes.test_sealed import Heard
        worker = moved_in(LocalWorkers(Path({str(folder)!r}), "here", {PRELOAD!r}))
        print(worker.worker_pid, flush=True)
        worker.call_sealed("{HERE}:write_all_and_wait", [{str(told)!r}.encode()], Heard())
    """
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"},
    )
    assert caller.stdout is not None
    pid = int(caller.stdout.readline())
    wait_until(told.exists, 20)
    caller.kill()
    caller.wait()
    wait_until(lambda: process_is_gone(pid))


def test_the_lease_running_out_ends_a_sealed_call(worker: LocalWorker) -> None:
    worker.arm(now_us() + 100_000, now_us() + 300_000)
    with pytest.raises(WorkerLost, match="ran out"):
        call(worker, "sleep")


def test_a_worker_killed_while_its_question_is_answered_is_lost(worker: LocalWorker) -> None:
    def answer(head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        os.kill(worker.worker_pid, signal.SIGKILL)
        time.sleep(0.1)
        return True, [bytes(1_000_000)]

    with pytest.raises(WorkerLost):
        call(worker, "ask", b"?", sink=Heard(answer))


# --- bytes ---


@pytest.mark.parametrize(
    "sizes", [(), (0,), (1,), (61_440,), (61_439, 2), (0, 5_000_000, 0, 3), (100,) * 4095]
)
def test_parts_come_back_as_they_went(worker: LocalWorker, sizes: tuple[int, ...]) -> None:
    parts = [os.urandom(size) for size in sizes]
    for _ in range(2):
        assert call(worker, "echo", *parts) == (True, parts)


def test_no_parts_are_an_answer_too(worker: LocalWorker) -> None:
    assert call(worker, "nothing", b"x") == (True, [])


def test_everything_printed_by_python_and_by_c_goes_to_the_sink(
    worker: LocalWorker, capfd: pytest.CaptureFixture[str]
) -> None:
    sink = Heard()
    run(worker, "1")
    assert call(worker, "talk", sink=sink) == (True, [b"said"])
    # By two pipes: each in its own order.
    assert sorted(sink.of("stdout")) == sorted("out\nfrom C\n")
    assert sorted(sink.of("stderr")) == sorted("err\nraw �\n")
    assert capfd.readouterr() == ("", "")


def test_one_that_floods_its_output_is_answered_all_the_same(worker: LocalWorker) -> None:
    sink = Heard()
    assert call(worker, "flood", bytes(3_000_000), sink=sink) == (True, [b"over"])
    assert set(sink.of("stdout")) == {"x"}
    # Large parts are sent while the last one's thread still fills the pipe.
    assert call(worker, "echo", bytes(3_000_000))[0]


def test_much_text_at_once_comes_in_pieces_that_fit_a_frame(worker: LocalWorker) -> None:
    sink = Heard()
    text = "ü€😀" * 2_000_000
    assert run(worker, f"print({text[:3]!r} * 2_000_000, end='')", sink=sink)[0]
    assert sink.of("stdout") == text
    assert max(len(part.encode()) for _, part in sink.parts) <= TEXT_MOST_BYTES


def test_text_is_cut_for_frames_however_much_comes_at_once() -> None:
    sink = Heard()
    SealedScreen(sink).text("stdout", "😀" * 3_000_000)
    assert sink.of("stdout") == "😀" * 3_000_000
    assert max(len(part.encode()) for _, part in sink.parts) <= TEXT_MOST_BYTES


def test_what_it_raises_is_told_in_json(worker: LocalWorker) -> None:
    fine, (told,) = call(worker, "fail")
    found = json.loads(told)
    assert (fine, found["kind"], found["text"]) == (False, "LookupError", "there")
    assert "in fail" in found["trace"]
    assert "processes/worker/worker.py" not in found["trace"]
    fine, (told,) = call(worker, "wrong")
    assert (fine, json.loads(told)["kind"]) == (False, "TypeError")
    fine, (told,) = call(worker, "not_there")
    assert (fine, json.loads(told)["kind"]) == (False, "AttributeError")
    assert call(worker, "echo", b"next") == (True, [b"next"])


def test_too_many_parts_are_the_callers_error_and_the_worker_is_well(worker: LocalWorker) -> None:
    with pytest.raises(BadInput, match="parts"):
        call(worker, "echo", *[b""] * 5000)
    assert call(worker, "echo", b"next") == (True, [b"next"])


# --- questions ---


def test_a_sealed_call_asks_in_bytes_as_often_as_it_likes(worker: LocalWorker) -> None:
    large = bytes(range(256)) * 4000
    sink = Heard()
    run(worker, "1")
    fine, answers = call(worker, "ask", b"one", large, sink=sink)
    assert fine
    assert answers == [
        b"yes", b'{"ask": "echo", "n": 3}', b"one",
        b"yes", json.dumps({"ask": "echo", "n": len(large)}).encode(), large,
    ]  # fmt: skip
    assert sink.parts[0] == ("stdout", "before one\n")
    assert [kind for kind, _ in sink.parts].index("ask") == 1


def test_what_was_printed_before_a_question_is_heard_before_it(worker: LocalWorker) -> None:
    run(worker, "1")
    sink = Heard()
    call(worker, "ask", *[b"x"] * 300, sink=sink)
    assert [kind for kind, _ in sink.parts] == ["stdout", "ask"] * 300


def test_what_waits_in_a_stream_of_the_users_own_is_heard_before_the_question(worker: LocalWorker) -> None:
    source = """
        import sys
        from sublet.processes.worker import worker
        sys.stdout = open(1, "w", closefd=False)
        print("before")
        worker.ask_sealed({"ask": "echo"}, [])
    """
    sink = Heard()
    run(worker, source, sink=sink)
    assert [kind for kind, _ in sink.parts][:2] == ["stdout", "ask"]


def test_a_question_may_be_refused_with_words(worker: LocalWorker) -> None:
    assert call(worker, "ask", b"x", sink=Heard(lambda head, parts: (False, [b"why"]))) == (
        True,
        [b"no", b"why"],
    )


def test_when_answering_fails_the_error_is_the_callers_and_the_next_call_is_served(
    worker: LocalWorker,
) -> None:
    def fail(head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            call(worker, "ask", b"x", sink=Heard(fail))
        assert call(worker, "echo", b"next") == (True, [b"next"])


def test_who_answers_cannot_call_the_worker_that_waits_for_him(worker: LocalWorker) -> None:
    def answer(head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        call(worker, "echo")
        return True, []

    with pytest.raises(BadInput, match="in the middle"):
        call(worker, "ask", b"x", sink=Heard(answer))


def test_a_sink_that_breaks_interrupts_the_call_and_its_answer_is_nobodys(worker: LocalWorker) -> None:
    def refuse(text: str) -> None:
        raise BrokenPipeError

    for _ in range(3):
        with pytest.raises(BrokenPipeError):
            call(worker, "sleep", sink=Heard(on_text=refuse))
        assert call(worker, "echo", b"next") == (True, [b"next"])


def test_sealed_and_ordinary_calls_may_take_turns(worker: LocalWorker) -> None:
    big = os.urandom(3_000_000)
    for _ in range(3):
        assert worker.call(len, (big,), {}) == len(big)
        assert call(worker, "echo", big) == (True, [big])
        assert worker.call_shown(ask_two, (1,), _Quiet(), lambda asked: asked) == [1]


class _Quiet:
    def text(self, stream: str, text: str) -> None: ...

    def show(self, what: Mapping[str, Any]) -> None: ...


# --- interrupts ---


def test_an_interrupt_from_another_thread_reaches_the_call_and_only_that(worker: LocalWorker) -> None:
    worker.interrupt()  # nothing runs
    assert call(worker, "echo", b"1") == (True, [b"1"])
    for _ in range(5):
        sink = Heard(on_text=lambda text: threading.Thread(target=worker.interrupt).start())
        assert call(worker, "sleep", sink=sink) == (True, [b"interrupted"])
        assert call(worker, "echo", b"next") == (True, [b"next"])


@pytest.mark.parametrize("kind", ["sealed", "ordinary"])
def test_an_interrupt_is_not_lost_on_a_worker_that_has_not_read_the_call_yet(
    worker: LocalWorker, kind: str
) -> None:
    """To one that has no call in hand, the signal means nothing."""
    pid = worker.worker_pid
    os.kill(pid, signal.SIGSTOP)
    interrupts = threading.Timer(0.2, worker.interrupt)
    wakes = threading.Timer(0.6, os.kill, (pid, signal.SIGCONT))
    for timer in (interrupts, wakes):
        timer.start()
    if kind == "sealed":
        fine, told = run(worker, "import time\ntime.sleep(60)")
        assert (fine, told["kind"]) == (False, "KeyboardInterrupt")
    else:
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            worker.call(time.sleep, (60,), {})
        assert time.monotonic() - begun < 50, "it was only told when the call was over"
    assert call(worker, "echo", b"next") == (True, [b"next"])


def test_a_call_that_was_interrupted_before_it_began_stops_where_it_begins(worker: LocalWorker) -> None:
    sink = Heard()
    sink.interrupted = True
    slow = worker.holder.pid  # the supervisor, which would send a signal
    os.kill(slow, signal.SIGSTOP)
    wakes = threading.Timer(0.4, os.kill, (slow, signal.SIGCONT))
    wakes.start()
    fine, told = run(worker, "began = True\nimport time\ntime.sleep(60)", sink=sink)
    assert (fine, told["kind"]) == (False, "KeyboardInterrupt")
    wakes.join()
    assert run(worker, "assert 'began' not in globals()") == (True, {"launches": 0}), "some of it had run"


def test_interrupts_at_any_moment_are_never_the_next_calls(worker: LocalWorker) -> None:
    run(worker, "import time")
    for n in range(15):
        timer = threading.Timer(0.02 + n / 2000, worker.interrupt)
        timer.start()
        fine, told = run(worker, "for _ in range(25): time.sleep(0.001)")
        assert fine or told["kind"] == "KeyboardInterrupt"
        timer.join()
        assert run(worker, "for _ in range(20): time.sleep(0.001)")[0]


def test_an_interrupt_meant_for_a_call_that_is_over_is_forgotten(worker: LocalWorker) -> None:
    run(worker, "import time")
    for _ in range(60):
        os.eventfd_write(worker._woken, 1)  # it came just as the last one returned
        assert run(worker, "for _ in range(5): time.sleep(0.001)")[0]


def test_an_interrupt_that_is_sent_late_is_waited_for(worker: LocalWorker) -> None:
    """The supervisor sends it; one that is slow must not send it into the next call."""

    def interrupt(text: str) -> None:
        os.kill(worker.holder.pid, signal.SIGSTOP)
        worker.interrupt()
        threading.Timer(0.6, os.kill, (worker.holder.pid, signal.SIGCONT)).start()

    run(worker, "import time")
    run(worker, "print('began')\ntime.sleep(0.3)", sink=Heard(on_text=interrupt))
    assert run(worker, "for _ in range(80): time.sleep(0.01)")[0]


def test_an_ordinary_call_is_interrupted_from_another_thread_too(worker: LocalWorker) -> None:
    threading.Timer(0.3, worker.interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        worker.call(time.sleep, (30,), {})
    assert call(worker, "echo", b"next") == (True, [b"next"])


def test_ctrl_c_here_interrupts_there_and_the_second_ends_the_worker(worker: LocalWorker) -> None:
    sink = Heard(on_text=lambda text: os.kill(os.getpid(), signal.SIGINT))
    assert call(worker, "sleep", sink=sink) == (True, [b"interrupted"])
    ignore = """
        import time
        print("began")
        while True:
            try:
                time.sleep(30)
            except KeyboardInterrupt:
                print("again")
    """
    with pytest.raises(KeyboardInterrupt):
        run(worker, ignore, sink=Heard(on_text=lambda text: os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(WorkerLost):
        call(worker, "echo")


# --- source ---


def test_source_runs_in_one_namespace_and_its_last_expression_is_shown(worker: LocalWorker) -> None:
    sink = Heard()
    assert run(worker, "x = 20\ndef double(n):\n    return 2 * n", sink=sink) == (True, {"launches": 0})
    assert sink.parts == []
    assert run(worker, "print('first')\ndouble(x) + 2", sink=sink)[0]
    assert sink.parts[0] == ("stdout", "first\n")
    assert sink.shown == [{"what": "result", "data": {"text/plain": "42"}, "metadata": {}}]
    assert run(worker, "assert _ == 42\nassert __name__ == '__main__'\nNone")[0]
    run(worker, "x;", sink=sink)
    run(worker, "", sink=sink)
    run(worker, "# nothing", sink=sink)
    assert len(sink.shown) == 1


def test_what_is_printed_and_shown_stays_in_order(worker: LocalWorker) -> None:
    sink = Heard()
    assert run(
        worker,
        "import sys\nfor i in range(3000): print(i)\nprint('e', file=sys.stderr)\n'the end'",
        sink=sink,
    )[0]
    assert sink.of("stdout") == "".join(f"{i}\n" for i in range(3000))
    assert [kind for kind, _ in sink.parts][-2:] == ["stderr", "show"]


def test_functions_defined_by_source_can_be_pickled_and_used_by_processes(worker: LocalWorker) -> None:
    assert run(worker, "import pickle\nclass A: pass\nassert type(pickle.loads(pickle.dumps(A()))) is A")[0]


def test_a_traceback_shows_the_lines_of_the_source_and_none_of_ours(worker: LocalWorker) -> None:
    run(worker, "def inner(n):\n    return 1 / n  # the line", name="first")
    fine, told = run(worker, "y = 1\ninner(0)", name="cell")
    assert (fine, told["kind"], told["text"]) == (False, "ZeroDivisionError", "division by zero")
    lines = told["trace"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "<cell " in lines[1]
    assert "line 2, in <module>" in lines[1]
    assert lines[2].strip() == "inner(0)"
    assert "return 1 / n  # the line" in told["trace"]
    assert "sublet" not in told["trace"]


def test_a_syntax_error_shows_where_and_nothing_of_who_compiled_it(worker: LocalWorker) -> None:
    fine, told = run(worker, "x = 1\nif x ==:\n    pass", name="cell")
    assert (fine, told["kind"]) == (False, "SyntaxError")
    assert "line 2" in told["trace"]
    assert "if x ==:" in told["trace"]
    assert "sublet" not in told["trace"]
    assert "ast.py" not in told["trace"]
    assert run(worker, "x\0y")[1]["kind"] in ("ValueError", "SyntaxError")
    assert run(worker, "return 1")[1]["kind"] == "SyntaxError"
    assert run(worker, "(" * 5000)[1]["kind"] in ("MemoryError", "RecursionError", "SyntaxError")


@pytest.mark.parametrize("leave", ["raise SystemExit(3)", "import sys; sys.exit('bye')", "exit()"])
def test_the_end_of_the_code_is_not_the_end_of_the_worker(worker: LocalWorker, leave: str) -> None:
    run(worker, "kept = 1")
    if leave != "exit()":
        assert run(worker, leave)[1]["kind"] == "SystemExit"
    else:
        assert run(worker, leave)[0] is False
    assert run(worker, "assert kept == 1")[0]


def test_a_child_that_the_source_forks_answers_nothing(worker: LocalWorker) -> None:
    sink = Heard()
    fine, _ = run(
        worker,
        "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('here' if pid else 'child')",
        sink=sink,
    )
    assert fine
    assert sorted(sink.of("stdout").split()) == ["child", "here"]
    fine, _ = run(
        worker, "pid = os.fork()\nif not pid: raise ValueError\nprint(os.waitpid(pid, 0)[1] >> 8)", sink=sink
    )
    assert fine
    assert sink.of("stdout").split()[-1] == "1"


def test_launches_are_counted_for_source_and_for_every_call(worker: LocalWorker) -> None:
    count = "from sublet.machine import lease_environment\nfor _ in range(5): lease_environment.launched()"
    assert run(worker, count) == (True, {"launches": 5})
    assert worker.launches == 5
    fine, told = run(worker, count + "\n1/0")
    assert (fine, told["launches"], worker.launches) == (False, 5, 10)


def test_a_result_shows_itself_as_it_can(worker: LocalWorker) -> None:
    sink = Heard()
    run(
        worker,
        """
        class Page:
            def __repr__(self): return "a page"
            def _repr_html_(self): return "<b>a page</b>"
            def _repr_png_(self): return b"\\x89PNG"
            def _repr_svg_(self): raise ValueError
        Page()
        """,
        sink=sink,
    )
    assert sink.shown[0]["data"] == {
        "text/plain": "a page", "text/html": "<b>a page</b>", "image/png": {"base64": "iVBORw=="}
    }  # fmt: skip
    run(worker, "'x' * 3_000_000", sink=sink)
    assert len(sink.shown[1]["data"]["text/plain"]) < 1_100_000
    fine, told = run(worker, "class Bad:\n    def __repr__(self): raise LookupError('no')\nBad()")
    assert (fine, told["kind"]) == (False, "LookupError")


# --- functions, as pickles ---


def test_a_function_travels_as_a_pickle_and_so_does_its_result(worker: LocalWorker) -> None:
    by = Shipped()
    big = os.urandom(2_000_000)

    def twice(data: bytes) -> tuple[int, bytes]:
        print("inside")
        return os.getpid(), data + data

    for _ in range(3):
        sink = Heard()
        fine, (pid, data) = shipped(worker, twice, big, sink=sink, by=by)
        assert (fine, data == big + big, sink.of("stdout")) == (True, True, "inside\n")
        assert pid != os.getpid()


def test_what_it_raises_is_a_packed_failure(worker: LocalWorker) -> None:
    def fail() -> None:
        raise LookupError("there")

    fine, failure = shipped(worker, fail)
    assert isinstance(failure, Failure)
    assert (fine, failure.kind, failure.begun) == (False, "LookupError", True)


def test_one_that_cannot_be_unpacked_there_did_not_begin(worker: LocalWorker) -> None:
    fine, parts = worker.call_sealed(PICKLED, pack((1, [(1, b"no pickle")], False, ((), {}))), Heard())
    assert not fine
    assert unpack(parts).begun is False


def test_two_clients_of_one_worker_do_not_take_each_others_functions(worker: LocalWorker) -> None:
    first, second = Shipped(), Shipped()
    one = lambda: "one"  # noqa: E731
    two = lambda: "two"  # noqa: E731
    for _ in range(3):
        assert shipped(worker, one, by=first) == (True, "one")
        assert shipped(worker, two, by=second) == (True, "two")


def test_a_function_may_ask_who_called_it_in_its_middle(worker: LocalWorker) -> None:
    def answer(head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        assert head == {"ask": "pickled"}
        question = unpack(parts)  # the client's side
        return (True, pack((question, question))) if question != "no" else (False, [])

    assert shipped(worker, ask_two, 1, "x" * 200_000, sink=Heard(answer))[1] == [(1, 1), ("x" * 200_000,) * 2]
    fine, failure = shipped(worker, ask_two, "no", sink=Heard(answer))
    assert (fine, failure.kind) == (False, "KeyboardInterrupt")


# --- what a hostile worker may say ---


def test_nothing_a_worker_sends_is_ever_unpickled_here(worker: LocalWorker, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for more in ((), (b"raw",), (b"raw", b"raise")):
        sink = Heard()
        call(worker, "bombs", str(canary).encode(), *more, sink=sink)
        assert [kind for kind, _ in sink.parts].count("show") == 2
        worker.call_sealed("json:loads", [b"{}"], Heard())
    from tests.processes.sealed_targets import Bomb

    fine, parts = worker.call_sealed(PICKLED, Shipped().parcel(Bomb, ((str(canary),), {})).packed, Heard())
    assert fine
    assert not canary.exists()
    unpack(parts)  # it is one: a client who opens it has only itself to blame
    assert canary.exists()
