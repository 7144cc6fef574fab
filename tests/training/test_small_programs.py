"""Small programs that once ended silently different, died when they went on, or were refused for nothing: each is exact now.

What stands together in one recipe was found apart; `python -m tests.training.programs --recipe … --schedule …` tries one thing alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.homes import Home
from tests.training.programs.judge import Judge, Kind, schedule_of
from tests.training.programs.life import Starter
from tests.training.programs.make import cook, recipe_of
from tests.training.programs.report import shown, told

FOUND = {
    "what waits in a half-built expression": (
        "frame=function site=dict_half_built deque_iterator memoryview_cast tuple_subclass_with_attributes "
        "csv_dict_reader own_context generator_that_handles_an_exception",
        "1n:5,9+",
    ),
    "what a program sees to be gone": (
        "weak_reference_callback finalizer_of_an_object weak_reference weak_value_dictionary weak_keys_and_sets "
        "generator_with_finally",
        "1r2:3,9",
    ),
    "namespaces of its own": (
        "exec_of_text eval_of_text function_given_other_code deque_with_a_limit@module_made_by_hand module_path_extended",
        "1n:6,10",
    ),
    "what it changes in its process": (
        "library_replaced_midway name_in_builtins signal_handler_set_in_the_loop warning_filters "
        "state_of_the_garbage_collector file_mask",
        "1n:7,10",
    ),
    "logging": (
        "logging_handler logging_filter_and_level log_file_of_a_handler log_files_that_rotate",
        "1n:5+,9",
    ),
    "places in iterators": (
        "around=temporary_folder set_iterator zip_with_cycle pairwise_kept class_of_an_object_changed "
        "typed_named_tuple deque_with_a_limit@namespace",
        "1r3:7r",
    ),
    "an environment that it changes, restarted": (
        "loop=items_of_a_dict environment_variable object_that_refuses_strangers",
        "1r2:6r",
    ),
    "killed before its first save": ("line_appended_each_step", "1n:2"),
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Starter() as starter:
        made = Judge(starter)
        yield made
        made.close()


@pytest.mark.parametrize("name", FOUND)
def test_exact(name: str, judge: Judge) -> None:
    recipe, schedule = FOUND[name]
    verdict = judge.judge(cook(recipe_of(recipe)), schedule_of(schedule))
    assert verdict.kind is Kind.EXACT, f"{told(verdict)}\n{shown(verdict.program)}"


FAILS_ONCE = """
import os
import random

class Seen:
    def __del__(self):
        print("seen to its end")

kept = Seen()
log = open("log.txt", "w")
w = 0.0
for step in range(8):
    with open("lines.txt", "a") as lines:
        lines.write(f"{step}\\n")
    log.write(f"{step}\\n")
    if step == 5 and "FAILS" in os.environ:
        raise RuntimeError("once")
    w -= 0.1 * random.random()
"""


#: A version of a script is rehearsed after so many of its steps, in an interpreter that has imported nothing else.
REHEARSED = """
import runpy, sys
from sublet.training.scripts import rehearsal
rehearsal.MOST_REPEATED = {after}
runpy.run_module("sublet.shim", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("after", [2, 40], ids=["rehearsed", "over before its rehearsal"])
def test_a_script_that_failed_goes_on_with_its_files(after: int, sqlite_home: Home, tmp_path: Path) -> None:
    """At its end, what nobody closed is written and what nobody holds any more is finalized, as plain Python does it."""
    (tmp_path / "train.py").write_text(FAILS_ONCE)
    command = [sys.executable, "-c", REHEARSED.format(after=after)]
    command += ["--quiet", "--vram", "1GiB", "--every", "2", "train.py"]
    plain = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    printed = []
    for more in ({"FAILS": "1"}, {}):
        done = subprocess.run(
            [*command[:-1], "--changed-ok", command[-1]],
            cwd=tmp_path,
            env=sqlite_home.environment | plain | more,
            capture_output=True,
            text=True,
            timeout=60,
        )
        printed.append((done.returncode, done.stdout))
    assert [code for code, _ in printed] == [1, 0]
    assert "".join(out for _, out in printed) == "seen to its end\n", printed
    for name in ("lines.txt", "log.txt"):
        assert (tmp_path / name).read_text() == "".join(f"{n}\n" for n in range(8))
