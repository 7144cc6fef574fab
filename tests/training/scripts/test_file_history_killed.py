"""kill -9 between any two calls that change a file, of the script, of the history's notes, and of an undo: what is undone after it is exact.

Each process is forked, and dies before its n-th call that changes something, or in the middle of it where it writes. A second way
is strace, which kills at a system call of the kernel: a spread sample here, all of them with `SUBLET_KILLS=all`.
"""

# ruff: noqa: SIM115
from __future__ import annotations

import logging.handlers
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.training.scripts.file_history import FileHistory
from sublet.training.scripts.files import noting
from sublet.training.scripts.open_files import abandon, describe, put_back, reopened
from tests.conftest import MORE_EXAMPLES
from tests.traced import Programs, places_of
from tests.training.scripts.file_programs import WRITES, inside, play, programs, tree

CHANGING = {
    "os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate", "os.chmod", "os.utime",
}  # fmt: skip
SILENT = ("write", "pwrite", "fsync", "fdatasync", "copy_file_range")
KILLS = os.environ.get("SUBLET_KILLS", "6")


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    return {path: what[:3] for path, what in found.items()}


class Killer:
    """In a child: dies at its n-th call. Events come before their deed; what raises no event is wrapped."""

    def __init__(self, nth: int) -> None:
        self._left = nth
        sys.addaudithook(self._heard)
        for name in SILENT:
            setattr(os, name, self._wrapped(getattr(os, name)))

    def _heard(self, event: str, args: Any) -> None:
        if event in CHANGING or (event == "open" and isinstance(args[2], int) and args[2] & WRITES):
            self._count()

    def _count(self, first: Callable[[], Any] = lambda: None) -> None:
        self._left -= 1
        if self._left == 0:
            first()
            os.kill(os.getpid(), signal.SIGKILL)

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            half = real.__name__ in ("write", "pwrite")
            self._count(lambda: half and real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:]))
            return real(*args)

        return call


