"""What a script does to files, undone: to any position, after any operations, and after a kill at any call (X4)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging.handlers
import os
import re
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.errors import BadInput, Damaged, NotDurable
from sublet.machine import durable
from sublet.training.scripts import file_history
from sublet.training.scripts.file_history import FileHistory
from sublet.training.scripts.files import events, kept, noting
from sublet.training.scripts.files.journal import ChangeJournal
from tests import crash_states
from tests.conftest import MORE_EXAMPLES, needed
from tests.training.scripts.file_programs import inside, play, programs, tree

_open: list[FileHistory] = []


@pytest.fixture(autouse=True)
def nobody_watches() -> Iterator[None]:
    yield
    for history in _open:
        with contextlib.suppress(OSError):  # cleared
            history.close()
    _open.clear()


@pytest.fixture
def cwd(tmp_path: Path) -> Iterator[Path]:
    """Where a script runs; the history is beside it."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    with inside(folder):
        yield folder


def opened(cwd: Path, **options: Any) -> FileHistory:
    """As the next process does."""
    history = FileHistory(cwd.parent / "history", cwd=cwd, **options)
    _open.append(history)
    return history


def watching(cwd: Path, **options: Any) -> FileHistory:
    history = opened(cwd, **options)
    history.watch()
    return history


# --- any program ---------------------------------------------------------------------------------------------


@given(program=programs(12, 25), data=st.data(), aside=st.sampled_from([5, 1 << 20]))
@settings(max_examples=60 * MORE_EXAMPLES)
def test_any_operations_are_undone(
    tmp_path_factory: pytest.TempPathFactory, program: list[Any], data: st.DataObject, aside: int
) -> None:
    """Positions are taken at random; the tree is what it was at whichever is asked for, to the last mode, time and link."""
    before, operations = program
    cwd = tmp_path_factory.mktemp("any") / "cwd"
    cwd.mkdir()
    with inside(cwd), pytest.MonkeyPatch.context() as patch:
        patch.setattr(noting, "SET_ASIDE_FROM", aside)
        play(cwd, before, lambda _: None)
        history = watching(cwd)
        taken: dict[int, dict[str, Any]] = {}
        places = data.draw(st.sets(st.integers(0, len(operations)), min_size=1, max_size=4))

        def between(number: int) -> None:
            if number in places:
                taken[history.position()] = tree(cwd)

        play(cwd, operations, between)
        wanted = data.draw(st.sampled_from(sorted(taken)))
        assert history.undo(wanted) == []
        assert tree(cwd) == taken[wanted]
        history.close()


def without_links(found: dict[str, Any]) -> dict[str, Any]:
    return {path: what[:4] for path, what in found.items()}


@given(
    program=programs(8, 40, but="link"),
    choices=st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=4),
)
@settings(max_examples=40 * MORE_EXAMPLES)
def test_a_run_that_is_killed_again_and_again(
    tmp_path_factory: pytest.TempPathFactory, program: list[Any], choices: list[tuple[bool, int]]
) -> None:
    """Each process: files as the job found them, its beginning, files as they were at the last save, and on."""
    before, operations = program
    cwd = tmp_path_factory.mktemp("again") / "cwd"
    cwd.mkdir()
    with inside(cwd), pytest.MonkeyPatch.context() as patch:
        patch.setattr(noting, "SET_ASIDE_FROM", 5)
        play(cwd, before, lambda _: None)
        found, saved = tree(cwd), (0, tree(cwd))
        for number, (rewinds, saves) in enumerate(choices):
            history = watching(cwd)
            parts = operations[number :: len(choices)]
            beginning, *steps = (parts[part::4] for part in range(4))
            if rewinds and number:
                assert history.rewind() == []
                assert without_links(tree(cwd)) == without_links(found)
            play(cwd, beginning, lambda _: None)
            if number:
                assert history.undo(saved[0]) == []
                assert tree(cwd) == saved[1]
            for step, operations in enumerate(steps):
                if step <= saves:
                    saved = history.position(), tree(cwd)
                    history.sync()
                    history.forget(saved[0])
                play(cwd, operations, lambda _: None)
        assert history.undo(saved[0]) == []
        assert tree(cwd) == saved[1]
        kept = cwd.parent / "history" / "kept"
        history.clear()
        assert not kept.exists()


