"""Scripts as people write them, unchanged: killed and told to leave at random steps, they end with what plain `python` prints."""

from __future__ import annotations

import os
import random
import re
import runpy
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import sublet
from sublet import shim
from sublet.cli.runs.audit import audit
from sublet.core.runs.exits import DRAINED_CODE
from sublet.training import loop
from sublet.training.scripts import rehearsal
from tests.homes import Home
from tests.seeds import SEED
from tests.training.rig import Left, ended, forked, left_of

SCRIPTS = Path(__file__).parent / "scripts"
#: How often each script is disturbed before it may end.
DISTURBED = int(os.environ.get("SUBLET_SHIM_DISTURBED", "2"))
#: With this a forked process says that it would start itself again.
AGAIN = 99
CALM = {
    "mnist.py": 24,
    "plain_loop.py": 27,
    "augmented.py": 20,
    "while_loop.py": 25,
    "trainer.py": 24,
    "with_numpy.py": 24,
}


class Lives:
    """Of one script: each start is a process, and what it printed is in a file."""

    def __init__(self, folder: Path, script: Path) -> None:
        self.out, self.err = folder / f"{script.name}.out", folder / f"{script.name}.err"
        self.script = script
        self.starts = 0

    def _forked(self, work: Callable[[], None]) -> int:
        def redirected() -> None:
            for path, fd in ((self.out, 1), (self.err, 2)):
                opened = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
                os.dup2(opened, fd)
            sys.stdout = os.fdopen(1, "w")
            sys.stderr = os.fdopen(2, "w", buffering=1)
            try:
                work()
            finally:
                sys.stdout.flush()

        return ended(forked(redirected, torch="torch" in self.script.read_text()))

    def plain(self, *args: str) -> str:
        def work() -> None:
            sys.argv = [str(self.script), *args]
            sys.path[0] = str(self.script.parent)
            runpy.run_path(str(self.script), run_name="__main__")

        assert self._forked(work) == 0, self.err.read_text()
        return self.result

    def shim(
        self,
        *args: str,
        options: tuple[str, ...] = (),
        at: int = 0,
        number: int = 0,
        prepare: Callable[[], None] = lambda: None,
    ) -> int:
        """With a signal to itself in the body of step `at`. Started again as often as it starts itself again."""

        def work() -> None:
            prepare()
            count = loop.Run.end_step

            def end_step(run: loop.Run) -> None:
                if run.step + 1 == at:
                    os.kill(os.getpid(), number)
                count(run)

            loop.Run.end_step = end_step  # type: ignore[method-assign]
            shim.restart = lambda start: os._exit(AGAIN)  # type: ignore[assignment]
            sys.argv = ["shim", "--vram", "1GiB", "--quiet", *options, str(self.script), *args]
            shim.main()

        self.starts = 1
        while (code := self._forked(work)) == AGAIN:
            self.starts += 1
        return code

    @property
    def result(self) -> str:
        lines = [line for line in self.out.read_text().splitlines() if line.startswith("result ")]
        assert len(lines) == 1, self.out.read_text() + self.err.read_text()
        return lines[0]


def each_step_once(job: str, steps: int) -> Left:
    left = left_of(job)
    assert left.head is not None
    assert left.head.step == steps
    assert [first for first, _ in left.spans] == [1, *(last + 1 for _, last in left.spans[:-1])]
    assert left.spans[-1][1] == steps
    assert left.faults == []
    return left


@pytest.mark.parametrize("name", CALM)
def test_killed_and_told_to_leave_at_random_steps(name: str, sqlite_home: Home, tmp_path: Path) -> None:
    chance = random.Random(f"{SEED} {name}")
    lives = Lives(tmp_path, SCRIPTS / name)
    calm = lives.plain()
    steps = CALM[name]
    every = str(chance.choice([1, 2, 3, 5]))
    options = ("--name", "job", "--every", every)
    for turn, at in enumerate(sorted(chance.sample(range(1, steps + 1), DISTURBED))):
        number = (signal.SIGKILL, signal.SIGTERM)[turn % 2]
        code = lives.shim(options=options, at=at, number=number)
        said = f"step {at} of every {every}: {lives.err.read_text()}"
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else DRAINED_CODE), said
        if number == signal.SIGTERM:
            left = left_of("job")
            assert left.head is not None
            assert left.head.step == at, said  # a warning costs no step
    assert lives.shim(options=options) == 0, lives.err.read_text()
    assert lives.result == calm
    each_step_once("job", steps)
    assert lives.shim(options=options) == 0, lives.err.read_text()
    assert lives.out.read_text() == ""
    assert f"finished already, at step {steps}" in lives.err.read_text()


def test_what_was_saved_behind_a_loop_is_compared_there(sqlite_home: Home, tmp_path: Path) -> None:
    """Saves that are due seldom are made where a loop has come to its end, and not where its last step has."""
    lives = Lives(tmp_path, SCRIPTS / "mnist.py")
    calm = lives.plain()
    options = ("--name", "job", "--every", "100")
    assert lives.shim(options=options, at=18, number=signal.SIGKILL) == -signal.SIGKILL
    assert lives.shim(options=options) == 0, lives.err.read_text()
    assert lives.result == calm