def in_a_child(work: Callable[[Callable[[Any], None]], None]) -> tuple[list[Any], int]:
    """What it told, and how it ended."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(out)
            with open(into, "wb", buffering=0) as pipe:
                work(lambda what: _tell(pipe, what))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(into)
    told = []
    with open(out, "rb") as pipe:
        while len(head := pipe.read(4)) == 4:
            told.append(pickle.loads(pipe.read(struct.unpack("<I", head)[0])))
    return told, os.waitpid(pid, 0)[1]


_write = os.write


def _tell(pipe: Any, what: Any) -> None:
    data = pickle.dumps(what)
    _write(pipe.fileno(), struct.pack("<I", len(data)) + data)


def a_run(cwd: Path, operations: list[Any], places: set[int], tell: Callable[[Any], None]) -> None:
    history = FileHistory(cwd.parent / "history", cwd=cwd)
    history.watch()

    def between(number: int) -> None:
        if number in places:
            position = history.position()
            tell((position, tree(cwd)))
            if number % 3 == 2:
                history.forget(position)
                tell("forgotten")

    play(cwd, operations, between)


def an_undo(cwd: Path, position: int, rewinds: bool, tell: Callable[[Any], None]) -> None:
    history = FileHistory(cwd.parent / "history", cwd=cwd)
    history.watch()
    if rewinds:
        history.rewind()
        Path("made by the beginning").write_text("again")
    tell(history.undo(position))


def still_possible(told: list[Any]) -> list[Any]:
    """Positions that were not forgotten, though the kill may have come in the middle of that."""
    last = max((at for at, what in enumerate(told) if what == "forgotten"), default=0)
    return [what for what in told[max(0, last - 1) :] if what != "forgotten"][-1 if last else 0 :]


kills = st.integers(1, 150)


@given(
    program=programs(10, 20),
    places=st.sets(st.integers(0, 15), max_size=3),
    killed=kills,
    undo_killed=st.lists(kills, max_size=3),
    rewinds=st.booleans(),
    data=st.data(),
)
@settings(max_examples=40 * MORE_EXAMPLES)
def test_killed_at_any_call(
    tmp_path_factory: pytest.TempPathFactory,
    program: list[Any],
    places: set[int],
    killed: int,
    undo_killed: list[int],
    rewinds: bool,
    data: st.DataObject,
) -> None:
    before, operations = program
    cwd = tmp_path_factory.mktemp("killed") / "cwd"
    cwd.mkdir()
    with inside(cwd), pytest.MonkeyPatch.context() as patch:
        patch.setattr(noting, "SET_ASIDE_FROM", 5)
        play(cwd, before, lambda _: None)

        def run(tell: Callable[[Any], None]) -> None:
            Killer(killed)
            a_run(cwd, operations, {0, *places}, tell)

        told, status = in_a_child(run)
        assert status in (0, signal.SIGKILL)
        if not told:
            return  # it came no further than its first position
        position, wanted = data.draw(st.sampled_from(still_possible(told)))
        for nth in undo_killed:

            def undo(tell: Callable[[Any], None], nth: int = nth) -> None:
                Killer(nth)
                an_undo(cwd, position, rewinds, tell)

            _, status = in_a_child(undo)
            assert status in (0, signal.SIGKILL)
        said, status = in_a_child(lambda tell: an_undo(cwd, position, rewinds, tell))
        assert (said, status) == ([[]], 0)
        assert tree(cwd) == wanted


# --- a script with all of it ---------------------------------------------------------------------------------


class Script:
    """What a training script does with files, and what the capture of its state will do with them at a resume."""

    STEPS = 14

    def __init__(self, cwd: Path) -> None:
        self.state = cwd.parent / "states" / "state"
        self.history = FileHistory(cwd.parent / "history", cwd=cwd, left_alone=[self.state.parent])
        self.history.watch()

    def run(self) -> None:
        saved = pickle.loads(self.state.read_bytes()) if self.state.exists() else None
        # Nothing is saved yet: whatever was done before the kill never was.
        assert (self.history.rewind() if saved is not None else self.history.undo(0)) == []
        self.begin()
        if saved is not None:
            assert self.history.undo(saved["position"]) == []
            self.step = saved["step"]
            put_back(self.data, saved["data"])
            put_back(self.log, saved["log"])
            abandon(self.rotated.stream)
            self.rotated.stream = reopened(saved["rotated"])
        while self.step < self.STEPS:
            self.do_step()
            self.step += 1
            if self.step % 3 == 0:
                self.save()
        self.log.close()
        self.rotated.close()

    def begin(self) -> None:
        self.step = 0
        self.data = open("data.txt")
        if os.path.exists("out"):
            shutil.rmtree("out")
        os.makedirs("out/samples")
        self.log = open("out/train.log", "w")
        self.log.write("step,text\n")
        self.rotated = logging.handlers.RotatingFileHandler("out/rotated.log", maxBytes=40, backupCount=3)
        with open("out/args", "x") as args:
            args.write("--epochs 3")

    def do_step(self) -> None:
        self.log.write(f"{self.step},{next(self.data)}")
        self.rotated.emit(logging.makeLogRecord({"msg": f"step {self.step}"}))
        with open("every.csv", "a") as every:
            every.write(f"{self.step}\n")
        Path("out/model.pt").write_bytes(bytes([self.step]) * 50)
        Path("out/new.pt").write_bytes(bytes([self.step]) * 10)
        os.replace("out/new.pt", "out/last.pt")
        with open("out/model.pt", "r+b") as model:
            model.seek(self.step)
            model.write(b"mark")
        if self.step % 5 == 0:
            shutil.rmtree("out/samples")
            os.mkdir("out/samples")
        Path(f"out/samples/{self.step}").touch()

    def save(self) -> None:
        described = {"data": self.data, "log": self.log, "rotated": self.rotated.stream}
        files = {name: describe(file) for name, file in described.items()}
        new = {"step": self.step, "position": self.history.position(), **files}
        self.history.sync()
        self.state.with_suffix(".new").write_bytes(pickle.dumps(new))
        os.replace(self.state.with_suffix(".new"), self.state)
        self.history.forget(new["position"])


@given(kills=st.lists(st.integers(1, 900), max_size=5))
@settings(max_examples=15 * MORE_EXAMPLES)
def test_every_line_is_there_once(tmp_path_factory: pytest.TempPathFactory, kills: list[int]) -> None:
    """X4: a script killed anywhere and started again ends with the files of one that was left in peace."""
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noting, "SET_ASIDE_FROM", 20)
        for killed in ([], kills):
            cwd = tmp_path_factory.mktemp("script") / "cwd"
            cwd.mkdir()
            (cwd.parent / "states").mkdir()
            (cwd / "data.txt").write_text("".join(f"line {n} é\n" for n in range(50)))
            (cwd / "every.csv").write_text("from before\n")
            (cwd / "out" / "old").mkdir(parents=True)
            with inside(cwd):
                for nth in killed:

                    def run(tell: Callable[[Any], None], nth: int = nth, cwd: Path = cwd) -> None:
                        Killer(nth)
                        Script(cwd).run()

                    assert in_a_child(run)[1] in (0, signal.SIGKILL)
                assert in_a_child(lambda tell, cwd=cwd: Script(cwd).run())[1] == 0  # type: ignore[misc]
            ends.append(without_times(tree(cwd)))
    assert ends[0] == ends[1]
    assert ends[0]["every.csv"][2].decode().split() == ["from", "before", *map(str, range(Script.STEPS))]


# --- at a system call ----------------------------------------------------------------------------------------

CALLS = (
    "openat,write,pwrite64,copy_file_range,ftruncate,truncate,fsync,fdatasync,link,linkat,rename,renameat,renameat2,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,chmod,fchmod,fchmodat,utimensat,symlink"
)
PROGRAM = """
import os
from pathlib import Path
from sublet.training.scripts.files import noting
from sublet.training.scripts.open_files import abandon, describe, put_back, reopened
from tests.training.scripts.test_file_history_killed import a_run, an_undo, tree