# --- what scripts do -----------------------------------------------------------------------------------------


def lines(path: str = "log") -> list[str]:
    return Path(path).read_text().splitlines()


def say(text: str, path: str = "log") -> None:
    with open(path, "a") as f:
        f.write(f"{text}\n")


def records(cwd: Path) -> int:
    return len((cwd.parent / "history" / "journal").read_bytes().splitlines())


def test_a_log_that_is_opened_for_each_line(cwd: Path) -> None:
    history = watching(cwd)
    say("before")
    position = history.position()
    say("1")
    noted = records(cwd)
    for number in range(2, 50):
        say(str(number))
    assert records(cwd) == noted, "its length is noted once"
    assert history.undo(position) == []
    assert lines() == ["before"]


@pytest.mark.parametrize("how", ["rename", "link", "symlink", "chdir"])
def test_a_log_whose_name_comes_to_mean_another_file(cwd: Path, how: str) -> None:
    """That its length was noted says nothing about the other."""
    Path("other").write_text("other\n")
    Path("folder").mkdir()
    Path("folder/log").write_text("in the folder\n")
    say("before")
    before = tree(cwd)
    history = watching(cwd)
    position = history.position()
    say("1")
    if how == "chdir":
        os.chdir("folder")
    else:
        os.remove("log")
        {"rename": os.rename, "link": os.link, "symlink": os.symlink}[how]("other", "log")
    say("2")
    os.chdir(cwd)
    assert history.undo(position) == []
    assert tree(cwd) == before


def test_a_log_that_is_held_open(cwd: Path) -> None:
    history = watching(cwd)
    with open("log", "w") as log, open("appended", "a") as appended:
        for step in range(6):
            for file in (log, appended):
                file.write(f"{step}\n")
                file.flush()
            if step == 3:
                position = history.position()
    assert history.undo(position) == []
    assert lines() == lines("appended") == ["0", "1", "2", "3"]


def test_logs_that_are_rotated(cwd: Path) -> None:
    history = watching(cwd)
    handler = logging.handlers.RotatingFileHandler("log", maxBytes=40, backupCount=3)
    taken = {}
    for step in range(20):
        handler.emit(logging.makeLogRecord({"msg": f"step {step}"}))
        handler.flush()
        if step % 5 == 2:
            taken[history.position()] = tree(cwd)
    handler.close()
    for position in sorted(taken, reverse=True):
        assert history.undo(position) == []
        assert tree(cwd) == taken[position]


def test_a_result_that_is_written_over_is_set_aside_and_not_copied(cwd: Path) -> None:
    Path("model.pt").write_bytes(b"1" * (2 << 20))
    os.chmod("model.pt", 0o640)
    first = os.stat("model.pt").st_ino
    history = watching(cwd)
    position = history.position()
    Path("model.pt").write_bytes(b"2" * 100)
    assert stat.S_IMODE(os.stat("model.pt").st_mode) == 0o640
    kept = list((cwd.parent / "history" / "kept").iterdir())
    assert [path.stat().st_ino for path in kept] == [first]
    assert history.undo(position) == []
    assert Path("model.pt").read_bytes() == b"1" * (2 << 20)
    assert os.stat("model.pt").st_ino == first


