"""The error tree: one class, one code, one message, one next thing to do."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from sublet.core import errors
from sublet.core.errors import (
    BadInput,
    DeviceFault,
    Disconnected,
    HeadMoved,
    InvariantBroken,
    LeaseLost,
    Misconfigured,
    NotDurable,
    Refused,
    ResumeDiffers,
    Stale,
    SubletError,
    Unauthorized,
    error_by_code,
    error_tree,
)

#: A subclass made inside another test must not disturb this one, nor one that says more in the words of its parent's code.
OURS = [cls for cls in error_tree() if cls.__module__.startswith("sublet.") and "code" in vars(cls)]
FAMILIES = (
    Refused,
    LeaseLost,
    Stale,
    NotDurable,
    DeviceFault,
    Disconnected,
    BadInput,
    Misconfigured,
    ResumeDiffers,
    Unauthorized,
    InvariantBroken,
)


def test_the_tree_names_every_class_once_parents_first() -> None:
    defined = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, SubletError) and value.__module__ == errors.__name__
    }
    assert defined <= set(OURS)
    assert len(OURS) == len(set(OURS))
    for cls in OURS[1:]:
        parents = [p for p in cls.__bases__ if issubclass(p, SubletError)]
        assert parents
        assert all(OURS.index(p) < OURS.index(cls) for p in parents)


def test_codes_are_unique_and_stable_words() -> None:
    codes = [cls.code for cls in OURS]
    assert len(codes) == len(set(codes))
    for cls in OURS:
        assert "code" in vars(cls), f"{cls.__name__} borrows its parent's code"
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cls.code)


def test_a_code_leads_back_to_its_class() -> None:
    for cls in OURS:
        assert error_by_code(cls.code) is cls
    assert error_by_code("no such code") is SubletError
    assert error_by_code("") is SubletError


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_each_class_says_what_happened_and_what_to_do_next(cls: type[SubletError]) -> None:
    assert "__doc__" in vars(cls)
    raised = cls()
    assert raised.message == str(raised) == (cls.__doc__ or "").strip()
    assert raised.message.endswith(".")
    assert "\n" not in raised.message
    assert raised.remedy
    assert raised.remedy == cls.remedy


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_an_error_travels_between_processes_whole(cls: type[SubletError]) -> None:
    raised = cls("said in words", remedy="do this")
    back = pickle.loads(pickle.dumps(raised))
    assert type(back) is cls
    assert (back.message, back.remedy, back.code) == ("said in words", "do this", cls.code)
    # One error's own remedy is not its class's.
    assert cls().remedy != "do this"


def test_every_class_belongs_to_exactly_one_family() -> None:
    for cls in OURS[1:]:
        assert sum(issubclass(cls, family) for family in FAMILIES) == 1, cls.__name__


def test_bad_input_is_a_value_error_and_nothing_else_is() -> None:
    assert issubclass(BadInput, ValueError)
    assert all(issubclass(cls, BadInput) or not issubclass(cls, ValueError) for cls in OURS)


def test_a_moved_head_says_where_it_is() -> None:
    assert HeadMoved("moved", version=7).version == 7
    assert pickle.loads(pickle.dumps(HeadMoved("moved", version=7))).version == 7
