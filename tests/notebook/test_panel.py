"""What is shown of a bill."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from sublet.notebook.panel import _seconds, in_seconds


@given(st.lists(st.integers(0, 10**10)))
def test_the_seconds_that_are_shown_add_up_to_the_total_that_is_shown(parts: list[int]) -> None:
    shown = [Decimal(text) for text in in_seconds(parts)]
    assert sum(shown) == Decimal(_seconds(sum(parts)))
    for part, text in zip(parts, shown, strict=True):
        assert abs(Decimal(part) / 1_000_000 - text) <= Decimal("0.001")