@pytest.mark.parametrize("seen_by", ["another name", "an open file", "a lock", "a link"])
def test_a_result_that_somebody_sees_stays_the_same_file(cwd: Path, seen_by: str) -> None:
    """Whoever has it open, or by another name, sees that it is emptied."""
    Path("model.pt").write_bytes(b"1" * (2 << 20))
    path = "model.pt"
    if seen_by == "another name":
        os.link("model.pt", "best.pt")
    if seen_by == "a link":
        os.symlink("model.pt", "latest.pt")
        path = "latest.pt"
    history = watching(cwd)
    position = history.position()
    with open("model.pt", "rb") as file, contextlib.ExitStack() as stack:
        if seen_by == "a lock":
            fcntl.flock(file, fcntl.LOCK_SH)
        if seen_by == "an open file":
            stack.push(file)
        Path(path).write_bytes(b"22")
        if seen_by != "a link":
            assert os.fstat(file.fileno()).st_size == 2
    assert {p.read_bytes() for p in cwd.iterdir()} == {b"22"}
    assert history.undo(position) == []
    assert {p.read_bytes() for p in cwd.iterdir()} == {b"1" * (2 << 20)}
    assert os.path.islink("latest.pt") == (seen_by == "a link")


def test_a_script_that_clears_its_output_first(cwd: Path) -> None:
    """Its beginning runs again at each resume, and finds what it found at first: it would not make the folder twice."""

    def beginning() -> None:
        assert not Path("runs").exists()
        if Path("out").exists():
            shutil.rmtree("out")
        os.mkdir("out")
        os.mkdir("runs")
        with open("out/log", "x") as log:
            log.write("header\n")

    Path("out/old").mkdir(parents=True)
    Path("out/old/result").write_text("of the run before")
    Path("data").write_text("not touched")
    found = tree(cwd)
    history = watching(cwd)
    beginning()
    say("1", "out/log")
    Path("data").chmod(0o600)
    position, saved = history.position(), tree(cwd)
    history.forget(position)
    say("2", "out/log")
    for _ in range(3):
        history = watching(cwd)
        assert history.rewind() == []
        assert tree(cwd) == found
        beginning()
        assert history.undo(position) == []
        assert tree(cwd) == saved
        say("2", "out/log")
    assert lines("out/log") == ["header", "1", "2"]


def test_a_link_that_took_the_place_of_a_folder(cwd: Path) -> None:
    """What was noted of a file in the folder is not done to where the link leads."""
    Path("other").mkdir()
    say("theirs", "other/log")
    history = watching(cwd)
    position, before = history.position(), tree(cwd)
    os.mkdir("folder")
    say("1", "folder/log")
    shutil.rmtree("folder")
    os.symlink("other", "folder")
    assert history.undo(position) == []
    assert tree(cwd) == before


def test_a_memory_map_that_is_written(cwd: Path) -> None:
    numpy = needed("numpy")
    history = watching(cwd)
    values = numpy.memmap("values", mode="w+", shape=(1000,), dtype=numpy.int32)
    taken = {}
    for step in range(1, 6):
        values[step * 7] = step
        if step > 2:
            taken[history.position()] = values.copy()
    del values
    for position in sorted(taken, reverse=True):
        assert history.undo(position) == []
        assert numpy.array_equal(numpy.fromfile("values", numpy.int32), taken[position])


def test_a_database_that_is_opened_for_each_row(cwd: Path) -> None:
    def insert(value: int) -> None:
        with contextlib.closing(sqlite3.connect("results.db")) as database, database:
            database.execute("pragma journal_mode = wal")
            database.execute("create table if not exists results (value)")
            database.execute("insert into results values (?)", (value,))

    history = watching(cwd)
    start = history.position()
    for step in range(5):
        insert(step)
        if step == 2:
            position = history.position()
    assert history.undo(position) == []
    with contextlib.closing(sqlite3.connect("results.db")) as database:
        assert database.execute("select value from results").fetchall() == [(0,), (1,), (2,)]
    assert history.undo(start) == []
    assert os.listdir() == []


