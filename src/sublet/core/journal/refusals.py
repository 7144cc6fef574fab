"""Refusals of what costs a tenant nothing to ask: the first of each minute have a journal row each, the
others one in all.

Rules of this file:
- Whoever asks is told why each time. What is bounded is the journal: a client that asks 200 times a second
  would fill a disk with rows that say the same (threat 27).
- Nothing is lost in the count: what had no row of its own is in a later row that says how many they were.
"""

from __future__ import annotations

from dataclasses import dataclass

SPAN_US = 60_000_000
#: Rows of one tenant, kind and code in one span.
ROWS_IN_SPAN = 10
#: The kind of the row that sums up.
SUMMED = "refusals.summed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalTally:
    """What was refused to one tenant in one way, since `since`."""

    since: int
    rows: int = 0  # that were written one by one
    more: int = 0  # that were only counted


def is_over(tally: RefusalTally, now: int) -> bool:
    return now >= tally.since + SPAN_US


def count_refusal(known: RefusalTally | None, now: int) -> tuple[RefusalTally, bool]:
    """The tally with one more refusal, and whether that has a row of its own. A tally that is over is first
    summed up and forgotten."""
    tally = known or RefusalTally(since=now)
    if tally.rows < ROWS_IN_SPAN:
        return RefusalTally(since=tally.since, rows=tally.rows + 1, more=tally.more), True
    return RefusalTally(since=tally.since, rows=tally.rows, more=tally.more + 1), False
