"""The host's clocks."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown-boot"


class HostClock:
    """Implements `ports.clock.Clock`."""

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    def boot_us(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1000

    def boot_id(self) -> str:
        return _boot_id()