# --- as a program --------------------------------------------------------------------------------------------


def command(home: Home, folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sublet.shim", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=home.environment | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | environment,
    )


def test_a_script_runs_as_under_plain_python(sqlite_home: Home, tmp_path: Path) -> None:
    """Its name, file, arguments, path and traceback are its own; so is its exit code."""
    folder = tmp_path / "of the script"
    folder.mkdir()
    (folder / "beside.py").write_text("RATE = 0.5\n")
    script = folder / "train.py"
    script.write_text(
        "from __future__ import annotations\n"
        "import sys\n"
        "import beside\n"
        "w = 4.0\n"
        "for i in range(3):\n"
        "    w -= beside.RATE * w\n"
        "    if len(sys.argv) > 2 and i == 1:\n"
        "        raise ValueError('of the user')\n"
        "print(__name__, __file__, sys.argv, sys.path[0], w, sys.modules['__main__'].w)\n"
        "sys.exit(7)\n"
    )
    plain = subprocess.run(
        [sys.executable, "of the script/train.py", "a"], cwd=tmp_path, capture_output=True, text=True
    )
    done = command(sqlite_home, tmp_path, "of the script/train.py", "a")
    assert done.returncode == plain.returncode == 7, done.stderr
    assert done.stdout == plain.stdout
    plain = subprocess.run(
        [sys.executable, "of the script/train.py", "a", "b"], cwd=tmp_path, capture_output=True, text=True
    )
    failed = command(sqlite_home, tmp_path, "--quiet", "of the script/train.py", "a", "b")
    assert failed.returncode == plain.returncode == 1
    assert failed.stderr.endswith(plain.stderr), failed.stderr
    assert "line 8, in <module>" in failed.stderr


def test_help_and_explain(sqlite_home: Home, tmp_path: Path) -> None:
    said = command(sqlite_home, tmp_path, "--help").stdout
    assert "Example:  python -m sublet.shim" in said
    said = command(sqlite_home, tmp_path, "--explain", str(SCRIPTS / "with_numpy.py")).stdout
    lines = (SCRIPTS / "with_numpy.py").read_text().splitlines()
    inner = next(n for n, line in enumerate(lines, 1) if line.lstrip().startswith("for xb, yb in"))
    assert f"training loop   line {inner}, a 'for' in main: its body descends" in said
    assert "modules         __main__, digest" in said
    assert "running         main, with x, y, params" in said
    assert re.search(r"^saved           \d+ objects in .*, and \d+ blocks of memory with", said, re.M)
    assert "  block         main.params['w1']: 320B" in said
    assert "result" not in said


# --- what is refused, before the first step -------------------------------------------------------------------

STEPS = "w = 1.0\nfor i in range(6):\n    w -= 0.1 * w\nprint('result', w)\n"
REFUSED = {
    "import sublet\nrun = sublet.train('x', {})\n": "line 2: it resumes by itself; nothing was started",
    "for a in b\n": "is no Python program: expected ':' in line 1; nothing was started",
    f"import asyncio\nasync def f():\n    {STEPS.replace(chr(10), chr(10) + '    ')}\nasyncio.run(f())\n": "line 4: the training loop is inside",
    "def f():\n  for a in range(9):\n    w -= 0.1 * w\n    yield a\nfor b in f(): pass\n": "line 2: the training loop is inside the generator f, which cannot be resumed; nothing was started",
    f"import socket\nmine = [socket.socket()]\n{STEPS}": "mine[0] is a socket.socket, which cannot be saved",
    f"import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n{STEPS}": "is running, and what it does between two steps cannot be saved",
    f"import sqlite3\nbase = sqlite3.connect(':memory:')\n{STEPS}": "base is a sqlite3.Connection, which cannot be saved",
    f"import os\nfd = os.open('raw', os.O_WRONLY | os.O_CREAT)\n{STEPS}": "raw, opened with os.open at script.py:2, is read or written by its number",
    f"import os\nfd = os.open(__file__, os.O_RDONLY)\n{STEPS}": "script.py, opened with os.open at script.py:2, is read or written by its number",
}


@pytest.mark.parametrize("source", REFUSED)
def test_refused_before_the_first_step(source: str, sqlite_home: Home, tmp_path: Path) -> None:
    lives = written(tmp_path, source)
    assert lives.shim(options=("--name", "job")) == 2, lives.err.read_text()
    said = lives.err.read_text()
    assert REFUSED[source] in said
    assert "nothing was started" in said or "no step was made" in said
    assert len(said.strip().splitlines()) >= 2, said  # and what to do
    assert "result" not in lives.out.read_text()


def test_descriptors_that_are_closed_or_a_files_are_not_refused(sqlite_home: Home, tmp_path: Path) -> None:
    closed = "import os, tempfile\nfolder = os.open('.', os.O_RDONLY)\nos.fsync(folder)\nos.close(folder)\n"
    raw = tmp_path / "raw"
    opened = f"file = os.fdopen(os.open({str(raw)!r}, os.O_RDWR | os.O_CREAT), 'r+b')\n"
    files = opened + "other = tempfile.TemporaryFile()\nother.close()\n"
    lives = written(tmp_path, closed + files + STEPS.replace("    w", "    file.write(b'line')\n    w"))
    assert lives.shim(options=("--name", "job")) == 0, lives.err.read_text()
    assert raw.read_bytes() == b"line" * 6


