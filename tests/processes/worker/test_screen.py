"""Frames over a pipe: what is printed and shown arrives once, whole and in order, whatever happens to either
side.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from sublet.core.errors import BadInput
from sublet.processes.worker import screen
from sublet.processes.worker.screen import ERR, OUT, SHOW, PlainScreen, ScreenPipe, WorkerScreen
from tests.homes import wait_until


class Seen:
    """A screen that remembers. `fail` is called with each piece before it counts."""

    def __init__(self, fail: Callable[[str], None] = lambda what: None) -> None:
        self.parts: list[tuple[str, Any]] = []
        self._fail = fail

    def text(self, stream: str, text: str) -> None:
        self._fail(text)
        self.parts.append((stream, text))

    def show(self, what: Mapping[str, Any]) -> None:
        self._fail("show")
        self.parts.append(("show", dict(what)))

    @property
    def order(self) -> list[tuple[str, Any]]:
        """With text that follows text of the same stream in one."""
        made: list[tuple[str, Any]] = []
        for kind, parts in itertools.groupby(self.parts, key=lambda part: part[0]):
            found = [what for _, what in parts]
            made += [("show", what) for what in found] if kind == "show" else [(kind, "".join(found))]
        return made

    def of(self, stream: str) -> str:
        return "".join(text for kind, text in self.parts if kind == stream)


class Ends:
    """Both ends of one pipe, in this process."""

    def __init__(self) -> None:
        read, self.write_fd = os.pipe2(os.O_CLOEXEC)
        self.frames = WorkerScreen(self.write_fd)
        self.out, self.err = self.frames.stream(OUT), self.frames.stream(ERR)
        self.seen = Seen()
        self.pipe = ScreenPipe(read, self.seen)

    def drained(self) -> Seen:
        self.frames.flush()
        self.pipe.drain(None)
        return self.seen

    @contextlib.contextmanager
    def reading(self, pause: float = 0.0) -> Iterator[None]:
        """Somebody reads all the while."""
        over = threading.Event()

        def read() -> None:
            while not over.is_set():
                self.pipe.relay(None)
                time.sleep(pause or 0.0005)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
            self.frames.flush()
        finally:
            over.set()
            reader.join()
        self.pipe.drain(None)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    # A writer that waits for room is let go before its descriptor is another file's.
    with contextlib.suppress(ValueError, OSError):
        while made.frames._waiting.qsize():
            made.pipe.drain(None)
    os.close(made.pipe.fd)


# --- order and content ---


def test_text_and_displays_appear_in_the_order_they_were_made(ends: Ends) -> None:
    for i in range(50):
        print("out", i, file=ends.out)
        print("err", i, file=ends.err)
        ends.frames.show({"what": "display", "i": i})
    order = ends.drained().order
    assert order == [
        entry
        for i in range(50)
        for entry in (
            ("stdout", f"out {i}\n"),
            ("stderr", f"err {i}\n"),
            ("show", {"what": "display", "i": i}),
        )
    ]


def test_a_line_without_an_end_appears_without_a_flush(ends: Ends) -> None:
    ends.out.write("50 %")

    def arrived() -> bool:
        ends.pipe.relay(None)
        return ends.seen.of("stdout") == "50 %"

    wait_until(arrived)


def test_twenty_thousand_lines_arrive_though_the_reader_is_slower(ends: Ends) -> None:
    with ends.reading(pause=0.003):
        for i in range(20_000):
            print(f"line {i} " + "." * 30, file=ends.out)
    assert ends.seen.of("stdout").splitlines() == [f"line {i} " + "." * 30 for i in range(20_000)]


def test_what_is_not_read_makes_the_one_who_prints_wait_and_not_the_memory_grow(ends: Ends) -> None:
    printed = 0

    def talk() -> None:
        nonlocal printed
        for i in range(20_000):
            print(f"{i:099}", file=ends.out)
            printed = i + 1

    thread = threading.Thread(target=talk)
    thread.start()
    last = -1
    while printed != last:  # until it stands still
        last = printed
        time.sleep(0.1)
    assert last < 10_000
    with ends.reading():
        thread.join()
    assert len(ends.seen.of("stdout")) == 20_000 * 100


@pytest.mark.parametrize(
    "text",
    ["ünï 🎉 " * 20_000, "a\0b\0", "x" * 3 + "\n", "\r 10 %\r 20 %", "bell\a and \x1b[31mred\x1b[0m"],
    ids=["multibyte", "nul", "line", "carriage returns", "controls"],
)
def test_any_text_arrives_as_it_was(ends: Ends, text: str) -> None:
    with ends.reading():
        ends.out.write(text)
    assert ends.seen.order == [("stdout", text)]


def test_a_character_cut_in_two_by_frames_is_one_again_with_a_display_between(ends: Ends) -> None:
    first, second = b"<\xf0\x9f", b"\x8e\x89>"
    ends.out.buffer.write(first)
    ends.frames.show({"n": 1})
    ends.err.buffer.write("é".encode()[:1])
    ends.frames.flush()
    ends.pipe.drain(None)
    ends.out.buffer.write(second)
    ends.err.buffer.write("é".encode()[1:])
    seen = ends.drained()
    assert seen.of("stdout") == "<🎉>"
    assert seen.of("stderr") == "é"


def test_bytes_that_are_no_text_and_text_that_is_none_are_shown_as_well_as_they_can(ends: Ends) -> None:
    ends.out.buffer.write(b"bad \xff byte\n")
    ends.out.buffer.write(memoryview(bytearray(b"view\n")))
    ends.out.write("lone \ud800 surrogate\n")
    assert ends.drained().of("stdout") == "bad � byte\nview\nlone \\ud800 surrogate\n"


def test_one_line_of_64_megabytes_arrives_whole(ends: Ends) -> None:
    line = "0123456789abcdef" * (4 << 20) + "\n"
    with ends.reading():
        assert ends.out.write(line) == len(line)
    assert ends.seen.of("stdout") == line


def test_long_text_is_cut_so_that_no_frame_is_larger_than_its_header_can_say(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "_PIECE", 10)
    frames = screen._framed([(OUT, b"x" * 25), (ERR, b"y"), (ERR, b"z")])
    sizes = []
    while frames:
        kind, size = struct.unpack_from("<BI", frames)
        sizes.append((kind, size))
        frames = frames[5 + size :]
    assert sizes == [(OUT, 10), (OUT, 10), (OUT, 5), (ERR, 2)]


def test_a_display_too_large_for_a_frame_is_refused_and_nothing_is_torn(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert struct.calcsize("<BI") == 5
    assert screen.SHOWN_MOST_BYTES == 2**32 - 1
    monkeypatch.setattr(screen, "SHOWN_MOST_BYTES", 1000)
    ends.out.write("before ")
    with pytest.raises(BadInput, match="too large"):
        ends.frames.show({"data": "x" * 1000})
    ends.out.write("after")
    assert ends.drained().order == [("stdout", "before after")]


def test_a_display_that_contains_itself_is_its_makers_error_and_nothing_is_torn(ends: Ends) -> None:
    ends.out.write("before ")
    ring: dict[str, Any] = {}
    ring["data"] = ring
    with pytest.raises(BadInput, match="contains itself"):
        ends.frames.show(ring)
    ends.out.write("after")
    assert ends.drained().order == [("stdout", "before after")]


@pytest.mark.parametrize(
    "value",
    [
        {"image/png": b"\x89PNG\x00\xff", "text/plain": "x"},
        {"a": {"base64": "no bytes"}},
        {"a": {"base64": ["no", "bytes"]}},
        {"a": {"base64": {"base64": "no bytes"}}, "b": b""},
        {"a": [{"base64": [b"bytes"]}, None, True, 1.5, "ü\ud800"]},
        {"base64": "x", "other": 1},
    ],
)
def test_a_display_arrives_as_it_was_made(ends: Ends, value: dict[str, Any]) -> None:
    ends.frames.show({"what": "display", "data": value})
    assert ends.drained().order == [("show", {"what": "display", "data": value})]
    assert screen.opened_display(screen.packed_display(value)) == value


def test_what_json_has_no_word_for_is_told_in_the_nearest(ends: Ends) -> None:
    import datetime

    import numpy as np

    made = {
        "number": np.int64(3), "real": np.float32(0.5), "yes": np.bool_(True), "array": np.arange(3), "nan": float("nan"),
        "tuple": (1, 2), 7: "key", "day": datetime.date(2020, 1, 2), "bytes": bytearray(b"x"), "lock": threading.Lock(),
    }  # fmt: skip
    found = screen.opened_display(screen.packed_display(made))
    assert found.pop("lock").startswith("<unlocked")
    assert found == {
        "number": 3, "real": 0.5, "yes": True, "array": [0, 1, 2], "nan": None, "tuple": [1, 2], "7": "key",
        "day": "2020-01-02", "bytes": b"x",
    }  # fmt: skip


@pytest.mark.parametrize(
    "bad", [b"{", b"[]", b"\x80\x05.", b'{"a":{"base64":7}}', b'{"a":{"base64":[]}}', b"[" * 100_000]
)
def test_a_display_this_side_cannot_read_is_said_and_the_rest_goes_on(ends: Ends, bad: bytes) -> None:
    os.write(ends.write_fd, struct.pack("<BI", SHOW, len(bad)))
    with ends.reading():
        os.write(ends.write_fd, bad)
        ends.out.write("after")
    assert "cannot be shown here" in ends.seen.of("stderr")
    assert ends.seen.of("stdout") == "after"


@pytest.mark.parametrize(("kind", "length"), [(0, 1), (9, 1), (SHOW, 1001), (OUT, 1001)])
def test_a_frame_that_is_not_ours_or_too_large_is_refused_before_its_bytes_come(
    kind: int, length: int
) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    pipe = ScreenPipe(read, Seen())
    pipe.most_bytes = 1000
    os.write(write, struct.pack("<BI", kind, length))
    with pytest.raises(screen.UnreadableFrame):
        pipe.relay(None)
    os.close(read)
    os.close(write)


def test_the_streams_are_what_programs_expect_of_standard_output(ends: Ends) -> None:
    out = ends.out
    assert (out.encoding, out.writable(), out.readable(), out.isatty()) == ("utf-8", True, False, False)
    assert (out.fileno(), ends.err.fileno(), out.buffer.fileno()) == (1, 2, 1)
    assert out.write("") == 0
    assert out.write("ab") == 2
    out.reconfigure(line_buffering=True)
    out.writelines(["c", "d"])
    with pytest.raises(TypeError, match="must be str, not bytes"):
        out.write(b"no")  # type: ignore[arg-type]
    out.close()
    assert not out.closed
    out.write("e")
    assert ends.drained().of("stdout") == "abcde"


def test_many_threads_printing_beside_displays_tear_nothing(ends: Ends) -> None:
    def talk(who: int) -> None:
        for i in range(300):
            print(f"<{who} {i} {'x' * 200}>", file=ends.out)
            if i % 20 == 0:
                ends.frames.show({"who": who, "i": i, "pad": "y" * 5000})

    with ends.reading():
        threads = [threading.Thread(target=talk, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    shown = [what for kind, what in ends.seen.order if kind == "show"]
    assert sorted((w["who"], w["i"]) for w in shown) == [(n, i) for n in range(4) for i in range(0, 300, 20)]
    text = ends.seen.of("stdout")
    for who in range(4):
        # Pieces of one print may stand apart, as with any stream; none is lost, and each thread's stay in
        # order.
        places = [text.index(f"<{who} {i} ") for i in range(300)]
        assert places == sorted(places)
    assert text.count("x" * 200) == 1200
    assert text.count("\n") == 1200


# --- interrupts ---


@contextlib.contextmanager
def signals_all_the_time(number: int) -> Iterator[None]:
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.0007):
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()


class Alarm(Exception):
    pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGALRM])
def test_a_handler_that_raises_in_the_middle_of_printing_tears_no_frame(ends: Ends, number: int) -> None:
    raises = False

    def ring(*_: Any) -> None:
        nonlocal raises
        if raises:
            raises = False
            raise Alarm

    raised = printed = 0
    before = signal.signal(number, ring)
    try:
        with ends.reading(), signals_all_the_time(number):
            while raised < 60:
                try:
                    raises = True
                    for _ in range(50):
                        ends.out.write(f"<{printed}{'.' * 20_000}>")
                        printed += 1
                        ends.frames.show({"n": printed, "pad": bytes(100_000)})
                    raises = False
                except Alarm:
                    raised += 1
    finally:
        signal.signal(number, before)
    assert raised >= 60
    for kind, what in ends.seen.order:
        if kind == "show":
            assert what["pad"] == bytes(100_000)
        else:
            assert set(what) <= set("<>.0123456789")
            assert all(piece.count(".") == 20_000 for piece in what.split("<")[1:])


def test_a_handler_that_prints_in_the_middle_of_printing_neither_hangs_nor_tears(ends: Ends) -> None:
    rung = written = 0

    def ring(*_: Any) -> None:
        nonlocal rung
        rung += 1
        ends.out.write(f"[{rung}]\n")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with ends.reading(), signals_all_the_time(signal.SIGALRM):
            while rung < 20 or written < 3000:
                ends.out.write("x" * 100 + "\n")
                written += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    text = ends.seen.of("stdout")
    assert all(f"[{n}]\n" in text for n in range(1, rung + 1))
    assert text.count("x") == written * 100


def test_a_finalizer_that_prints_does_not_hang_whichever_thread_it_runs_in(ends: Ends) -> None:
    class Loud:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            for _ in range(3):
                print("gone", file=ends.out)
            ends.frames.flush()

    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        with ends.reading():
            for _ in range(3000):
                Loud()
                ends.out.write("x\n")
            gc.collect()
    finally:
        gc.set_threshold(*before)
    text = ends.seen.of("stdout")
    assert (text.count("gone"), text.count("x")) == (9000, 3000)


class LoudBytes(bytes):
    """Let go of in the thread that writes it."""

    frames: WorkerScreen

    def __del__(self) -> None:
        self.frames.text(OUT, b"gone ")
        self.frames.flush()


def test_the_writer_does_not_wait_for_itself(ends: Ends) -> None:
    LoudBytes.frames = ends.frames
    for _ in range(5):
        ends.frames.text(OUT, LoudBytes(b"x "))
    wait_until(lambda: ends.pipe.relay(None) and ends.seen.of("stdout").count("gone") == 5)


def test_a_writer_that_was_started_twice_is_one(ends: Ends) -> None:
    """As when an interrupt comes in the middle of its start."""
    for _ in range(3):
        ends.frames._start_writer()
    with ends.reading(pause=0.003):
        for n in range(20_000):
            ends.out.write(f"{n} {'x' * 50}\n")
    assert [line.split()[0] for line in ends.seen.of("stdout").splitlines()] == [
        str(n) for n in range(20_000)
    ]


# --- forks ---

FORK = """
import os, sys, threading
sys.path[:0] = sys.argv[2:]
from sublet.processes.worker.screen import WorkerScreen, OUT, ERR
frames = WorkerScreen(int(sys.argv[1]))
sys.stdout = frames.stream(OUT)
os.register_at_fork(after_in_child=frames.after_fork)
stop = threading.Event()
def talk():
    while not stop.is_set():
        frames.show({"pad": "y" * 20_000})
