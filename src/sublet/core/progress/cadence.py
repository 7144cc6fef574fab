"""How often to save: the interval that wastes least, with its reason.

Rules of this file:
- A save costs the time training stands still for it; a loss costs half an interval on average. The sum is
  least at sqrt(2 × stall × time between losses), Young's rule.
- Only losses that came without a warning count: before the others a save is made anyway.
- Before any loss was seen, one an hour is assumed; an hour without one weighs as much as that assumption.
- Saves do not overlap: an interval is never shorter than one of them takes behind training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sublet.core.errors import BadInput
from sublet.core.values import SECOND_US, format_duration, parse_duration

#: What is assumed before any loss was seen: one in this time.
BELIEVED_US = 3_600 * SECOND_US
#: However rare losses are, an hour of work is not put at risk for a few seconds of saving.
LONGEST_US = 600 * SECOND_US
#: The first save comes soon: nothing is known before one was measured, and nothing is safe.
FIRST_US = SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The losses among the leases a job has had."""

    count: int = 0  # without a warning
    held_us: int = 0  # for so long in all

    @property
    def apart_us(self) -> int:
        return (self.held_us + BELIEVED_US) // (self.count + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The measured cost of the last saves."""

    stall_us: int  # training stood still
    save_us: int  # from the beginning until it was durable


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    us: int
    reason: str


def best_interval(cost: Cost | None, losses: Losses) -> Interval:
    if cost is None:
        return Interval(us=FIRST_US, reason="the first save comes soon: what a save costs is not known yet")
    best = math.isqrt(2 * max(1, cost.stall_us) * losses.apart_us)
    seen = (
        f"{losses.count} loss{'es' if losses.count != 1 else ''} without warning in "
        f"{format_duration(losses.held_us)}"
        if losses.held_us
        else "no loss seen yet"
    )
    why = (
        f"a save stops training for {_short(cost.stall_us)} and a loss is expected every "
        f"{format_duration(losses.apart_us)} ({seen})"
    )
    if best < cost.save_us:
        return Interval(
            us=cost.save_us, reason=f"{why}; a save takes {_short(cost.save_us)}, so not more often than that"
        )
    if best > LONGEST_US:
        return Interval(
            us=LONGEST_US, reason=f"{why}; never more than {format_duration(LONGEST_US)} are put at risk"
        )
    return Interval(us=best, reason=f"{why}, so every {_short(best)} wastes least")


def _short(us: int) -> str:
    if us < 1_000:
        return f"{us} us"
    return f"{us / 1_000:.3g} ms" if us < SECOND_US else f"{us / SECOND_US:.3g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """When a run saves: every so many steps, every so often, or as often as wastes least."""

    steps: int = 0
    us: int = 0  # with neither: as `best_interval` says

    @property
    def auto(self) -> bool:
        return not self.steps and not self.us


def parse_cadence(text: str | int | float) -> Cadence:
    """'auto', a number of steps, or a duration such as '30s'."""
    if text == "auto":
        return Cadence()
    if isinstance(text, bool) or (isinstance(text, float) and not text.is_integer()):
        raise BadInput(f"every={text!r} is neither 'auto', a number of steps, nor a duration such as '30s'")
    if isinstance(text, (int, float)):
        if text < 1:
            raise BadInput(f"every={text} steps is not a cadence: save every 1 step or more")
        return Cadence(steps=int(text))
    us = parse_duration(text, what="every")
    if us <= 0:
        raise BadInput(f"every={text!r} is not a cadence: write a duration such as '30s'")
    return Cadence(us=us)