def test_a_descriptor_that_is_opened_later_is_refused_when_it_is_saved(
    sqlite_home: Home, tmp_path: Path
) -> None:
    late = STEPS.replace("    w", "    fd = os.open('raw', os.O_WRONLY | os.O_CREAT) if i == 3 else 0\n    w")
    lives = written(tmp_path, f"import os\n{late}")
    assert lives.shim(options=("--name", "job", "--every", "2")) == 2, lives.err.read_text()
    assert (
        "is read or written by its number, which is another in the next process; step 2 is committed"
        in lives.err.read_text()
    )


def test_what_the_advice_leads_to_is_exact(sqlite_home: Home, tmp_path: Path) -> None:
    """What is named by --ignore is left out: no step depends on it."""
    lives = written(tmp_path, f"import socket\nmine = [socket.socket()]\n{STEPS}")
    calm = lives.plain()
    options = ("--name", "job", "--every", "1", "--ignore", "mine[0]")
    assert lives.shim(options=options, at=4, number=signal.SIGKILL) == -signal.SIGKILL, lives.err.read_text()
    assert lives.shim(options=options) == 0, lives.err.read_text()
    assert lives.result == calm


def test_a_loop_can_be_named(sqlite_home: Home, tmp_path: Path) -> None:
    source = "w = []\nfor i in range(5):\n    w.append(i)\nprint('result', w)\n"
    lives = written(tmp_path, source)
    assert lives.shim(options=("--name", "job", "--loop", "3")) == 2
    assert "loops begin in lines 2" in lives.err.read_text()
    assert (
        lives.shim(options=("--name", "job", "--loop", "2", "--every", "1"), at=3, number=signal.SIGTERM)
        == 85
    )
    assert lives.shim(options=("--name", "job", "--loop", "2")) == 0
    assert lives.result == "result [0, 1, 2, 3, 4]"
    each_step_once("job", 5)


def test_a_script_that_ended_is_not_run_again(sqlite_home: Home, tmp_path: Path) -> None:
    """X4."""
    lives = written(tmp_path, STEPS)
    assert lives.shim(options=("--name", "job")) == 0
    assert lives.shim(options=("--name", "job")) == 0
    assert lives.out.read_text() == ""
    assert "finished already, at step 6" in lives.err.read_text()


ORDER = """
import os, sys
words = {f"word {n}" for n in range(40)}
w = 1.0
for i in range(5):
    w -= 0.1 * w
print("result", list(words), os.environ.get("PYTHONHASHSEED"))
"""


def test_sets_of_texts_have_one_order_in_all_processes(sqlite_home: Home, tmp_path: Path) -> None:
    (tmp_path / "order.py").write_text(ORDER)
    ended = [command(sqlite_home, tmp_path, "--name", name, "order.py") for name in ("one", "two")]
    said = [one.stdout for one in ended]
    assert said[0] == said[1] != ""
    assert "PYTHONHASHSEED=20260" in ended[0].stderr  # plain Python draws another, and this one is named
    assert said[0].rstrip().endswith("None")  # and the script's own processes are as they would be


