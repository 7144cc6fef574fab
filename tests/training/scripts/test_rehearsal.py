"""When a version is rehearsed, and what is made of the differences."""

from __future__ import annotations

from pathlib import Path

from sublet.core.values import SECOND_US
from sublet.training.program_state.comparing import Difference
from sublet.training.scripts.rehearsal import (
    CHEAP_BEGINNING_US,
    MOST_REPEATED,
    WORTH_IT_AFTER,
    RehearsalPlan,
    RememberedVersion,
    Repetition,
    judged,
)


def test_it_is_saved_at_the_first_step_and_started_again_two_seconds_later() -> None:
    plan = RehearsalPlan(SECOND_US)
    assert plan.after(1, 10 * SECOND_US, SECOND_US) == "save"
    assert plan.after(2, 11 * SECOND_US, SECOND_US) == ""
    assert plan.after(3, 12 * SECOND_US, SECOND_US) == "restart"


def test_a_step_at_least_is_repeated_and_forty_at_most() -> None:
    plan = RehearsalPlan(SECOND_US)
    plan.after(5, 0, SECOND_US)
    assert plan.after(5, 9 * SECOND_US, SECOND_US) == ""
    assert plan.after(6, 9 * SECOND_US, SECOND_US) == "restart"
    fast = RehearsalPlan(SECOND_US)
    fast.after(5, 0, SECOND_US)
    assert fast.after(5 + MOST_REPEATED - 1, 1, SECOND_US) == ""
    assert fast.after(5 + MOST_REPEATED, 1, SECOND_US) == "restart"


def test_a_long_beginning_is_repeated_only_where_it_is_worth_it() -> None:
    plan = RehearsalPlan(CHEAP_BEGINNING_US + 1)
    worth = WORTH_IT_AFTER * plan.beginning_us
    assert plan.after(1, 0, worth - 1) == ""
    assert plan.after(2, 0, worth) == "save"


def difference(path: str, sort: str) -> Difference:
    return Difference(path, "a", "b", sort)


def test_what_differs_by_itself_is_told_from_what_is_lost() -> None:
    took, weights, lost = (
        difference("times[3]", "number"),
        difference("w", "array"),
        difference("n", "number"),
    )
    assert judged([took], [difference("times[9]", "number")]) == ([], {"times[…]"})
    assert judged([took, lost], [took]) == ([lost], {"times[…]"})
    assert judged([weights], [weights]) == ([weights], set())
    assert judged([took], [took, weights]) == ([weights], {"times[…]"})
    assert judged([lost], []) == ([lost], set())


def test_a_host_remembers_what_varies(tmp_path: Path) -> None:
    version = RememberedVersion(tmp_path / "new" / "x.json").read()
    assert (version.rehearsed, version.varies) == (False, set())
    version.rehearsed, version.varies = True, {"times[…]"}
    version.keep()
    again = RememberedVersion(tmp_path / "new" / "x.json").read()
    assert (again.rehearsed, again.varies) == (True, {"times[…]"})
    array = difference("times[1]", "array")
    assert again.telling([difference("times[7]", "number"), array, difference("n", "number")]) == [
        array,
        difference("n", "number"),
    ]
    (tmp_path / "new" / "x.json").write_text("{")
    assert not RememberedVersion(tmp_path / "new" / "x.json").read().rehearsed


def test_a_repetition_is_taken_once(tmp_path: Path) -> None:
    repetition = Repetition(tmp_path / "new" / "x.repeated")
    assert repetition.take() is None
    repetition.keep((b"data", {"a": "b"}))
    assert repetition.take() == (b"data", {"a": "b"})
    assert repetition.take() is None