def program(cwd, operations, position):
    noting.SET_ASIDE_FROM = 5
    os.chdir(cwd)
    begin()
    if position:
        an_undo(Path(cwd), position, False, lambda said: say(said=said))
    else:
        a_run(Path(cwd), [(*one[:-1], one[-1].encode()) if one[0] in ("write", "append", "over") else one for one in operations], {0, 5}, lambda what: what == "forgotten" or say(position=what[0]))
"""
#: Each kind of change once since the position that is asked for.
STEPS: list[tuple[Any, ...]] = [
    ("write", "a", b"one\n"), ("makedirs", "d/e"), ("write", "d/a", b"first of them\n"), ("symlink", "d", "l"), ("append", "a", b"two\n"),
    ("append", "a", b"three\n"), ("write", "d/a", b"second of them\n"), ("over", "a", 1, b"x"), ("rename", "d", "b"), ("write", "l", b"4"),
    ("remove", "l"), ("mkdir", "d"), ("append", "d/a", b"five"), ("chmod", "b/a", 0o600), ("rmtree", "b"),
]  # fmt: skip


def test_killed_at_a_system_call(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    at: dict[int, Any] = {}
    with inside(plain):
        play(plain, STEPS, lambda number: at.update({number: without_times(tree(plain))}))
    wanted = dict(zip((2, 3), (at[0], at[5]), strict=True))
    programs = Programs(PROGRAM, CALLS, tmp_path / "calls")

    def run(name: str, position: int, inject: str = "") -> tuple[list[dict[str, Any]], dict[str, int]]:
        cwd = tmp_path / name / "cwd"
        cwd.mkdir(parents=True, exist_ok=True)
        steps = [[part.decode() if isinstance(part, bytes) else part for part in step] for step in STEPS]
        _, said, often = programs.run({"cwd": str(cwd), "operations": steps, "position": position}, inject)
        return said, often

    def check(name: str, position: int) -> None:
        said, _ = run(name, position)
        assert [line["said"] for line in said if "said" in line] == [[]]
        assert without_times(tree(tmp_path / name / "cwd")) == wanted[position]

    try:
        said, of_run = run("whole", 0)
        positions = [line["position"] for line in said if "position" in line]
        assert positions == list(wanted)
        _, of_undo = run("whole", positions[-1])
        assert without_times(tree(tmp_path / "whole" / "cwd")) == wanted[positions[-1]]
        places = [
            (undone, place) for undone, often in ((0, of_run), (1, of_undo)) for place in places_of(often)
        ]
        chosen = places if KILLS == "all" else random.Random(4).sample(places, int(KILLS))
        for number, (undone, (call, nth)) in enumerate(chosen):
            name, inject = f"killed-{number}", f"{call}:signal=KILL:when={nth}"
            said, _ = run(name, 0, "" if undone else inject)
            reached = [line["position"] for line in said if "position" in line]
            assert said[-1]["ended"] == (0 if undone else signal.SIGKILL)
            if undone:
                assert run(name, reached[-1], inject)[0][-1]["ended"] == signal.SIGKILL
            if reached:
                check(name, reached[-1])
    finally:
        programs.close()
