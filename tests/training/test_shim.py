"""Scripts as people write them, unchanged: killed and told to leave at random steps, they end with what plain `python` prints."""

from __future__ import annotations

import os
import random
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sublet import shim
from sublet.core.errors import BadInput
from sublet.core.exits import DRAINED_CODE
from sublet.rewriting.finding import find
from sublet.runtime import train
from tests.runtime.conftest import Home
from tests.training.rig import Left, ended, forked, left_of

SCRIPTS = Path(__file__).parent / "scripts"
#: How often each script is disturbed before it may end.
DISTURBED = int(os.environ.get("SUBLET_SHIM_DISTURBED", "3"))
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

    def shim(self, *args: str, options: tuple[str, ...] = (), at: int = 0, number: int = 0) -> int:
        """With a signal to itself in the body of step `at`."""

        def work() -> None:
            count = train.Run.end_step

            def end_step(run: train.Run) -> None:
                if run.step + 1 == at:
                    os.kill(os.getpid(), number)
                count(run)

            train.Run.end_step = end_step  # type: ignore[method-assign]
            sys.argv = ["shim", "--vram", "1GiB", "--quiet", *options, str(self.script), *args]
            shim.main()

        return self._forked(work)

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
    seed = int(os.environ.get("SUBLET_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
    print(f"SUBLET_SEED={seed}")
    chance = random.Random(seed)
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
    for _ in range(2):  # the second finds everything done
        assert lives.shim(options=options) == 0, lives.err.read_text()
        assert lives.result == calm
        each_step_once("job", steps)


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
    inner, outer = (
        next(n for n, line in enumerate(lines, 1) if line.lstrip().startswith(text))
        for text in ("for xb, yb in", "for epoch in")
    )
    assert f"training loop   line {inner}, a 'for' in main: its body descends" in said
    assert f"inside          line {outer}, a 'for' in main" in said
    assert "variables       of main: " in said
    assert "saved           params: dict, 384B" in said
    assert "result" not in said


# --- what is refused, before anything runs -------------------------------------------------------------------

REFUSED = {
    "x = 1\n": "it has no loop that trains",
    "for a in b:\n  l.backward(); o.step()\nfor c in d:\n  l.backward(); o.step()\n": "in more than one loop (lines 1, 3)",
    "it = iter(x)\nfor a in range(9):\n  b = next(it)\n  l.backward(); o.step()\n": "line 3: next(it) reads from an iterator",
    "for a in b:\n  l.backward(); o.step()\nelse:\n  pass\n": "line 1: the training loop has an 'else'",
    "def f():\n  for a in b:\n    l.backward(); o.step()\nf()\nf()\n": "line 5: f, which trains, is called in more than one place",
    "async def f():\n  async for a in b:\n    l.backward(); o.step()\n": "line 2: the training loop is an 'async for'",
    "def f():\n  for a in b:\n    l.backward(); o.step()\n    yield a\n": "line 1: the training loop is inside a generator",
    "def f():\n  for a in b:\n    l.backward(); o.step()\n[f() for _ in c]\n": "line 4: training is started inside an expression",
    "import sublet\nrun = sublet.train('x', {})\n": "line 2: it resumes by itself",
    "for a in b\n": "is no Python program: expected ':' in line 1",
}


@pytest.mark.parametrize("source", REFUSED)
def test_refused_with_its_line_and_what_to_do(source: str) -> None:
    with pytest.raises(BadInput) as refused:
        find(source, "train.py")
    assert REFUSED[source] in refused.value.message
    assert "nothing was started" in refused.value.message
    assert refused.value.remedy


def test_the_loop_can_be_named() -> None:
    found = find(
        "for a in b:\n  l.backward(); o.step()\nfor c in d:\n  l.backward(); o.step()\n", "x.py", line=3
    )
    assert found.training.line == 3
    with pytest.raises(BadInput, match="loops begin in lines 1"):
        find("for a in b:\n  pass\n", "x.py", line=2)


def test_an_error_of_ours_names_the_two_lines(sqlite_home: Home, tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("print('never seen')\n")
    done = command(sqlite_home, tmp_path, "none.py")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "run = sublet.train(" in done.stderr
    assert "for step in run.steps(n)" in done.stderr
    done = command(sqlite_home, tmp_path, "none.py", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "one of several" in done.stderr


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
    began = time.monotonic()
    try:
        time.sleep(60)
    finally:
        print("waited", time.monotonic() - began)
print("result", w)
"""


def test_told_to_leave_after_the_loops(sqlite_home: Home, tmp_path: Path) -> None:
    """All steps are committed, what follows is not done: it leaves soon, and the next start does only that."""
    lives = written(tmp_path, AFTER.format(mark=tmp_path / "mark"))
    assert lives.shim(options=("--name", "job", "--every", "4")) == DRAINED_CODE
    each_step_once("job", 6)
    said = lives.out.read_text()
    assert "result" not in said
    for waited in re.findall(r"^waited (.*)$", said, re.M):  # nothing, when it was told before it waited
        assert float(waited) < 59, "it heard when its wait was over"
    assert lives.shim(options=("--name", "job"), at=1, number=signal.SIGKILL) == 0  # no step is made
    assert float(lives.result.split()[1]) == pytest.approx((0.9**3 * 2) * 0.9**3 * 2 + 1)
    each_step_once("job", 6)


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


def test_a_script_with_a_handler_for_our_signal_keeps_it_and_leaves_between_two_waits(
    sqlite_home: Home, tmp_path: Path
) -> None:
    lives = written(tmp_path, BUSY_SIGNAL)
    assert lives.shim(options=("--name", "job", "--every", "3")) == DRAINED_CODE
    each_step_once("job", 3)
    assert lives.out.read_text() == "urgent\n"


def test_another_script_does_not_continue_it(sqlite_home: Home, tmp_path: Path) -> None:
    lives = written(tmp_path, "w = 1.0\nfor i in range(5):\n    w -= 0.1 * w\nprint('result', w)\n")
    assert lives.shim(options=("--name", "job", "--every", "1"), at=4, number=signal.SIGTERM) == DRAINED_CODE
    written(tmp_path, "w = 1.0\nfor e in [1]:\n  for i in range(5):\n    w -= 0.1 * w\nprint('result', w)\n")
    assert lives.shim(options=("--name", "job")) == 2
    assert "of a script with other loops" in lives.err.read_text()
    written(tmp_path, "w = 1.0\nfor i in range(2):\n    w -= 0.1 * w\nprint('result', w)\n")
    assert lives.shim(options=("--name", "job")) == 2
    assert "ended after 2 items, and 4 were consumed" in lives.err.read_text()


CARRIED = """
w, state = 1.0, iter(range(9))
for i in range(6):
    w -= 0.1 * w
    state = state if i else iter(range(5))
print("result", w)
"""


def test_what_cannot_be_saved_and_is_carried_is_said(sqlite_home: Home, tmp_path: Path) -> None:
    lives = written(tmp_path, CARRIED)
    assert lives.shim(options=("--name", "job", "--every", "2")) == 0
    assert lives.err.read_text().count("warning: state is a range_iterator, which cannot be saved") == 1


TWICE = """
def fit():
    w = 1.0
    for i in range(3):
        w -= 0.1 * w
    return w
for f in (fit, fit):
    f()
"""


def test_a_loop_begun_twice_is_said(sqlite_home: Home, tmp_path: Path) -> None:
    lives = written(tmp_path, TWICE)
    assert lives.shim(options=("--name", "job")) == 2
    assert "was begun a second time" in lives.err.read_text()


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
    assert lives.shim() == 0
    assert "line 2 was never reached: nothing was saved" in lives.err.read_text()


BEFORE = """
import os, signal
os.kill(os.getpid(), signal.SIGTERM)
w = 1.0
for i in range(6):
    w -= 0.1 * w
print("result", w)
"""


def test_told_to_leave_before_the_loop(sqlite_home: Home, tmp_path: Path) -> None:
    """While it prepares, or while it is put back: no step is begun, what is committed stays."""
    lives = written(tmp_path, BEFORE.replace("os.kill(", "# "))
    assert lives.shim(options=("--name", "job"), at=3, number=signal.SIGTERM) == DRAINED_CODE
    written(tmp_path, BEFORE)
    assert lives.shim(options=("--name", "job")) == DRAINED_CODE
    left = left_of("job")
    assert left.head is not None
    assert left.head.step == 3
    written(tmp_path, BEFORE.replace("os.kill(", "# "))
    assert lives.shim(options=("--name", "job")) == 0
    assert float(lives.result.split()[1]) == pytest.approx(0.9**6)
    each_step_once("job", 6)
