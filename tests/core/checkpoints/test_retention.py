"""Which versions are kept, and that the user is told why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.checkpoints.retention import Retention, floor_of, judge
from sublet.core.errors import BadInput


def kept(versions: range, rule: Retention, tags: dict[int, list[str]] | None = None) -> list[int]:
    return [v.version for v in judge(versions, tags or {}, rule) if v.keep]


def test_rules() -> None:
    assert kept(range(1, 11), Retention()) == list(range(10, 0, -1))
    assert kept(range(1, 11), Retention(last=3)) == [10, 9, 8]
    assert kept(range(1, 11), Retention(last=1)) == [10]
    assert kept(range(1, 11), Retention(every=4)) == [10, 8, 4]
    assert kept(range(1, 11), Retention(last=2, every=5), {3: ["best"]}) == [10, 9, 5, 3]
    assert kept(range(0), Retention(last=2)) == []


def test_reasons() -> None:
    verdicts = judge(range(1, 7), {2: ["best", "a"], 6: ["x"]}, Retention(last=2, every=3))
    assert [(v.version, v.reason) for v in verdicts] == [
        (6, "the newest; tagged x; a multiple of 3"),
        (5, "one of the last 2"),
        (4, "no rule keeps it"),
        (3, "a multiple of 3"),
        (2, "tagged a, best"),
        (1, "no rule keeps it"),
    ]
    assert [v.reason for v in judge([1, 2], {}, Retention())] == ["the newest", "no rule drops it"]


@pytest.mark.parametrize("bad", [-1, 1 << 63, True, 1.5, "3", None])
def test_bad_rules(bad: object) -> None:
    for name in ("last", "every"):
        with pytest.raises(BadInput, match=name):
            Retention(**{name: bad})  # type: ignore[arg-type]


@given(
    st.sets(st.integers(1, 60)),
    st.dictionaries(st.integers(1, 60), st.just(["t"])),
    st.integers(0, 10),
    st.integers(0, 10),
)
def test_always(versions: set[int], tags: dict[int, list[str]], last: int, every: int) -> None:
    verdicts = judge(versions, tags, Retention(last=last, every=every))
    assert [v.version for v in verdicts] == sorted(versions, reverse=True)
    assert all(v.reason for v in verdicts)
    keep = {v.version for v in verdicts if v.keep}
    assert keep >= set(sorted(versions)[-max(last, 1) :]) | (set(tags) & versions)
    # Judged again, nothing more is dropped.
    again = {v.version for v in judge(keep, tags, Retention(last=last, every=every)) if v.keep}
    assert again == keep
    floor = floor_of(versions, keep)
    assert (floor == 0) == (not versions)
    assert all(v in keep for v in versions if v >= floor)
    below = [v for v in versions if v < floor]
    assert not below or max(below) not in keep