def test_one_of_several_ranks_is_refused(sqlite_home: Home, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(STEPS)
    done = command(sqlite_home, tmp_path, "one.py", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "one of several" in done.stderr
    assert "run = sublet.train(" in done.stderr


# --- what else a script does ---------------------------------------------------------------------------------


def written(folder: Path, source: str) -> Lives:
    path = folder / "script.py"
    path.write_text(source)
    return Lives(folder, path)


AFTER = """
import os, signal, time
w = 1.0
for epoch in range(2):
    for i in range(3):
        w -= 0.1 * w
    w = w * 2 + epoch
if not os.path.exists("{mark}"):
    open("{mark}", "w").close()
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        time.sleep(60)
    except BaseException:
        print("waited")
print("result", w)
"""


def test_told_to_leave_after_the_loops(sqlite_home: Home, tmp_path: Path) -> None:
    """All steps are committed, what follows is not done: it leaves at once, and the next start does only that."""
    mark = (
        sqlite_home.settings.home / "mark"
    )  # what lies elsewhere would be undone with what followed the loops
    lives = written(tmp_path, AFTER.format(mark=mark))
    options = ("--name", "job", "--every", "4", "--verify", "never")
    assert lives.shim(options=options) == DRAINED_CODE
    each_step_once("job", 6)
    assert lives.out.read_text() == ""
    assert lives.shim(options=options, at=1, number=signal.SIGKILL) == 0  # no step is made
    assert float(lives.result.split()[1]) == pytest.approx((0.9**3 * 2) * 0.9**3 * 2 + 1)
    each_step_once("job", 6)


SWALLOWS = """
import os, signal, time
w = 1.0
for i in range(200):
    try:
        if i == 20 and not os.path.exists("{mark}"):
            open("{mark}", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)
    except:
        pass
    finally:
        w -= 0.01 * w
print("result", w)
"""


def test_a_notice_cannot_be_swallowed(sqlite_home: Home, tmp_path: Path) -> None:
    """X4."""
    lives = written(tmp_path, SWALLOWS.format(mark=sqlite_home.settings.home / "mark"))
    options = ("--name", "job", "--no-rehearsal", "--verify", "never")
    assert lives.shim(options=options) == DRAINED_CODE
    left = left_of("job")
    assert left.head is not None
    assert 20 <= left.head.step < 40
    assert lives.shim(options=options) == 0
    assert float(lives.result.split()[1]) == pytest.approx(0.99**200)
    each_step_once("job", 200)


BUSY_SIGNAL = """
import os, signal, time
signal.signal(signal.SIGURG, lambda *_: print("urgent"))
w = 1.0
for i in range(3):
    w -= 0.1 * w
signal.raise_signal(signal.SIGURG)
os.kill(os.getpid(), signal.SIGTERM)
for _ in range(6000):
    time.sleep(0.01)
print("result", w)
"""


def test_a_handler_of_the_script_stays_its_own(sqlite_home: Home, tmp_path: Path) -> None:
    lives = written(tmp_path, BUSY_SIGNAL)
    assert lives.shim(options=("--name", "job", "--every", "3")) == DRAINED_CODE
    each_step_once("job", 3)
    assert lives.out.read_text() == "urgent\n"


def test_a_script_that_changed_does_not_go_on_unasked(sqlite_home: Home, tmp_path: Path) -> None:
    """X3: a word about it changes nothing."""
    lives = written(tmp_path, STEPS)
    options = ("--name", "job", "--every", "1")
    assert lives.shim(options=options, at=4, number=signal.SIGTERM) == DRAINED_CODE
    written(tmp_path, STEPS.replace("0.1", "0.2"))
    assert lives.shim(options=options) == 2
    said = lives.err.read_text()
    assert "the script is not what it was when it was saved" in said
    assert "--changed-ok" in said
    assert lives.shim("--lr", "3", options=options) == 2  # other arguments, under the same name
    written(tmp_path, "# a word about it\n\n" + STEPS)
    assert lives.shim(options=options) == 0, lives.err.read_text()  # a comment changes nothing
    assert float(lives.result.split()[1]) == pytest.approx(0.9**6)


def test_a_script_that_changed_goes_on_when_asked_and_says_with_what(
    sqlite_home: Home, tmp_path: Path
) -> None:
    """X3: functions that are called later are the new ones; what is running, and every value, is as it was saved."""
    source = "RATE = 0.1\ndef left(w): return w\n" + STEPS.replace("0.1 * w", "RATE * left(w)")
    lives = written(tmp_path, source)
    options = ("--name", "job", "--every", "1")
    assert lives.shim(options=options, at=4, number=signal.SIGTERM) == DRAINED_CODE
    written(tmp_path, source.replace("return w", "return 0.0").replace("RATE = 0.1", "RATE = 0.7"))
    assert lives.shim(options=(*options, "--changed-ok")) == 0, lives.err.read_text()
    assert "left() changed" in lives.err.read_text()
    assert "values, are as they were saved" in lives.err.read_text()
    assert float(lives.result.split()[1]) == pytest.approx(0.9**4)


def test_a_file_beside_the_script_is_a_part_of_it(sqlite_home: Home, tmp_path: Path) -> None:
    """X3."""
    (tmp_path / "rates.py").write_text("def rate():\n    return 0.1\n")
    lives = written(tmp_path, "from rates import rate\n" + STEPS.replace("0.1", "rate()"))
    options = ("--name", "job", "--every", "1")
    assert lives.shim(options=options, at=4, number=signal.SIGTERM) == DRAINED_CODE, lives.err.read_text()
    (tmp_path / "rates.py").write_text("def rate():\n    return 0.5\n")
    assert lives.shim(options=options) == 2
    assert "rates: rate() changed" in lives.err.read_text()


# --- what a new version of a script is asked -----------------------------------------------------------------

MANY = "import time\nw = 1.0\nfor i in range(60):\n    w -= 0.1 * w\n    {more}\nprint('result', w)\n"


def test_a_new_version_is_rehearsed_once(sqlite_home: Home, tmp_path: Path) -> None:
    lives = written(tmp_path, MANY.format(more="pass"))
    assert lives.shim(options=("--name", "one")) == 0, lives.err.read_text()
    assert lives.starts == 2  # this file has what the second printed; see test_programs for all of it
    assert lives.result == f"result {eval_steps(60)}"
    assert "came out the same" not in lives.err.read_text()  # --quiet
    each_step_once("one", 60)
    assert lives.shim(options=("--name", "other")) == 0
    assert lives.starts == 1  # it is known of this version
    assert lives.shim("--more", options=("--name", "third")) == 0
    assert lives.starts == 2


def test_a_file_that_is_being_written_does_not_differ_by_itself(
    sqlite_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it was written last does, and is not a part of the program."""
    monkeypatch.chdir(tmp_path)
    lives = written(
        tmp_path, "log = open('log.txt', 'a')\n" + MANY.format(more="print(i, file=log, flush=True)")
    )
    assert lives.shim(options=("--name", "job")) == 0, lives.err.read_text()
    assert lives.starts == 2, lives.err.read_text()
    assert (tmp_path / "log.txt").read_text() == "".join(f"{i}\n" for i in range(60))


PHASES = """
import ctypes, collections
class Draw:
    def __call__(self):
        return {draw}
w, draw, seen = 1.0, None, None
for i in range(200):
    if i == 50:
        draw, seen = Draw(), collections.Counter()
    w -= 0.1 * w + (draw() if draw else 0)
print('result', w)
"""


@pytest.mark.parametrize(
    ("draw", "code", "starts"), [("len(seen) / 8", 0, 3), ("ctypes.CDLL(None).rand() / 2**31", 79, 5)]
)
def test_a_new_phase_is_rehearsed_when_the_run_has_lasted(
    draw: str, code: int, starts: int, sqlite_home: Home, tmp_path: Path
) -> None:
    """X1: what cannot be put back is refused at the first save that holds it, and not after a night."""

    def at_once() -> None:
        rehearsal.WORTH_IT_AFTER, rehearsal.MOST_REPEATED = 0, 5

    lives = written(tmp_path, PHASES.format(draw=draw))
    options = ("--name", "job", "--every", "10")
    assert lives.shim(options=options, prepare=at_once) == code, lives.err.read_text()
    assert lives.starts == starts
    if code:
        assert "came out differently when repeated after a resume: w: " in lives.err.read_text()
    else:
        assert "result" in lives.out.read_text()


def eval_steps(number: int) -> float:
    w = 1.0
    for _ in range(number):
        w -= 0.1 * w
    return w


LOST = """
import ctypes
def draw():
    return ctypes.CDLL(None).rand()
w = 1.0
for i in range(60):
    w -= 0.1 * w + draw() / 2**31
print('result', w)
"""


def test_state_that_nobody_can_save_is_found_by_the_rehearsal(sqlite_home: Home, tmp_path: Path) -> None:
    """X2. The C library's own random state: no object of the program holds it."""
    lives = written(tmp_path, LOST)
    assert lives.shim(options=("--name", "job")) == 79, lives.err.read_text()
    assert lives.starts == 4  # repeated three times: the same each time, and not as it was
    said = lives.err.read_text()
    assert "came out differently when repeated after a resume: w: " in said
    assert "Both states are kept: job version 2 as committed, job-repeated version 1 as repeated" in said
    with sublet.checkpoints() as store:
        committed, repeated = store.load("job", version=2), store.load("job-repeated")
    assert repr(committed) != repr(repeated)
    shown = CliRunner().invoke(audit, ["job"]).output
    assert "version 2 came out differently when a resume repeated its steps" in shown
    assert "job-repeated" in shown
    assert "result" not in lives.out.read_text()


def test_what_differs_by_itself_is_named_and_left_out(sqlite_home: Home, tmp_path: Path) -> None:
    """X2: a second repetition tells it from what was lost."""
    lives = written(tmp_path, "took = []\n" + MANY.format(more="took.append(time.perf_counter())"))
    assert lives.shim(options=("--name", "job")) == 0, lives.err.read_text()
    assert lives.starts == 3
    assert "differs from run to run by itself: took[" in lives.err.read_text()
    assert lives.result == f"result {eval_steps(60)}"


def test_a_resume_is_repeated_and_compared_when_asked_for(sqlite_home: Home, tmp_path: Path) -> None:
    lives = written(tmp_path, MANY.format(more="print(i)"))
    options = ("--name", "job", "--every", "5", "--verify", "always", "--no-rehearsal")
    printed = ""
    for at in (13, 29, 51):
        assert lives.shim(options=options, at=at, number=signal.SIGKILL) == -signal.SIGKILL
        printed += lives.out.read_text()
    assert lives.shim(options=options) == 0, lives.err.read_text()
    printed += lives.out.read_text()
    rows = [int(line) for line in printed.splitlines() if line.isdigit()]
    assert sorted(set(rows)) == list(range(60))
    each_step_once("job", 60)


# --- what the old ways of saving refused or got wrong ---------------------------------------------------------

EXACT = {
    "several loops": """
        import random
        random.seed(3)
        w = 1.0
        for i in range(4):
            w -= 0.1 * w * random.random()
        v = w
        for i in range(5):
            v -= 0.2 * v * random.random()
        print("result", w, v)
    """,
    "next": """
        w, it = 1.0, iter(range(100))
        for i in range(8):
            w -= 0.01 * w * next(it)
        print("result", w, next(it))
    """,
    "twice, and with an else": """
        def fit(rate):
            w = 1.0
            for i in range(4):
                w -= rate * w
            else:
                w += 1
            return w
        print("result", fit(0.1) + fit(0.3), [fit(r) for r in (0.2, 0.4)])
    """,
    "iterators of all sorts": """
        import itertools
        w, notes = 1.0, []
        def told():
            got = 0
            while True:
                got += yield got
        teller = told(); next(teller)
        ring, few = itertools.cycle("abc"), itertools.islice(itertools.count(5), 100)
        pairs = zip(range(50), map(str, itertools.count(1, 2)))
        for i in range(9):
            w -= 0.1 * w
            notes.append((teller.send(i), next(ring), next(few), next(pairs), *[x for x in itertools.takewhile(lambda x: x % 3, few)]))
        print("result", w, notes)
    """,
    "state in functions and classes": """
        import functools, enum, dataclasses, collections
        @functools.lru_cache(maxsize=None)
        def slow(n):
            slow.calls = getattr(slow, "calls", 0) + 1
            return n * 2
        class Mode(enum.Enum):
            WARM = 1
            COLD = 2
        @dataclasses.dataclass(frozen=True)
        class Best:
            w: float
            mode: Mode
        class Meter:
            __slots__ = ("total",)
            seen = 0
            def __init__(self): self.total = 0.0
            def add(self, x):
                Meter.seen += 1
                self.total += x
        def counted(store=[]):
            store.append(len(store))
            return store
        def closing():
            n = 0
            def up():
                nonlocal n
                n += 1
                return n
            return up
        up, meter, best, w = closing(), Meter(), None, 1.0
        push, Row = meter.add, collections.namedtuple("Row", "a b")
        rows = collections.deque(maxlen=3)
        for i in range(9):
            w -= 0.1 * w
            push(w); counted(); up(); slow(i % 3)
            rows.append(Row(i, w))
            if best is None or w < best.w - 0.1:
                best = Best(w, Mode.COLD if i % 2 else Mode.WARM)
        print("result", w, meter.total, Meter.seen, counted(), up(), slow.calls, best, best.mode is Mode.COLD, rows, slow.cache_info())
    """,
    "the loop is left and begun by a while": """
        w, turns = 1.0, []
        rows = iter(range(30))
        while True:
            for row in rows:
                w -= 0.1 * w
                if row % 5 == 4:
                    turns.append((row, w))
                    break
            else:
                break
        print("result", w, turns)
    """,
    "contexts and an exception": """
        import contextlib
        seen, w = [], 1.0
        @contextlib.contextmanager
        def inside(name):
            seen.append("in " + name)
            try:
                yield name
            finally:
                seen.append("out " + name)
        try:
            with inside("a"), inside("b") as b:
                for i in range(9):
                    w -= 0.1 * w
                    if i == 7:
                        raise ValueError(b)
        except ValueError as error:
            seen.append(repr(error))
        print("result", w, seen)
    """,
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, sqlite_home: Home, tmp_path: Path) -> None:
    """X1: it ends as under plain Python."""
    lives = written(tmp_path, textwrap.dedent(EXACT[name]))
    calm = lives.plain()
    options = ("--name", "job", "--every", "1")
    for at in (2, 6):
        assert lives.shim(options=options, at=at, number=signal.SIGKILL) == -signal.SIGKILL, (
            lives.err.read_text()
        )
    assert lives.shim(options=options) == 0, lives.err.read_text()
    assert lives.result == calm


FILES = """
import csv
w = 1.0
log, rows = open("log.txt", "w"), open("rows.csv", "a", newline="")
table = csv.writer(rows)
for i in range(9):
    w -= 0.1 * w
    print("step", i, file=log)
    table.writerow([i, w])
    with open("last.txt", "w") as last:
        last.write(str(i))
    with open("all.txt", "a") as every:
        every.write(f"{i}\\n")
log.close(); rows.close()
print("result", w)
"""


def test_each_line_is_written_once(
    sqlite_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X4."""
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    for folder in (calm, disturbed):
        folder.mkdir()
        (folder / "rows.csv").write_text("of yesterday\n")
        lives = written(tmp_path, FILES)
        monkeypatch.chdir(folder)
        if folder is calm:
            lives.plain()
            continue
        options = ("--name", "job", "--every", "2")
        for at in (4, 6, 9):
            assert lives.shim(options=options, at=at, number=signal.SIGKILL) == -signal.SIGKILL
        assert lives.shim(options=options) == 0, lives.err.read_text()
    found = [{p.name: p.read_text() for p in folder.iterdir()} for folder in (calm, disturbed)]
    assert found[0] == found[1]


def test_names_of_one_object_stay_names_of_one_object(sqlite_home: Home, tmp_path: Path) -> None:
    """And what was put back once is not changed by the steps after it: the second loss is in the same turn as the first."""
    lives = written(
        tmp_path,
        "import numpy as np\n"
        "w = np.ones(3)\n"
        "first, best, notes, scale = w, None, {}, np.ones(3)\n"
        "for epoch in range(2):\n"
        "    notes[epoch] = seen = []\n"
        "    scale = scale * 0.5\n"
        "    for i in range(6):\n"
        "        w -= 0.1 * w * scale\n"
        "        seen.append(i + float(scale[0]))\n"
        "        if i == 1:\n"
        "            best = w\n"
        "print('result', w, best is w, first is w, notes, scale)\n",
    )
    calm = lives.plain()
    for at in (3, 5, 9, 11):
        code = lives.shim(options=("--name", "job", "--every", "1"), at=at, number=signal.SIGKILL)
        assert code == -signal.SIGKILL, lives.err.read_text()
    assert lives.shim(options=("--name", "job")) == 0
    assert lives.result == calm


ONE_LEVEL = """
import numpy as np
def shuffled():
    order = np.random.permutation(12)
    yield from order
w, seen = 1.0, []
for row in shuffled():
    w -= 0.1 * w
    seen.append(int(row))
print("result", sorted(seen) == list(range(12)), w)
"""
TWO_LEVELS = """
import random
import numpy as np
w, seen, level = np.ones(2), [], 1
for epoch in range(2):
    order = np.random.permutation(6) + 10 * level
    draws = [random.random() for _ in order]
    for row, draw in zip(order, draws):
        w -= 0.1 * w
        seen.append((int(row), draw))
    level += 1
rows = sorted(row for row, _ in seen)
print("result", rows == [*range(10, 16), *range(20, 26)], len(set(seen)), float(w[0]))
"""


@pytest.mark.parametrize("source", [ONE_LEVEL, TWO_LEVELS], ids=["one_level", "two_levels"])
def test_a_script_without_a_seed_sees_each_row_once(source: str, sqlite_home: Home, tmp_path: Path) -> None:
    """Nothing makes two processes draw alike but what was saved."""
    lives = written(tmp_path, source)
    calm = lives.plain()
    assert "True" in calm
    for at in (3, 5, 8, 11):
        code = lives.shim(options=("--name", "job", "--every", "2"), at=at, number=signal.SIGKILL)
        assert code == -signal.SIGKILL, lives.err.read_text()
    assert lives.shim(options=("--name", "job")) == 0
    assert lives.result == calm
    each_step_once("job", 12)


HIDDEN = """
import torch
torch.manual_seed(2)
body, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
first = torch.optim.SGD(body.parameters(), lr=0.1)
second = torch.optim.SGD(head.parameters(), lr=0.1)
milestones = torch.optim.lr_scheduler.MultiStepLR(first, [4, 8], gamma=0.5)
head.calls = 0
head.mean = torch.zeros(3)
def now_and_then(i):
    if i % 4 == 3:
        second.step()
        for p in head.parameters():
            p.grad = None
for i in range(12):
    first.zero_grad()
    loss = head(torch.tanh(body(torch.randn(4, 3)))).square().mean()
    loss.backward()
    first.step()
    milestones.step()
    head.calls += 1
    head.mean = 0.9 * head.mean + body.weight.detach()[0]
    if i == 5:
        body.weight.requires_grad_(False)
        head.eval()
    now_and_then(i)
values = [p.detach().numpy().tobytes().hex() for m in (body, head) for p in m.parameters()]
print("result", values, head.calls, head.mean.tolist(), head.training, body.weight.requires_grad, milestones.get_last_lr())
"""


LIBRARY = """
import sys, torch
sys.path.insert(0, {beside!r})
from fitting import fit
torch.manual_seed(4)
model = torch.nn.Linear(3, 1)
fit(model, torch.optim.Adam(model.parameters(), lr=0.1), 12)
print("result", [p.tolist() for p in model.parameters()])
"""
FIT = """
import torch
def fit(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.dropout(model(torch.randn(4, 3)), 0.2).square().mean().backward()
        optimizer.step()
"""


def test_a_loop_of_a_library(sqlite_home: Home, tmp_path: Path) -> None:
    """X1, X4. A step is one of an optimizer's. What ended is committed to its last step, and not run again."""
    beside = tmp_path / "lib" / "site-packages"
    beside.mkdir(parents=True)
    (beside / "fitting.py").write_text(FIT)
    lives = written(tmp_path, LIBRARY.format(beside=str(beside)))
    calm = lives.plain()
    options = ("--name", "job", "--every", "5")
    for at, number in ((7, signal.SIGKILL), (9, signal.SIGTERM)):
        assert lives.shim(options=options, at=at, number=number) in (-signal.SIGKILL, DRAINED_CODE)
    assert lives.shim(options=options) == 0, lives.err.read_text()
    assert lives.result == calm
    each_step_once("job", 12)
    assert lives.shim(options=options) == 0, lives.err.read_text()
    assert lives.out.read_text() == ""


def test_what_is_no_part_of_any_state_dict(sqlite_home: Home, tmp_path: Path) -> None:
    """Gradients that a helper uses up now and then, modes, counters, frozen parameters."""
    lives = written(tmp_path, HIDDEN)
    calm = lives.plain()
    for at in (3, 7, 10):
        code = lives.shim(options=("--name", "job", "--every", "1"), at=at, number=signal.SIGTERM)
        assert code == DRAINED_CODE, lives.err.read_text()
    assert lives.shim(options=("--name", "job")) == 0
    assert lives.result == calm


GROWING = """
w, notes = 1.0, {}
for epoch in range(2):
    if epoch == 0:
        notes["rows"] = [0, 1, 2, 3, 4, 5]
    for row in list(notes["rows"]):
        w -= 0.1 * w
        notes["rows"].append(row + 100)
print("result", w, notes)
"""


def test_the_top_of_a_turn_stays_as_it_was(sqlite_home: Home, tmp_path: Path) -> None:
    """What the turn's steps change is what the turn began with: lost twice within one turn, it begins with the same again."""
    lives = written(tmp_path, GROWING)
    calm = lives.plain()
    for at in (3, 5, 9, 12, 16):
        code = lives.shim(options=("--name", "job", "--every", "1"), at=at, number=signal.SIGKILL)
        assert code == -signal.SIGKILL, lives.err.read_text()
    assert lives.shim(options=("--name", "job")) == 0
    assert lives.result == calm
    each_step_once("job", 18)


def test_a_loop_that_is_never_reached_is_said(sqlite_home: Home, tmp_path: Path) -> None:
    lives = written(
        tmp_path, "w = 1.0\nfor i in range(3) if w > 2 else []:\n    w -= 0.1 * w\nprint('result', w)\n"
    )
    assert lives.shim() == 0
    assert "never reached" not in lives.err.read_text()
    lives = written(tmp_path, "def fit(w):\n    for i in range(3):\n        w -= 0.1 * w\nprint('result')\n")
    assert lives.shim(options=("--name", "other")) == 0
    assert "no training step was seen, so nothing was saved on the way" in lives.err.read_text()


TOLD = """
import os, signal
class Told(SystemExit):
    pass
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
w = 1.0
for i in range(9):
    w -= 0.1 * w
    if i == 4 and not os.path.exists("{mark}"):
        open("{mark}", "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
    if told:
        raise Told
print("result", w)
"""


def test_a_library_that_leaves_by_itself_when_it_is_told_to_is_not_done(
    sqlite_home: Home, tmp_path: Path
) -> None:
    """X4. As Lightning does: its own handler hears of SIGTERM, and it exits with 0 in the middle."""
    lives = written(tmp_path, TOLD.format(mark=sqlite_home.settings.home / "mark"))
    options = ("--name", "job", "--every", "2")
    assert lives.shim(options=options) == DRAINED_CODE, lives.err.read_text()
    assert lives.shim(options=options) == 0, lives.err.read_text()
    assert float(lives.result.split()[1]) == pytest.approx(0.9**9)
    each_step_once("job", 9)


FLAGGED = """
import os, signal
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
assert signal.getsignal(signal.SIGTERM).__name__ == "<lambda>"
w = 1.0
for i in range(9):
    w -= 0.1 * w
    if i == 4 and not os.path.exists("{mark}"):
        open("{mark}", "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
    if told:
        break
print("result", w, told)
"""


def test_a_script_s_own_handler_is_not_told_of_our_warning(sqlite_home: Home, tmp_path: Path) -> None:
    """X1. What it would be told would be saved with it, and end the run that goes on before its time."""
    lives = written(tmp_path, FLAGGED.format(mark=sqlite_home.settings.home / "mark"))
    options = ("--name", "job", "--every", "2")
    assert lives.shim(options=options) == DRAINED_CODE, lives.err.read_text()
    assert lives.shim(options=options) == 0, lives.err.read_text()
    assert lives.result == f"result {eval_steps(9)} []"
    each_step_once("job", 9)


NO_LOOP = """
import os, signal
with open("log.txt", "a") as log:
    log.write("begun\\n")
os.kill(os.getpid(), signal.SIGTERM)
print("result", sum(range(10)))
"""


def test_a_script_without_steps_that_came_to_its_end_is_done(
    sqlite_home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X4. It was told to leave, and had nothing to be saved: run again, it would do all of it twice."""
    monkeypatch.chdir(tmp_path)
    lives = written(tmp_path, NO_LOOP)
    assert lives.shim(options=("--name", "job")) == 0, lives.err.read_text()
    assert lives.result == "result 45"
    assert (tmp_path / "log.txt").read_text() == "begun\n"
    # Started once more, it is not done once more: what it appends is there once.
    assert lives.shim(options=("--name", "job")) == 0
    assert "finished already, at step 1; nothing was run" in lives.err.read_text()
    assert (tmp_path / "log.txt").read_text() == "begun\n"


BEFORE = """
import os, signal
if os.path.exists("{mark}"):
    os.kill(os.getpid(), signal.SIGTERM)
w = 1.0
for i in range(6):
    w -= 0.1 * w
print("result", w)
"""


def test_told_to_leave_before_the_loop(sqlite_home: Home, tmp_path: Path) -> None:
    """While it prepares, or while it is put back: no step is begun, what is committed stays."""
    mark = sqlite_home.settings.home / "mark"
    lives = written(tmp_path, BEFORE.format(mark=mark))
    assert lives.shim(options=("--name", "job"), at=3, number=signal.SIGTERM) == DRAINED_CODE
    mark.touch()
    assert lives.shim(options=("--name", "job")) == DRAINED_CODE
    left = left_of("job")
    assert left.head is not None
    assert left.head.step == 3
    mark.unlink()
    assert lives.shim(options=("--name", "job")) == 0
    assert float(lives.result.split()[1]) == pytest.approx(0.9**6)
    each_step_once("job", 6)
