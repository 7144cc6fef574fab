"""What the user is told of the store while a run saves into it: one line when it is away, one when it is back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from sublet.core.checkpoint import Away
from sublet.core.values import SECOND_US, format_duration
from sublet.runtime.run_parts import Parts, Reached

#: How soon a change is told while somebody waits.
LISTEN_SECONDS = 0.05


class StoreNews:
    def __init__(self, parts: Parts, reached: Reached) -> None:
        self._parts = parts
        self._reached = reached
        # What was told, since when, and the version then.
        self._told: tuple[Away, int, int] | None = None

    @property
    def told_away(self) -> bool:
        """It was said why nothing is saved, and will be said when that is over."""
        return self._told is not None

    def tell(self) -> None:
        """It is back when a save that waited is committed, because a server that starts answers and fails in turn."""
        parts, away, told = self._parts, self._parts.store.away, self._told
        now = parts.clock.monotonic_us()
        if away is not None and (told is None or told[0].saves_wait != away.saves_wait):
            self._told = (away, *(told[1:] if told is not None else (now, self._reached.version)))
            parts.line.say(f"{away.reason}. Step {self._reached.committed:,} is committed")
            parts.report_away(away.reason)
        elif (
            away is None and told is not None and (not told[0].saves_wait or self._reached.version > told[2])
        ):
            self._told = None
            gone = format_duration(max(SECOND_US, (now - told[1]) // SECOND_US * SECOND_US))
            parts.line.say(f"store {', '.join(told[0].replicas)} is back after {gone}: saves go on")
            parts.report_away("")

    @contextlib.contextmanager
    def meanwhile(self) -> Iterator[None]:
        """While this thread waits for a save, somebody else says what it waits for."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(LISTEN_SECONDS):
                with contextlib.suppress(Exception):
                    self.tell()

        teller = threading.Thread(target=tell, name="sublet-tells", daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()