@pytest.mark.parametrize("early", [True, False])
def test_libraries_that_write_in_native_code(tmp_path: Path, early: bool) -> None:
    """They are changed when they are imported, or when a history begins to watch."""
    for name in ("torch", "safetensors", "tokenizers"):
        needed(name)
    script = f"""
        import os, sys
        from pathlib import Path
        from sublet.training.scripts.file_history import FileHistory
        history = FileHistory(Path("../history"), cwd=Path.cwd())
        if {early}:
            history.watch()
        import safetensors.torch, tokenizers, torch
        if not {early}:
            history.watch()
        def write(n):
            torch.save({{"a": torch.full((3,), n)}}, "a.pt")
            torch.save({{"a": n}}, "old.pt", _use_new_zipfile_serialization=False)
            torch.jit.script(torch.nn.Linear(n, n)).save("scripted.pt")
            safetensors.torch.save_file({{"a": torch.full((3,), n)}}, filename=Path("a.safetensors"))
            tokenizers.Tokenizer(tokenizers.models.BPE({{f"a{{n}}": 0}}, [])).save("tokenizer.json")
        def tree():
            return {{p.name: p.read_bytes() for p in Path.cwd().iterdir()}}
        start = history.position()
        write(1)
        position, one = history.position(), tree()
        write(2)
        torch.save(1, "new.pt")
        two = tree()
        assert all(two[name] != one[name] for name in one), "each is written"
        assert history.undo(position) == []
        assert tree() == one
        assert history.undo(start) == []
        assert tree() == {{}}
    """
    (tmp_path / "cwd").mkdir()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], cwd=tmp_path / "cwd", check=True
    )


