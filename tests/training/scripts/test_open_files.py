"""File objects that go on where they were, in a process that opened them anew: every layer, encoding and end of line."""

# ruff: noqa: SIM115
from __future__ import annotations

import ast
import gzip
import io
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.errors import Stale, Unsavable
from sublet.training.scripts.files import text_state
from sublet.training.scripts.open_files import abandon, describe, put_back, reopened
from tests.conftest import MORE_EXAMPLES


def through(described: dict[str, Any]) -> dict[str, Any]:
    """It is plain data: what can be written down as a literal."""
    read: dict[str, Any] = ast.literal_eval(repr(described))
    return read


def both_ways(file: Any, fresh: Callable[[], Any]) -> list[Any]:
    """Put back into an object that a new process made, and made anew."""
    described = through(describe(file))
    again = fresh()
    put_back(again, described)
    return [again, reopened(described)]


# --- text ----------------------------------------------------------------------------------------------------

ENCODINGS = [
    "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-7", "latin-1", "cp1252", "ascii", "shift_jis", "euc_jp", "iso2022_jp",
    "gb18030", "big5", "hz",
]  # fmt: skip
NEWLINES = [None, "", "\n", "\r", "\r\n"]
texts = st.lists(
    st.sampled_from(["a", "bc", "日本", "é", "\n", "\r", "\r\n", "~", "x" * 20, "末\r", "🙂"]), max_size=60
).map("".join)
reading = st.one_of(
    st.tuples(st.just("next")), st.tuples(st.just("next")), st.tuples(st.just("readline"), st.integers(-1, 9)),
    st.tuples(st.just("read"), st.integers(0, 30)), st.tuples(st.just("tell")), st.tuples(st.just("again")),
    st.tuples(st.just("newlines")), st.tuples(st.just("readlines"), st.integers(1, 30)),
)  # fmt: skip


def read(file: Any, operation: tuple[Any, ...]) -> Any:
    kind, *arguments = operation
    try:
        if kind == "next":
            return next(file, "end")
        if kind == "newlines":
            return file.newlines
        if kind == "again":
            return file.seek(0)
        return getattr(file, kind)(*arguments)
    except (OSError, UnicodeDecodeError) as e:
        return type(e).__name__


@given(
    text=texts,
    encoding=st.sampled_from(ENCODINGS),
    newline=st.sampled_from(NEWLINES),
    errors=st.sampled_from(["strict", "replace", "surrogateescape", "backslashreplace"]),
    chunk=st.sampled_from([1, 2, 3, 7, 16, 8192]),
    buffering=st.sampled_from([-1, 1, 5]),
    mode=st.sampled_from(["r", "r+"]),
    before=st.lists(reading, max_size=12),
    after=st.lists(reading, max_size=12),
)
@settings(max_examples=300 * MORE_EXAMPLES)
def test_a_text_that_is_being_read(
    tmp_path_factory: pytest.TempPathFactory,
    text: str,
    encoding: str,
    newline: str | None,
    errors: str,
    chunk: int,
    buffering: int,
    mode: str,
    before: list[Any],
    after: list[Any],
) -> None:
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_bytes(text.encode(encoding, "ignore"))
    with open(path, mode, buffering, encoding, errors, newline) as file, open(path, mode) as fresh:
        file._CHUNK_SIZE = chunk  # type: ignore[attr-defined]
        for one in before:
            read(file, one)
        again, anew = both_ways(file, lambda: fresh)
        with anew:
            for one in [*after, ("newlines",), ("next",), ("read", -1), ("newlines",), ("tell",)]:
                wanted = read(file, one)
                assert [read(again, one), read(anew, one)] == [wanted, wanted]
                assert (anew.name, anew.mode, anew.encoding, anew.errors) == (
                    file.name, file.mode, file.encoding, file.errors
                )  # fmt: skip


