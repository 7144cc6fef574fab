"""Refusals that are journalled one by one, and those that are summed up (A1)."""

from __future__ import annotations

from sublet.core.journal.refusals import ROWS_IN_SPAN, SPAN_US, RefusalTally, count_refusal, is_over


def test_a1_the_first_have_a_row_each_and_the_rest_are_counted() -> None:
    tally, rows = None, 0
    for n in range(1000):
        tally, by_itself = count_refusal(tally, 5 + n)
        rows += by_itself
    assert tally == RefusalTally(since=5, rows=ROWS_IN_SPAN, more=1000 - ROWS_IN_SPAN)
    assert rows == ROWS_IN_SPAN


def test_a_minute_is_over_after_a_minute() -> None:
    tally = RefusalTally(since=5)
    assert not is_over(tally, 5 + SPAN_US - 1)
    assert is_over(tally, 5 + SPAN_US)