def test_tensorboard(cwd: Path) -> None:
    """Its events are written by a thread, into a file that each process names anew."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    history = watching(cwd)
    writer = SummaryWriter("runs")
    for step in range(10):
        writer.add_scalar("loss", step, step)
        if step == 5:
            writer.flush()
            position, saved = history.position(), tree(cwd)
    writer.close()
    again = watching(cwd)
    with SummaryWriter("runs") as writer:
        writer.add_scalar("loss", 0, 0)
    assert len(os.listdir("runs")) == 2
    assert again.undo(position) == []
    assert tree(cwd) == saved


# --- threads and children ------------------------------------------------------------------------------------


def test_a_thread_that_was_let_through_before_a_position(cwd: Path) -> None:
    """Its change was noted in the position before, and happens in this one."""
    say("before")
    for path, change in {
        "log": lambda: say("late"),
        "emptied": lambda: Path("emptied").write_text("late"),
        "gone": lambda: os.remove("gone"),
        "moved": lambda: os.rename("moved", "there"),
    }.items():
        Path(path).touch()
        Path("emptied").write_text("full")
        before = tree(cwd)
        history = watching(cwd)
        history.position()
        let_through, go_on = threading.Event(), threading.Event()

        def wait(event: str, args: Any, path: Any = path, pair: Any = (let_through, go_on)) -> None:
            if args[:1] == (path,) and threading.current_thread().name == "late" and not pair[0].is_set():
                pair[0].set()
                pair[1].wait(20)

        sys.addaudithook(wait)  # comes after the history's
        thread = threading.Thread(target=change, name="late")
        thread.start()
        assert let_through.wait(20)
        position = history.position()
        go_on.set()
        thread.join()
        assert tree(cwd) != before
        assert history.undo(position) == []
        assert tree(cwd) == before


def test_many_threads(cwd: Path) -> None:
    history = watching(cwd)

    def work(number: int) -> None:
        for step in range(20):
            say(str(step), f"log-{number}")
            Path(f"file-{number}").write_text(str(step))
            os.replace(f"file-{number}", f"file-{number}.done")

    def all_of_them() -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    all_of_them()
    position, before = history.position(), tree(cwd)
    all_of_them()
    assert history.undo(position) == []
    assert tree(cwd) == before


def test_a_child_does_not_write_into_the_journal(cwd: Path) -> None:
    """It has no part in what is undone. What it changes is named."""
    history = watching(cwd)
    say("of the parent")
    position = history.position()
    before = records(cwd)
    pid = os.fork()
    if pid == 0:
        say("of the child")
        Path("/dev/null").write_text("nothing")
        subprocess.run(["true"], check=True)
        os._exit(0)
    os.waitpid(pid, 0)
    assert records(cwd) == before
    assert history.outside == (
        "log, changed by a process that was forked",
        "the program true, by a process that was forked",
    )
    assert history.undo(position) == []


def test_names_that_are_no_text(cwd: Path) -> None:
    odd = os.fsdecode(b"bad \xff \n name")
    say("one", odd)
    history = watching(cwd)
    position, before = history.position(), tree(cwd)
    say("two", odd)
    os.rename(os.fsencode(odd), b"another \xfe")
    assert history.undo(position) == []
    assert tree(cwd) == before


def test_what_is_outside_is_named_once(cwd: Path) -> None:
    history = watching(cwd)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        for _ in range(2):
            with socket.socket() as client:
                client.connect(("127.0.0.1", port))
            subprocess.run(["true"], check=True)
            os.system("exit 0")
    here = f" at {Path(__file__).name}:"
    assert [re.sub(r"\d+$", "", words) for words in history.outside] == [
        f"a connection to 127.0.0.1:{port}{here}", f"the program true{here}", f"the command 'exit 0'{here}"
    ]  # fmt: skip


def test_what_is_left_alone(cwd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    (tmp_path / "store").mkdir()
    (cwd / "__pycache__").mkdir()
    history = watching(cwd, left_alone=[tmp_path / "store"])
    before = records(cwd)
    for folder in (tmp_path / "hub", tmp_path / "store", cwd / "__pycache__", Path("/dev/shm")):
        path = folder / "sublet-test"
        path.write_text("a")
        path.unlink()
    for name in ("PIPE_BUF", "/nowhere/at/all"):
        with contextlib.suppress(OSError):
            open(name).close()
    assert records(cwd) == before
    durable.write_all(
        os.open("of-sublet", os.O_WRONLY | os.O_CREAT), b"by a function of ours, opened by a test"
    )
    assert records(cwd) == before + 1
    ChangeJournal(cwd / "of sublet itself").close()
    assert records(cwd) == before + 1
    assert history.outside == ()


def test_who_is_doing_it(tmp_path: Path) -> None:
    """The innermost frame that is not of the standard library decides."""
    standard, installed = (sysconfig.get_path(name) for name in ("stdlib", "purelib"))
    ours = str(Path(file_history.__file__).parents[2])

    def nested(*files: str) -> bool:
        """Outermost first."""
        call: Any = lambda: events.is_our_own(sys._getframe(1))  # noqa: E731
        for file in reversed(files):
            space = {"call": call}
            exec(compile("def f():\n    return call()", file, "exec"), space)
            call = space["f"]
        return bool(call())

    shim, script, library = (
        f"{ours}/shim.py",
        str(tmp_path / "train.py"),
        f"{installed}/torch/serialization.py",
    )
    pathlib, announcer = f"{standard}/pathlib.py", next(iter(events.SPOKESMEN))
    assert nested(shim, script, f"{ours}/store/regions.py", pathlib)
    assert nested(shim, script, f"{ours}/training/saves.py")
    assert not nested(shim, script)
    assert not nested(shim, script, pathlib)
    assert not nested(shim, script, library, pathlib)
    assert not nested(shim, f"{standard}/runpy.py", library), "a script that was installed as a package"
    assert not nested(shim, script, announcer)
    assert not nested(f"{standard}/threading.py", library), "a thread of a library"


# --- what cannot be undone is said ---------------------------------------------------------------------------


def test_a_file_too_large_to_copy_is_named(cwd: Path) -> None:
    Path("values").write_bytes(b"1" * 1000)
    Path("looked at").write_bytes(b"1" * 1000)
    history = watching(cwd, copy_at_most=500)
    position = history.position()
    with open("looked at", "r+b"):
        pass
    with open("values", "r+b") as values:
        values.write(b"2")
    words = "values, which cannot be put back: its 1,000 bytes are too many to copy each time"
    assert words in history.outside
    assert history.undo(position) == [
        "values: its bytes were written over and could not be kept: its 1,000 bytes are too many to copy each time"
    ]


def test_a_log_that_is_written_over_while_it_is_open_is_named(cwd: Path) -> None:
    """No event says so. The bytes that were there are known by their digest."""
    history = watching(cwd)
    with open("log", "w") as log:
        log.write("one\ntwo\nthree\n" * 1000)
        log.flush()
        position = history.position()
        log.seek(4000)
        log.write("TWO")
    assert history.undo(position) == ["log: its first 14000 bytes were written over while it was open"]


def test_a_log_that_is_cut_is_named(cwd: Path) -> None:
    say("one")
    history = watching(cwd)
    position = history.position()
    with open("log", "a") as log:
        log.truncate(0)
        log.write("six\nseven\n")
    assert history.undo(position) == ["log: its first 4 bytes were written over while it was open"]
    position = history.position()
    with open("log", "a") as log:
        log.truncate(2)
    assert history.undo(position) == ["log: it has lost its last 2 bytes"]


def test_a_folder_with_what_nobody_saw_stays(cwd: Path) -> None:
    history = watching(cwd)
    position = history.position()
    os.mkdir("out")
    subprocess.run(["touch", "out/by another program"], check=True)
    assert history.undo(position) == [
        "out: the folder stays, because it holds by another program, which was not seen to be made"
    ]


def test_a_file_that_another_program_replaced_is_named(cwd: Path) -> None:
    say("one")
    history = watching(cwd)
    position = history.position()
    say("two")
    subprocess.run(["sh", "-c", "echo theirs > new; mv new log"], check=True)
    assert history.undo(position) == ["log: it was removed or replaced, and it was not seen by whom"]
    assert lines() == ["theirs"]


def test_what_cannot_be_noted_is_not_changed(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = watching(cwd)
    say("one")
    position = history.position()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(NotDurable, match="No space left on device; it was not changed"):
            say("two")
        with pytest.raises(NotDurable):
            os.remove("log")
    assert lines() == ["one"]
    say("two")
    history = opened(cwd)
    assert history.undo(position) == []
    assert lines() == ["one"]


# --- the journal ---------------------------------------------------------------------------------------------


def test_a_torn_last_record_is_no_record(cwd: Path) -> None:
    history = watching(cwd)
    say("one")
    position = history.position()
    say("two")
    journal = cwd.parent / "history" / "journal"
    whole = journal.read_bytes()
    for torn in (b"0", b"12345678 [", b"12345678 []\n", b"\0" * 50, whole.splitlines()[-1]):
        journal.write_bytes(whole + torn)
        opened(cwd)
        assert re.fullmatch(
            re.escape(whole) + rb"[0-9a-f]{8} \[\[\"PositionsUpTo\".*\n", journal.read_bytes()
        )
    assert opened(cwd).undo(position) == []
    assert lines() == ["one"]


def test_a_damaged_journal_is_refused(cwd: Path) -> None:
    watching(cwd).position()
    say("one")
    journal = cwd.parent / "history" / "journal"
    data = bytearray(journal.read_bytes())
    data[20] ^= 1
    journal.write_bytes(data)
    with pytest.raises(Damaged, match="damaged at byte 0; nothing was changed"):
        opened(cwd)


def test_what_is_forgotten_is_deleted(cwd: Path) -> None:
    """But for how things were at first. The journal does not grow for ever."""
    history = watching(cwd)
    kept, journal = cwd.parent / "history" / "kept", cwd.parent / "history" / "journal"
    old = history.position()
    for step in range(200):
        Path("new.pt").write_text(f"model {step}")
        os.replace("new.pt", "model.pt")
        history.forget(history.position())
    assert list(kept.iterdir()) == []
    assert journal.stat().st_size < 100_000
    with pytest.raises(BadInput, match="was forgotten"):
        history.undo(old)


def test_what_the_job_found_is_kept_up_to_a_limit(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that clears away what a run before it left wants the room."""
    monkeypatch.setattr(file_history, "REWOUND_AT_MOST", 100)
    for name, size in (("small", 60), ("large", 1000), ("middle", 90)):
        Path(name).write_bytes(b"x" * size)
    history = watching(cwd)
    for name in ("small", "large", "middle"):
        os.remove(name)
    assert history.undo(0) == []
    for name in ("small", "large", "middle"):
        os.remove(name)
    position = history.position()
    history.forget(position)
    assert sum(path.stat().st_size for path in (cwd.parent / "history" / "kept").iterdir()) == 60
    for _ in range(2):
        again = watching(cwd)
        assert sorted(again.rewind()) == [
            f"{name}: it is gone, because it was too large to be kept for so long"
            for name in ("large", "middle")
        ]
        assert os.listdir() == ["small"]
        assert again.undo(position) == []
        assert os.listdir() == []


