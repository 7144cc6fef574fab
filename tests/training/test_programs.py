"""Random small programs, killed and resumed: each ends exactly as undisturbed, or is refused. None ends silently different.

`SUBLET_PROGRAMS` says how many (the proof asks for 2,000), `SUBLET_PROGRAMS_FIRST` the first seed. `python -m tests.training.programs`
does the same with statistics, and replays one program.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

from tests.conftest import need
from tests.training.programs.features import all_features
from tests.training.programs.holders import HOLDERS
from tests.training.programs.judge import (
    End,
    Judge,
    Kind,
    Schedule,
    Verdict,
    differs,
    draw_schedule,
    judged,
    schedule_of,
)
from tests.training.programs.life import Life, Starter
from tests.training.programs.make import Recipe, Use, alone, cook, draw_recipe, make_program, recipe_of
from tests.training.programs.report import shown, told

COUNT = int(os.environ.get("SUBLET_PROGRAMS", "10"))
FIRST = int(os.environ.get("SUBLET_PROGRAMS_FIRST", "1"))
#: Programs in one test, so that each stays within the time of a test.
TOGETHER = 10
#: Features whose life is proved: a sample, or with many programs all of them.
FEATURES = sorted(all_features())
PROVED = FEATURES if len(FEATURES) <= COUNT else random.Random(COUNT + FIRST).sample(FEATURES, 24)


@pytest.fixture(scope="module", autouse=True)
def _torch() -> None:
    need(find_spec("torch") is not None, "torch")


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with Starter() as made:
        yield made


@pytest.fixture(scope="module")
def judge(starter: Starter) -> Iterator[Judge]:
    made = Judge(starter)
    yield made
    made.close()


# --- the generator -------------------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_program() -> None:
    for seed in range(1, 400):
        program = make_program(seed)
        assert program == make_program(seed)
        assert recipe_of(str(program.recipe)) == program.recipe
        for name, text in program.files.items():
            if name.endswith(".py"):
                compile(text, name, "exec")


def test_everything_can_be_drawn() -> None:
    drawn = {name for seed in range(1, 4000) for name in draw_recipe(seed).names}
    assert not {name for name, _ in alone()} - drawn - {name for name, _ in alone() if _is_plain(name)}


def _is_plain(name: str) -> bool:
    return name.partition(":")[2] in ("array", "module", "assignment", "nothing", "range", "plain", "inline")


@pytest.mark.parametrize("part", range(4))
def test_each_feature_flows_into_the_result(part: int, judge: Judge) -> None:
    """A program that in its middle loses the state of one feature, and nothing else, ends otherwise. Two hash seeds change nothing."""

    def dead(name: str) -> str:
        feature = all_features()[name]
        if feature.needs and find_spec(feature.needs) is None:
            return ""
        recipe = Recipe(model="torch_sgd" if feature.weights == "torch" else "array", uses=(Use(name),))
        ends = [judge.plainly(cook(recipe), hash_seed=seed) for seed in (1, 2)]
        losing = judge.plainly(cook(recipe, forget=(0, 7)))
        for end in (*ends, losing):
            if isinstance(end, str):
                return f"{name}: {end}"
        one, other = ends
        if differs(one, other) or one.printed != other.printed:
            return f"{name} ends in two ways: {differs(one, other)}"
        return f"{name} is of no effect" if one.result == losing.result else ""

    with ThreadPoolExecutor(2) as pool:
        assert not [why for why in pool.map(dead, PROVED[part::4]) if why]


def test_each_holder_holds(judge: Judge) -> None:
    """The same feature has the same effect wherever its state is, and has none once that is forgotten."""
    ends, lost = set(), set()
    for name in HOLDERS:
        recipe = Recipe(uses=(Use("deque_with_a_limit", name),))
        for found, program in ((ends, cook(recipe)), (lost, cook(recipe, forget=(0, 7)))):
            end = judge.plainly(program)
            assert not isinstance(end, str), f"{name}: {end}"
            found.add(end.files["result.txt"].split(b"\n")[-1])  # the weights
    assert len(ends) == len(lost) == 1
    assert ends != lost


@pytest.mark.parametrize("first", range(FIRST, FIRST + min(COUNT, 400), 20))
def test_programs_end_alike_under_two_hash_seeds(first: int, judge: Judge) -> None:
    def unlike(seed: int) -> str:
        program = make_program(seed)
        if any(find_spec(name) is None for name in program.needs):
            return ""
        one, other = (judge.plainly(program, hash_seed=hash_seed) for hash_seed in (1, 2))
        if isinstance(one, str) or isinstance(other, str):
            return f"{seed}: {one} {other}"
        return differs(one, other) and f"{seed}: {differs(one, other)}"

    with ThreadPoolExecutor(2) as pool:
        assert not [why for why in pool.map(unlike, range(first, first + 20)) if why]


# --- the judge -----------------------------------------------------------------------------------------------


def test_schedules_can_be_written_down() -> None:
    for seed in range(300):
        schedule = draw_schedule(seed, 14)
        assert schedule_of(str(schedule)) == schedule
        assert 1 <= len(schedule.kills) <= 4
    assert schedule_of("1:") == Schedule(1, ())


ENDS = {
    "exact": (Life(code=0, out="a\nresult 1\n", steps=[]), Kind.EXACT),
    "another result": (Life(code=0, out="a\nresult 2\n", steps=[]), Kind.DIFFERENT),
    "no result": (Life(code=0, out="a\n", steps=[]), Kind.DIFFERENT),
    "another output": (Life(code=0, out="b\nresult 1\n", steps=[]), Kind.OUTPUT),
    "refused": (Life(code=2, err="sublet: it has no loop\n", steps=[]), Kind.REFUSED),
    "refused midway": (Life(code=2, err="sublet: it is gone\n", steps=[(4, 3)]), Kind.MIDWAY),
    "stopped by a check": (Life(code=73, err="sublet: state differs\n", steps=[(4, 3)]), Kind.MIDWAY),
    "refused without a word": (Life(code=2, steps=[]), Kind.CRASHED),
    "refused with a result": (Life(code=2, out="result 1\n", err="sublet: no\n", steps=[]), Kind.CRASHED),
    "our bug": (Life(code=70, err="sublet: broken\n", steps=[]), Kind.CRASHED),
    "a traceback": (
        Life(code=1, err="Traceback (most recent call last):\nKeyError: 1\n", steps=[]),
        Kind.CRASHED,
    ),
    "a segmentation fault": (Life(code=-11, steps=[]), Kind.CRASHED),
    "hung": (Life(code=-9, hung=True, steps=[]), Kind.HUNG),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_an_end_is_called(name: str, judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> None:
    life, kind = ENDS[name]
    verdict = Verdict(kind=Kind.SKIPPED, program=make_program(1), schedule=Schedule(1, ()), lives=[life])
    plain = End("result 1", "a\nresult 1\n", {})
    assert judge.ended(verdict, life, plain, tmp_path_factory.mktemp("end"))[0] is kind


def test_a_file_that_differs_is_a_difference() -> None:
    one, other = End("", "", {"log.csv": b"1\n2\n"}), End("", "", {"log.csv": b"1\n2\n2\n"})
    assert differs(one, one) == ""
    assert "another log.csv" in differs(one, other)
    assert differs(one, End("", "", {})) == "the file log.csv is not there"


def test_a_calm_program_is_exact_and_was_resumed(judge: Judge) -> None:
    """What any way of resuming manages: the judge itself changes nothing."""
    verdict = judge.judge(
        cook(Recipe(uses=(Use("global_random_states"),))), schedule_of("1:5+,9/0.0020g,start/0.0500")
    )
    assert verdict.kind is Kind.EXACT, told(verdict)
    assert [life.killed for life in verdict.lives][:2] == [True, True]
    assert verdict.resumed


# --- the shim ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, TOGETHER))
def test_exact_or_refused(first: int, starter: Starter) -> None:
    seeds = range(first, min(first + TOGETHER, FIRST + COUNT))
    bad: list[str] = []

    def report(judge: Judge, verdict: Verdict) -> None:
        if verdict.kind.bad:
            bad.append(f"{told(verdict)}\n{shown(verdict.program)}" if not bad else told(verdict))

    judged((make_program(seed) for seed in seeds), 2, report, starter=starter)
    assert not bad, "\n\n".join(bad)
