"""Loops that must not die quietly (I4): when one counts as late, and when its process has to end.

Rules of this file:
- A loop that is late is shown: readiness, `sublet doctor` and a metric name it. A loop that is dead, or later
  still, ends its process, so that a successor starts with threads that all turn.
- Silence counts only while the judge itself was awake. A process that was stopped, or a machine that slept,
  has loops that are late and not broken.
- A loop that waits for a ledger which does not answer is late, but its process stays while it still has
  deadlines to enforce: a successor could not read them from that ledger (K2).
- A process whose lock file is gone ends: nobody can find it any more, and another one may already run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sublet.core.values import SECOND_US, format_duration

#: How often a process looks at its own loops, and writes down what it saw.
LOOK_EVERY_US = SECOND_US
#: A loop turns every few seconds. Twice that is no accident any more.
LATE_AFTER_US = 15 * SECOND_US
#: Longer than a device may take to answer, and than a crowded machine keeps a thread waiting.
END_AFTER_US = 90 * SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBeat:
    """What is known of one loop."""

    name: str
    silent_us: int  # since its last turn, as far as the judge was awake
    alive: bool = True
    waits_for_ledger: bool = False


def too_late(beat: LoopBeat, late_after_us: int = LATE_AFTER_US) -> str:
    """What is wrong with the loop, in words; '' if it turns."""
    if not beat.alive:
        return f"its loop '{beat.name}' has died"
    if beat.silent_us < late_after_us:
        return ""
    why = ", because the ledger does not answer" if beat.waits_for_ledger else ""
    return f"its loop '{beat.name}' has not turned for {format_duration(beat.silent_us)}{why}"


def reason_to_end(
    beats: Iterable[LoopBeat], *, findable: bool, has_deadlines: bool, end_after_us: int = END_AFTER_US
) -> str:
    """Why the process must end now, in words; '' if it may go on."""
    if not findable:
        return "its lock file or its home was deleted or unmounted, so nobody can find this process any more"
    for beat in beats:
        if beat.alive and beat.waits_for_ledger and has_deadlines:
            continue
        reason = too_late(beat, end_after_us)
        if reason:
            return reason
    return ""


def seen_from_outside(
    turned_at: Mapping[str, int], now: int, late_after_us: int = LATE_AFTER_US
) -> list[LoopBeat]:
    """The late loops of another process, from the instants it wrote down. `now` is the same clock's."""
    beats = [LoopBeat(name=name, silent_us=max(0, now - at)) for name, at in sorted(turned_at.items())]
    return [beat for beat in beats if too_late(beat, late_after_us)]