def test_positions_are_never_given_twice(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was given out before a kill is not the first of the next process: what comes after is after it."""
    monkeypatch.setattr(file_history, "_POSITIONS", 10)
    last = 0
    for _ in range(3):
        history = watching(cwd)
        for _ in range(15):
            position = history.position()
            assert position > last
            last = position
        say("x")
        assert opened(cwd).undo(last) == []
        assert not Path("log").exists()


def test_another_mount_has_a_shelf_of_its_own(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no hard links between mounts. The folder is at the top, where no script lists its results."""
    other = cwd / "volume"
    (other / "results").mkdir(parents=True)
    monkeypatch.setattr(kept, "_mount_points", lambda: ["/", f"{other}/"])
    history = watching(cwd)
    Path(other / "results" / "a").write_text("one")
    position = history.position()
    os.remove(other / "results" / "a")
    [shelf] = other.glob(".sublet-*")
    assert len(list(shelf.iterdir())) == 1
    history = watching(cwd)
    assert history.undo(position) == []
    assert (other / "results" / "a").read_text() == "one"
    history.clear()
    assert not shelf.exists()


def refused(*_: Any, **__: Any) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_without_hard_links_files_are_copied(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noting, "SET_ASIDE_FROM", 1)
    Path("a").write_text("one")
    os.chmod("a", 0o640)
    before = tree(cwd)
    history = watching(cwd)
    position = history.position()
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refused)
        say("two", "a")
        os.remove("a")
        Path("a").write_text("three")
        assert history.undo(position) == []
        assert tree(cwd) == before
        Path("a").write_text("four")
        assert history.undo(position) == []
        assert tree(cwd) == before