beside = threading.Thread(target=talk)
beside.start()
for n in range(20):
    print(f"<parent {n}", end="")
    pid = os.fork()
    if pid == 0:
        print(f"<child {n}>" + "z" * 10_000)
        frames.show({"data": {"text/plain": f"<shown {n}>"}})
        frames.show({"what": "clear"})
        sys.stdout.flush()
        os._exit(0)
    print(" goes on>")
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
beside.join()
frames.flush()
"""


def test_a_forked_child_neither_tears_frames_nor_repeats_what_waits_in_its_parent(ends: Ends) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", FORK, str(ends.write_fd), *sys.path],
        pass_fds=[ends.write_fd],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    said: list[str] = []
    listener = threading.Thread(target=lambda: said.append(child.stdout.read()))  # type: ignore[union-attr]
    listener.start()
    with ends.reading():
        assert child.wait(30) == 0
        listener.join()
    assert ends.seen.of("stdout") == "".join(f"<parent {n} goes on>\n" for n in range(20))
    assert all(what == {"pad": "y" * 20_000} for kind, what in ends.seen.order if kind == "show")
    assert said[0] == "".join(f"<child {n}>{'z' * 10_000}\n<shown {n}>\n" for n in range(20))


# --- the side that shows ---


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_when_showing_fails_nothing_is_shown_twice_and_the_rest_waits(
    ends: Ends, error: type[BaseException]
) -> None:
    for n in range(10):
        ends.out.write(f"{n} ")
        ends.frames.show({"n": n})
    ends.frames.flush()
    failing = iter([False, True, False, True] + [False] * 50)

    def fail(what: str) -> None:
        if next(failing):
            raise error

    seen = Seen(fail)
    failed = 0
    for _ in range(3):
        try:
            ends.pipe.drain(seen)
        except error:
            failed += 1
    assert failed == 2
    # What failed may or may not have been shown: it is not tried again. All else is there, once, in order.
    expected: list[Any] = [entry for n in range(10) for entry in (("stdout", f"{n} "), ("show", {"n": n}))]
    assert seen.parts == [expected[0], expected[2], *expected[4:]]


def test_what_was_cut_off_by_a_death_is_shown_as_far_as_it_came() -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    seen = Seen()
    pipe = ScreenPipe(read, seen)
    os.write(
        write, struct.pack("<BI", OUT, 5) + b"whole" + struct.pack("<BI", OUT, 500) + "cut of\xf0".encode()
    )
    os.write(write, b"\xc3")
    os.close(write)
    pipe.drain(None)
    assert seen.of("stdout") == "whole"
    pipe.end(None)
    assert seen.of("stdout") == "wholecut ofð�"
    pipe.end(None)
    assert seen.of("stdout") == "wholecut ofð�"
    os.close(read)


def test_text_that_came_in_several_frames_is_shown_in_one_piece() -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    seen = Seen()
    for kind, text in ((OUT, b"a"), (OUT, b"b"), (ERR, b"c"), (OUT, b"d"), (OUT, b"e")):
        os.write(write, struct.pack("<BI", kind, 1) + text)
    ScreenPipe(read, seen).relay(None)
    assert seen.parts == [("stdout", "ab"), ("stderr", "c"), ("stdout", "de")]
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 30])
def test_a_display_that_was_cut_off_is_not_shown(cut: int) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    seen = Seen()
    pipe = ScreenPipe(read, seen)
    data = screen.packed_display({"pad": "x" * 100})
    os.write(write, (struct.pack("<BI", SHOW, len(data)) + data)[:cut])
    os.close(write)
    pipe.end(None)
    assert seen.order == []
    assert not pipe.relay(None)
    os.close(read)


def test_nothing_to_read_is_not_the_end(ends: Ends) -> None:
    assert ends.pipe.relay(None)
    os.close(ends.write_fd)
    assert not ends.pipe.relay(None)


def test_the_writer_outlives_a_reader_that_went_away() -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    frames = WorkerScreen(write)
    os.close(read)
    for _ in range(3):
        frames.text(OUT, b"x" * 100_000)
        frames.show({"n": 1})
    os.close(write)


def test_where_nobody_shows_anything_text_is_printed_and_displays_are_as_plain_as_they_can_be() -> None:
    import io

    out = io.StringIO()
    plain = PlainScreen({"stdout": lambda: out, "stderr": lambda: None})
    plain.text("stdout", "a ")
    plain.text("stderr", "nowhere")
    plain.show({"what": "display", "data": {"text/plain": "<Figure>", "image/png": b""}})
    plain.show({"what": "clear", "wait": True})
    plain.show({"what": "display", "data": {"text/html": "<b>"}})
    assert out.getvalue() == "a <Figure>\n"
