"""What the user is told of the store while a run saves into it: one line when it is away, one when it is
back."""

from __future__ import annotations

import contextlib

from sublet.core.checkpoints.checkpoint import Away
from sublet.core.values import SECOND_US, format_duration
from sublet.machine.meanwhile import meanwhile
from sublet.training.run_parts import Parts, RunPosition

#: How soon a change is reported during a wait.
LISTEN_SECONDS = 0.05


class StoreNews:
    def __init__(self, parts: Parts, position: RunPosition) -> None:
        self._parts = parts
        self._position = position
        # What was reported, since when, and the version then.
        self._told: tuple[Away, int, int] | None = None

    @property
    def outage_reported(self) -> bool:
        """Whether the user was told why nothing is saved, and will be told when that is over."""
        return self._told is not None

    def tell(self) -> None:
        """It is back when a save that waited is committed, because a server that starts answers and fails in
        turn."""
        parts, away, told = self._parts, self._parts.store.away, self._told
        now = parts.clock.monotonic_us()
        if away is not None and (told is None or told[0].saves_wait != away.saves_wait):
            self._told = (away, *(told[1:] if told is not None else (now, self._position.version)))
            parts.line.say(f"{away.reason}. Step {self._position.committed:,} is committed")
            parts.report_away(away.reason)
        elif (
            away is None and told is not None and (not told[0].saves_wait or self._position.version > told[2])
        ):
            self._told = None
            gone = format_duration(max(SECOND_US, (now - told[1]) // SECOND_US * SECOND_US))
            parts.line.say(f"store {', '.join(told[0].replicas)} is back after {gone}: saves go on")
            parts.report_away("")

    def meanwhile(self) -> contextlib.AbstractContextManager[None]:
        """Keep telling from another thread, while this one waits for a save."""
        return meanwhile(LISTEN_SECONDS, self.tell)
