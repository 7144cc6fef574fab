"""A forked Python is told from one that was started only by how soon it is there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import needed

PROGRAMS = {
    "says": "import sys; print(sys.argv, __name__, sys.path[0]); print('wrong', file=sys.stderr)",
    "code": "raise SystemExit(300)",
    "words": "raise SystemExit('no')",
    "none": "raise SystemExit",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "at exit": "import atexit; atexit.register(print, 'bye'); print('hello')",
    "let go": "class A:\n  def __del__(self): print('gone')\na = A()",
    "unread": "import os; r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w); print('x')",
    "unflushed": "import sys; sys.stdout.write('half a line')",
    "unbuffered": "import os; print('x'); os._exit(3)",
    "killed": "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "environment": "import os; print(sorted(os.environ.items()), os.getcwd(), os.getenv('NEW'))",
    "descriptors": "import os; print(sorted(os.listdir('/proc/self/fd')))",
    "signals": "import signal; print(signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGINT))",
    "failpoints": "import os; from sublet.machine import failpoints; failpoints.failpoint('before_begin')",
    "children": "import subprocess; print(subprocess.run(['sh', '-c', 'exit 3']).returncode)",
    "main": "import pickle, __main__\nclass A: pass\nprint(pickle.loads(pickle.dumps(A)) is A is __main__.A)",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_if_it_were_started(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAMS[name], "one", "two three"]
    env = {
        "PATH": os.environ["PATH"],
        "LC_CTYPE": "C.UTF-8",
        "PYTHONPATH": str(forked.SOURCE),
        "SUBLET_FAILPOINTS": "before_begin=kill" if name == "failpoints" else "",
        "NEW": "é",
        "PYTHONUNBUFFERED": "1" if name == "unbuffered" else "",
    }
    started = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    done = forked.run(command, env=env, cwd=tmp_path, timeout=30)
    assert (done.returncode, done.stdout) == (started.returncode, started.stdout), done.stderr
    assert done.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_traceback_is_shown() -> None:
    done = forked.run([sys.executable, "-c", "1 / 0"])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_talked_to_stopped_and_killed() -> None:
    code = "for line in iter(input, 'end'): print(line.upper())"
    pipe = subprocess.PIPE
    with forked.Forked([sys.executable, "-u", "-c", code], stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("a\n")
        child.stdin.flush()
        assert child.stdout.readline() == "A\n"
        assert child.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)
        child.send_signal(signal.SIGKILL)
        assert child.wait(60) == child.poll() == -signal.SIGKILL


def test_each_is_a_process_of_its_own() -> None:
    code = "import os, random; print(os.getpid(), random.random())"
    said = [forked.run([sys.executable, "-c", code]).stdout.split() for _ in range(3)]
    assert len({pid for pid, _ in said}) == len({number for _, number in said}) == 3


def test_nobody_has_the_random_numbers_of_another() -> None:
    needed("torch")
    code = "import random, numpy, torch; print(random.random(), numpy.random.random(), torch.rand(()).item())"
    said = [forked.run([sys.executable, "-c", code]).stdout.split() for _ in range(3)]
    for numbers in zip(*said, strict=True):
        assert len(set(numbers)) == 3


def test_a_program_in_a_file_is_forked_and_so_is_what_it_starts(tmp_path: Path) -> None:
    """Both have the same parent, which is neither of them."""
    (tmp_path / "one.py").write_text(
        "import os, subprocess, sys, two\n"
        "print(__file__, sys.argv, os.getppid(), flush=True)\n"
        "print(two.words, subprocess.run([sys.executable, 'two.py']).returncode, os.getpid())\n"
        "subprocess.run('exit 3', shell=True)\n"
    )
    (tmp_path / "two.py").write_text(
        "import os\nwords = 'imported'\nprint(__name__, os.getppid(), flush=True)"
    )
    command = [sys.executable, str(tmp_path / "one.py"), "word"]
    done = forked.run(command, cwd=tmp_path, children_too=True, check=True)
    imported, first, second, last = done.stdout.splitlines()
    file, _, parent = first.rpartition(" ")
    assert file == f"{command[1]} {command[1:]}"
    assert second == f"__main__ {parent}"
    assert last.startswith("imported 0 ")
    assert parent != str(os.getpid()) != imported


def test_it_leaves_with_whoever_started_it() -> None:
    code = (
        "import sys; from tests import forked\n"
        "forked.run([sys.executable, '-c', 'pass'])\n"
        "print(forked.plain().process.pid, flush=True)\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.replace("from tests import forked", "from tests import forked; forked.MODULES = ()")],
        capture_output=True, text=True, cwd=forked.ROOT, check=False,
        env={**os.environ, "PYTHONPATH": f"{forked.SOURCE}:{forked.ROOT}"},
    )  # fmt: skip
    from tests.homes import process_is_gone, wait_until

    wait_until(lambda: process_is_gone(int(done.stdout)))


def test_it_runs_the_library_that_the_tests_run(tmp_path: Path) -> None:
    """A seeded bug is in a copy of the source: who is forked must have it too, or no test that forks could see it."""
    shutil.copytree(
        forked.SOURCE / "sublet", tmp_path / "sublet", ignore=shutil.ignore_patterns("__pycache__")
    )
    program = "import sublet; print(sublet.__file__)"
    asking = (
        f"import sys; from tests import forked; print(forked.run([sys.executable, '-c', {program!r}]).stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", asking],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(forked.ROOT)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / "sublet" / "__init__.py")
