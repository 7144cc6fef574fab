"""Time, as three different questions."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def wall_us(self) -> int:
        """The calendar. Only ever shown, or used once to anchor a ledger's clock."""

    def boot_us(self) -> int:
        """Microseconds since boot, sleep included; the same for every process of the host, never stepped."""

    def monotonic_us(self) -> int:
        """The holder's own clock for its own deadlines."""

    def boot_id(self) -> str:
        """Changes when `boot_us` starts again."""
