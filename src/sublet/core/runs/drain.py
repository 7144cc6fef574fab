"""What to do with the time between a Notice and its deadline.

Rules of this file:
- A save is planned only if it would be durable before the deadline, less a margin for leaving: estimates are
  stretched by half, because a store that is asked by every job of a reclaimed host at once is slower than it
  was measured.
- More time never makes the plan worse.
- What was never measured is tried, not guessed: there is nothing to lose by a save that does not make it,
  since the head moves last.
- After a step that was let finish, ask again: the numbers have changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sublet.core.notice import Notice
from sublet.core.values import SECOND_US, format_duration, format_size

#: For releasing the lease and ending the process.
MARGIN_US = SECOND_US
#: Estimates are multiplied by three halves.
_STRETCH, _OVER = 3, 2


class Save(Enum):
    NOTHING = "nothing"  # everything is committed
    WAIT = "wait"  # for the save that is under way behind, and no other
    DELTA = "delta"  # what changed since the last save of this process
    FULL = "full"
    SKIP = "skip"  # leave with what is committed


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBehind:
    """A save that is under way behind training."""

    bytes_left: int
    holds_all: bool  # nothing was done since it was begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What was measured in this process. None where nothing was."""

    bytes_per_second: int | None = None
    latency_us: int = 0  # of a save without bytes: syncs, quorum, the commit


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPlan:
    save: Save
    finish_step: bool  # there is time to finish one step first; then ask again
    estimate_us: int | None  # until it is durable, stretched; None when nothing was measured
    reason: str


def plan_drain(
    notice: Notice,
    now: int,
    *,
    uncommitted: bool,
    behind: SaveBehind | None = None,
    step_us: int | None = None,
    speed: Speed = Speed(),  # frozen
    full_bytes: int,
    delta_bytes: int
    | None = None,  # None: this process has not saved yet, so there is nothing to be a delta of
    margin_us: int = MARGIN_US,
) -> DrainPlan:
    left = notice.deadline_us - now - margin_us
    kind, size = _smaller(full_bytes, delta_bytes)
    waiting = 0 if behind is None else _needed(speed, behind.bytes_left)
    saving = _needed(speed, size)
    both = None if waiting is None or saving is None else waiting + saving
    finish = (
        _fits(both, left) and step_us is not None and both is not None and both + _stretched(step_us) <= left
    )
    had = f"{format_duration(max(0, left))} left to save in"

    if behind is None and not uncommitted:
        return DrainPlan(
            save=Save.NOTHING,
            finish_step=finish,
            estimate_us=0,
            reason="everything is committed; nothing to save",
        )
    if left <= 0:
        why = "leave with what is committed: the deadline is too near to save anything"
        return DrainPlan(save=Save.SKIP, finish_step=False, estimate_us=None, reason=why)
    if behind is not None and behind.holds_all:
        if _fits(waiting, left):
            needs = _said(speed, behind.bytes_left)
            why = f"wait for the save under way, which holds everything: {needs}, {had}"
            return DrainPlan(save=Save.WAIT, finish_step=finish, estimate_us=waiting, reason=why)
        return _skip(f"the save under way, {_said(speed, behind.bytes_left)}", had)
    if _fits(both, left):
        after = "" if behind is None else " after the one under way"
        why = f"save {_NAMES[kind]}{after}: {_said(speed, size)}, {had}"
        return DrainPlan(save=kind, finish_step=finish, estimate_us=both, reason=why)
    if behind is not None and _fits(waiting, left):
        why = (
            f"wait for the save under way, {_said(speed, behind.bytes_left)}; another, "
            f"{_said(speed, size)}, would "
            f"not be durable in time: {had}. What was done since it began is done again"
        )
        return DrainPlan(save=Save.WAIT, finish_step=False, estimate_us=waiting, reason=why)
    return _skip(f"{_NAMES[kind]}, {_said(speed, size)}", had)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What becomes of a batch of items that is being worked on."""

    end_at_us: int  # if it has not finished by then, it is ended and its items are given back
    reason: str


def plan_batch(
    notice: Notice, now: int, *, begun_us: int, usual_us: int | None, margin_us: int = MARGIN_US
) -> BatchPlan:
    """Nothing of a batch counts before all of it does, so one that would not make it is ended at once:
    somebody else can begin with its items. `usual_us` is how long such a batch took here; None: never
    measured, so it is tried."""
    end_at = notice.deadline_us - min(margin_us, max(0, notice.deadline_us - now) // 2)
    had = f"{format_duration(max(0, end_at - now))} left"
    if end_at <= now:
        return BatchPlan(now, "the deadline is too near for the batch that runs")
    if usual_us is None:
        return BatchPlan(end_at, f"the batch that runs may finish if it can, none was measured here: {had}")
    if begun_us + _stretched(usual_us) > end_at:
        return BatchPlan(
            now, f"the batch that runs is ended: such a batch takes {format_duration(usual_us)} here, {had}"
        )
    return BatchPlan(end_at, f"the batch that runs may finish: {had}")


_NAMES = {Save.DELTA: "what changed", Save.FULL: "everything"}


def _smaller(full_bytes: int, delta_bytes: int | None) -> tuple[Save, int]:
    if delta_bytes is not None and delta_bytes <= full_bytes:
        return Save.DELTA, delta_bytes
    return Save.FULL, full_bytes


def _stretched(us: int) -> int:
    return -(-us * _STRETCH // _OVER)


def _needed(speed: Speed, size: int) -> int | None:
    if not speed.bytes_per_second:
        return None
    return _stretched(speed.latency_us - (-size * SECOND_US // speed.bytes_per_second))


def _fits(needed: int | None, left: int) -> bool:
    return needed is None or needed <= left


def _said(speed: Speed, size: int) -> str:
    needed = _needed(speed, size)
    if needed is None or not speed.bytes_per_second:
        return f"{format_size(size)} at a speed never measured here, so it is tried"
    return f"{format_size(size)} at {format_size(speed.bytes_per_second)}/s needs {format_duration(needed)}"


def _skip(what: str, had: str) -> DrainPlan:
    why = f"leave with what is committed: {what}, would not be durable in time: {had}"
    return DrainPlan(save=Save.SKIP, finish_step=False, estimate_us=None, reason=why)