@given(
    pieces=st.lists(texts, min_size=2, max_size=5),
    encoding=st.sampled_from(ENCODINGS),
    newline=st.sampled_from(NEWLINES),
    mode=st.sampled_from(["w", "a", "x", "w+", "a+"]),
    place=st.integers(0, 4),
)
@settings(max_examples=200 * MORE_EXAMPLES)
def test_a_text_that_is_being_written(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[str],
    encoding: str,
    newline: str | None,
    mode: str,
    place: int,
) -> None:
    """What was written by then is there once, and what follows goes on as it would have: no second byte order mark either."""
    folder = tmp_path_factory.mktemp("written")
    names = [str(folder / name) for name in ("plain", "again", "anew")]
    options: dict[str, Any] = {"encoding": encoding, "errors": "replace", "newline": newline}
    files: list[Any] = [open(name, mode, **options) for name in names]
    for number, piece in enumerate(pieces):
        for file in files:
            file.write(piece)
        if number == place:
            described = [through(describe(file)) for file in files[1:]]
            files[2].close()
            # As in a new process: what its beginning wrote into the same object goes nowhere.
            with open(folder / "another", mode) as other:
                other.write("by the beginning")
                put_back(other, described[0])
                files[1].close()
                files[1] = other
                files[2] = reopened(described[1])
                for after in pieces[number + 1 :]:
                    for file in files:
                        file.write(after)
                assert len({file.tell() for file in files}) == 1
                for file in files:
                    file.close()
            break
    for file in files:
        file.close()
    contents = {Path(name).read_bytes() for name in names}
    assert len(contents) == 1


def test_lines_of_a_for_loop(tmp_path: Path) -> None:
    """`tell` is off there, and stays off until the end."""
    path = tmp_path / "lines"
    path.write_text("".join(f"line {n} é\n" for n in range(5000)))
    with open(path) as file:
        for line in file:
            if line == "line 1234 é\n":
                break
        [again, anew] = both_ways(file, lambda: open(path))
        assert iter(again) is again
        for other in (again, anew):
            with pytest.raises(OSError, match="telling position disabled"):
                other.tell()
        rest = list(file)
        assert list(again) == rest
        assert list(anew) == rest
        assert again.tell() == anew.tell() == file.tell()
        again.close()
        anew.close()


def test_where_the_structure_is_another_nothing_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert text_state.is_known()
    monkeypatch.setattr(text_state, "is_known", lambda: False)
    with open(tmp_path / "a", "w") as file, pytest.raises(Unsavable, match="cannot be looked into"):
        describe(file)


# --- bytes ---------------------------------------------------------------------------------------------------

byte_operation = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 9)), st.tuples(st.just("write"), st.binary(max_size=9)),
    st.tuples(st.just("seek"), st.integers(0, 30)), st.tuples(st.just("readline")), st.tuples(st.just("tell")),
)  # fmt: skip


def do(file: Any, operation: tuple[Any, ...]) -> Any:
    kind, *arguments = operation
    try:
        return getattr(file, kind)(*arguments)
    except (OSError, ValueError) as e:
        return type(e).__name__


@given(
    content=st.binary(max_size=30),
    mode=st.sampled_from(["rb", "wb", "ab", "rb+", "wb+", "ab+"]),
    buffering=st.sampled_from([0, -1, 2, 5]),
    before=st.lists(byte_operation, max_size=10),
    after=st.lists(byte_operation, max_size=10),
)
@settings(max_examples=300 * MORE_EXAMPLES)
def test_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    mode: str,
    buffering: int,
    before: list[Any],
    after: list[Any],
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    files: list[Any] = []
    for name in ("plain", "again", "anew"):
        (folder / name).write_bytes(content)
        files.append(open(folder / name, mode, buffering))
    for one in before:
        assert len({do(file, one) for file in files}) == 1
    described = [through(describe(file)) for file in files]
    for file in files[1:]:
        file.close()
    put_back(files[1], described[1])
    files[2] = reopened(described[2])
    assert len({type(file) for file in files}) == 1
    assert len({file.__sizeof__() for file in files}) == 1, "the size of its buffer"
    for one in after:
        assert len({do(file, one) for file in files}) == 1
    for file in files:
        file.close()
    assert len({(folder / name).read_bytes() for name in ("plain", "again", "anew")}) == 1
    assert files[0].mode == files[1].mode == files[2].mode