def test_everything_is_on_the_disk_before_it_is_needed(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut finds every note, second name and copy of whatever the script had changed by then."""
    monkeypatch.setattr(noting, "SET_ASIDE_FROM", 20)
    monkeypatch.setattr(os, "copy_file_range", refused)  # nor is it recorded
    monkeypatch.setattr(events, "SPOKESMEN", {*events.SPOKESMEN, crash_states.__file__})
    for name in "abcde":
        Path(name).write_text(name * 10)
    Path("large").write_text("x" * 30)
    history = watching(cwd)
    with crash_states.recording(cwd.parent) as log:
        for _ in range(2):
            history.position()
            os.remove("a")
            os.replace("b", "a")
            os.mkdir("b")
            os.rmdir("b")
            for name, flags in (
                ("c", os.O_APPEND),
                ("d", os.O_TRUNC),
                ("e", 0),
                ("large", os.O_TRUNC),
                ("b", os.O_CREAT),
            ):
                fd = os.open(name, os.O_WRONLY | flags)
                os.write(fd, b"and more than twenty bytes")
                os.close(fd)
    log.check_complete()
    ours = log.folders[0]["cwd"]
    of_script = {ours, *log.folders[ours].values()}
    pending: set[int] = set()
    changes = 0
    for op in log.ops:
        if op.node in of_script or op.node in pending_nodes_of(log, ours):
            changes += 1
            assert not pending, op
        elif isinstance(op, crash_states.Sync):
            pending.discard(op.node)
        elif not isinstance(op, crash_states.Names) or any(node is not None for _, node in op.changes):
            pending.add(op.node)  # a name that is gone may come back: nobody asks for it
    assert changes > 20


def pending_nodes_of(log: Any, folder: int) -> set[int]:
    """Everything that ever had a name in the folder."""
    found = set()
    for op in log.ops:
        if isinstance(op, crash_states.Names) and op.node == folder:
            found |= {node for _, node in op.changes if node is not None}
    return found
