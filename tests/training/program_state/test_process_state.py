"""What a program changes in its process besides its objects: put back as it was (X1)."""

from __future__ import annotations

import decimal
import os
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.training.program_state.process_state import ForeignVariables, put_process, take_process
from tests.training.program_state.carried import assert_carried


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    since = dict(os.environ)
    before = take_process(since)
    yield
    for name in set(os.environ) - set(since):
        del os.environ[name]
    os.environ.update(since)
    put_process(before, since)


def test_it_is_as_it_was_taken(tmp_path: Path) -> None:
    since = dict(os.environ)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    os.environ.update(MINE="1", ALSO="2")
    os.environ.pop("HOME", None)
    os.chdir(first)
    sys.setrecursionlimit(5000)
    decimal.getcontext().prec = 7
    taken = take_process(since)
    drawn = random.random()
    os.environ.update(MINE="3", OTHER="4", HOME="/elsewhere")
    del os.environ["ALSO"]
    os.chdir(second)
    sys.setrecursionlimit(6000)
    decimal.getcontext().prec = 9
    put_process(taken, since)
    assert random.random() == drawn
    assert (os.environ["MINE"], os.environ["ALSO"]) == ("1", "2")
    assert "HOME" not in os.environ
    assert "OTHER" not in os.environ
    assert Path.cwd() == first
    assert sys.getrecursionlimit() == 5000
    assert decimal.getcontext().prec == 7


def test_a_change_that_was_not_there_is_undone() -> None:
    since = {**os.environ, "MINE": "1"}
    os.environ["MINE"] = "1"
    taken = take_process(since)
    os.environ["MINE"] = "2"
    put_process(taken, since)
    assert os.environ["MINE"] == "1"


def test_what_the_lease_decides_belongs_to_the_process() -> None:
    since = dict(os.environ)
    os.environ.update(CUDA_VISIBLE_DEVICES="3", SUBLET_LEASE_ID="x")
    taken = take_process(since)
    assert taken["environment"] == {}
    os.environ["CUDA_VISIBLE_DEVICES"] = "4"
    put_process(taken, since)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"


@pytest.fixture
def installed() -> Iterator[types.ModuleType]:
    made = types.ModuleType("somebodys")
    exec("level = 1\nname = 'a'\ncache = {}\nclass Options:\n    rate = 0.5\n", made.__dict__)
    sys.modules["somebodys"] = made
    yield made
    del sys.modules["somebodys"]


def test_numbers_and_texts_of_installed_modules_that_changed(installed: types.ModuleType) -> None:
    watch = ForeignVariables(lambda name: False)
    watch.begin()
    assert watch.take().get(("somebodys", "")) is None
    installed.level, installed.Options.rate, installed.new = 2, 0.25, "mine"  # type: ignore[attr-defined]
    taken = {place: values for place, values in watch.take().items() if place[0] == "somebodys"}
    assert taken == {("somebodys", ""): {"level": 2, "new": "mine"}, ("somebodys", "Options"): {"rate": 0.25}}
    installed.level, installed.Options.rate = 7, 7  # type: ignore[attr-defined]
    del installed.new
    watch.put(taken)
    assert (installed.level, installed.Options.rate, installed.new, installed.name) == (2, 0.25, "mine", "a")  # type: ignore[attr-defined]


def test_the_programs_own_modules_are_not_foreign(installed: types.ModuleType) -> None:
    watch = ForeignVariables(lambda name: name == "somebodys")
    watch.begin()
    installed.level = 2
    assert ("somebodys", "") not in watch.take()


PROGRAMS = {
    "a decimal context that two hold": """
import contextvars, decimal
held = decimal.getcontext()
begin()
copied = None
for i in range(5):
    if i == 1:
        copied = contextvars.Context()
        copied.run(decimal.setcontext, held)
    decimal.getcontext().prec += 1
    step()
    print(held is decimal.getcontext(), held.prec, copied and copied.run(decimal.getcontext) is held)
""",
    "what it was warned of": """
import string, sys, threading, warnings
shown = []
warnings.showwarning = lambda message, *rest: shown.append(str(message))
warnings.simplefilter("default")
warnings.warn_explicit("of a library", UserWarning, "x", 1, registry=vars(string).setdefault("__warningregistry__", {}))
begin()
for i in range(5):
    if i == 3:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
    warnings.warn("mine")
    warnings.warn_explicit("of a library", UserWarning, "x", 1, registry=vars(string)["__warningregistry__"])
    name = threading.Thread(target=print).name
    step()
    print(shown, name)
""",
    "random numbers, environment, switches": """
import decimal, os, random, string
random.seed(3)
begin()
for i in range(5):
    random.random()
    os.environ["MINE"] = str(i)
    if i == 1:
        os.environ["ONCE"] = "1"
        os.environ.pop("HOME", None)
    decimal.getcontext().prec = 5 + i
    string.mine = i
    step()
    print(random.random(), os.environ["MINE"], os.environ.get("ONCE"), os.environ.get("HOME"), decimal.Decimal(1) / 3, string.mine)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_goes_on_elsewhere(name: str) -> None:
    assert_carried(PROGRAMS[name])


def test_how_arrays_are_printed_and_random_numbers_of_the_system_go_on_elsewhere() -> None:
    assert_carried("""
import random
import numpy as np
early = random.SystemRandom()
early.asked = []
begin()
for n in range(6):
    if n == 1: np.set_printoptions(precision=1)
    early.asked.append(0 <= early.random() < 1)
    late = random.SystemRandom()
    step()
    print(np.array([1.23456]), early.asked, 0 <= late.random() < 1)
""")
