"""The operator's knobs: read once, checked once, kept as text."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.errors import BadInput
from sublet.core.leasing.policy import Policy
from sublet.core.values import DAY_US, HOUR_US, MINUTE_US, SECOND_US

NAMES = [f.name for f in fields(Policy)]
DURATIONS = [name for name in NAMES if name.endswith("_us")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-1, 1.5, "5m", None, float("nan")])
def test_a_knob_that_is_negative_or_no_integer_is_refused(name: str, value: object) -> None:
    with pytest.raises(BadInput, match=name):
        Policy(**{name: value})  # type: ignore[arg-type]


def test_a_half_life_under_an_hour_is_refused() -> None:
    assert Policy(half_life_us=HOUR_US)
    with pytest.raises(BadInput, match="hour"):
        Policy(half_life_us=HOUR_US - 1)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from([n for n in NAMES if n != "strict_hold"]), st.integers(HOUR_US, DAY_US))
)
def test_text_brings_back_the_same_policy(changed: dict[str, int]) -> None:
    policy = Policy(**changed)
    assert Policy.from_text(policy.to_text()) == policy


def test_text_of_another_version_keeps_what_is_known_and_the_defaults_of_the_rest() -> None:
    assert Policy.from_text("") == Policy.from_text("{}") == Policy()
    assert Policy.from_text('{"grace_us": 5, "not_yet_invented": 1}') == Policy(grace_us=5)
    with pytest.raises(BadInput):
        Policy.from_text('{"grace_us": -5}')


def test_a_table_is_read_in_the_words_people_write() -> None:
    table = {"grace": "30s", "hold_cap": "1h30m", "cooldown": 90, "strict_hold": True, "waitlist_max": 50}
    assert Policy.from_table(table) == Policy(
        grace_us=30 * SECOND_US,
        hold_cap_us=90 * MINUTE_US,
        cooldown_us=90 * SECOND_US,
        strict_hold=True,
        waitlist_max=50,
    )
    assert Policy.from_table({}) == Policy()


@pytest.mark.parametrize("name", DURATIONS)
def test_every_duration_has_a_short_name_in_the_table(name: str) -> None:
    short = name.removesuffix("_us")
    assert Policy.from_table({short: "2h"}) == replace(Policy(), **{name: 2 * HOUR_US})


@pytest.mark.parametrize(
    "table",
    [
        {"grace": "soon"},
        {"grace": -5},
        {"grace": True},
        {"grace": None},
        {"grace": [5]},
        {"half_life": "5m"},
        {"waitlist_max": "50"},
        {"waitlist_max": -1},
        {"gracee": "30s"},
        {"": 1},
        {"grace'; DROP TABLE pool; --": 1},
    ],
    ids=str,
)
def test_a_table_with_a_mistake_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        Policy.from_table(table)


@pytest.mark.parametrize("table", [{"waitlist_max": True}, {"strict_hold": 5}], ids=str)
def test_a_switch_is_not_a_number_nor_a_number_a_switch(table: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        Policy.from_table(table)


def test_an_unknown_knob_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BadInput) as caught:
        Policy.from_table({"gracee": "30s"})
    for name in NAMES:
        assert name.removesuffix("_us") in caught.value.message


def test_the_defaults_are_in_proportion() -> None:
    policy = Policy()
    # Restoring costs about a minute: a grace shorter than a renewal band or a cap shorter than a run would only burn it.
    assert policy.idle_after_us < policy.grace_us < policy.min_run_us < policy.hold_cap_us
    assert policy.offer_hold_us <= policy.waiter_silence_us
    assert policy.strict_hold is False