def test_the_layers_stay_the_same_objects(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w") as file:
        layers = file.buffer, file.buffer.raw
        file.write("written")
        described = describe(file)
        file.write("and more")
        put_back(file, described)
        assert (file.buffer, file.buffer.raw) == layers
        assert file.name == str(tmp_path / "a")
        layers[0].write(b" below")
    assert (tmp_path / "a").read_text() == "written below"


def test_what_the_beginning_buffered_is_dropped(tmp_path: Path) -> None:
    """It was written into a file that is as it was at the step by now."""
    (tmp_path / "a").write_text("header\nline 1\n")
    with open(tmp_path / "a", "a") as file:
        described = describe(file)
    with open(tmp_path / "a", "a") as file:
        file.write("header\n")
        put_back(file, described)
        file.write("line 2\n")
    again = open(tmp_path / "a", "a")
    again.write("dropped")
    abandon(again)
    assert again.closed
    assert (tmp_path / "a").read_text() == "header\nline 1\nline 2\n"


def test_closed_files_are_closed(tmp_path: Path) -> None:
    for options in ({"mode": "w"}, {"mode": "wb"}, {"mode": "wb", "buffering": 0}):
        with open(tmp_path / "a", **options) as file:
            pass
        described = through(describe(file))
        again = open(tmp_path / "b", **options)
        again.write("x" if options["mode"] == "w" else b"x")
        put_back(again, described)
        anew = reopened(described)
        assert (again.closed, anew.closed) == (True, True)
        assert again.name == anew.name == str(tmp_path / "a")
    assert (tmp_path / "b").read_bytes() == b"x", "only what was not buffered"


def test_memory_goes_by_its_content() -> None:
    text, data = io.StringIO("one\r\ntwo\r\n", newline=None), io.BytesIO(b"three")
    assert (text.readline(), data.read(2)) == ("one\n", b"th")
    for file, more in ((text, "é\r\n"), (data, b"abc")):
        everyone: list[Any] = [file, *both_ways(file, type(file))]
        for do_it in (lambda f: f.getvalue(), lambda f: f.read(), lambda f: f.seek(2)):
            first, *others = [do_it(one) for one in everyone]
            assert others == [first, first]
        for one in everyone:
            one.write(more)
        first, *others = [(one.getvalue(), one.tell()) for one in everyone]
        assert others == [first, first]
    text.close()
    assert reopened(describe(text)).closed


def test_standard_streams_are_left_alone() -> None:
    with open(1, "w", closefd=False) as file:
        described = describe(file)
        assert described == {"kind": "standard", "fd": 1, "layer": "text"}
        put_back(file, described)
        assert reopened(described) is sys.__stdout__


def test_devnull(tmp_path: Path) -> None:
    with open(os.devnull, "w") as file:
        file.write("x")
        with open(os.devnull, "w") as again:
            put_back(again, describe(file))
            again.write("y")


def test_what_cannot_go_on_is_refused_in_words(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with open(reader) as pipe, open(writer, "w"), pytest.raises(Unsavable, match="is a pipe"):
        describe(pipe)
    left, right = socket.socketpair()
    with left, right, left.makefile() as of_socket, pytest.raises(Unsavable, match="SocketIO"):
        describe(of_socket)
    with open(tmp_path / "gone", "w") as gone:
        os.remove(tmp_path / "gone")
        with pytest.raises(Unsavable, match=r"gone is open, but was removed"):
            describe(gone)
    with tempfile.TemporaryFile() as nameless, pytest.raises(Unsavable, match="removed"):
        describe(nameless)
    with gzip.open(tmp_path / "a.gz", "wt") as packed, pytest.raises(Unsavable, match=r"gzip\.GzipFile"):
        describe(packed)
    control, terminal = os.openpty()
    with open(control, "rb", 0), open(terminal, "w") as tty, pytest.raises(Unsavable, match="is a terminal"):
        describe(tty)
    with open(tmp_path / "a", "w") as file:
        with open(file.fileno(), "w", closefd=False) as second, pytest.raises(Unsavable, match="closefd"):
            describe(second)
        file.labels = {"of": "its own"}  # type: ignore[attr-defined]
        with pytest.raises(Unsavable, match="attribute labels"):
            describe(file)
    file = open(tmp_path / "a")
    with file.detach(), pytest.raises(Unsavable, match="detached"):
        describe(file)


def test_a_file_that_was_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("one\ntwo\n")
    with open(path) as file, open(path) as fresh:
        next(file)
        described = describe(file)
        path.write_text("six\ntwo\n")
        with pytest.raises(Stale, match="was changed since"):
            put_back(fresh, described)
        path.unlink()
        with pytest.raises(Stale, match="No such file"):
            put_back(fresh, described)


def test_another_mode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    with open(tmp_path / "a", "rb") as file, open(tmp_path / "a", "r+b") as other:
        with pytest.raises(Unsavable, match=r"is open in mode rb\+ now, and was in mode rb"):
            put_back(other, describe(file))
        assert other.read() == b"a"


def test_a_file_that_was_renamed_is_found_under_its_new_name(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as file:
        file.write("one\n")
        os.rename(tmp_path / "log", tmp_path / "log.1")
        again, anew = both_ways(file, lambda: open(tmp_path / "log", "w"))
        assert again.name == anew.name == str(tmp_path / "log")
        again.write("two\n")
        again.close()
        abandon(anew)
    assert (tmp_path / "log.1").read_text() == "one\ntwo\n"
