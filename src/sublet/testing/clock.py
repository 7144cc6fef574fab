"""A clock that moves when told."""

from __future__ import annotations


class VirtualClock:
    """Implements `ports.clock.Clock`. All three clocks move together unless one is stepped by itself."""

    def __init__(self, start_us: int = 1_700_000_000_000_000) -> None:
        self.wall = start_us
        self.boot = 1_000_000_000
        self.boot_name = "virtual-boot"

    def wall_us(self) -> int:
        return self.wall

    def boot_us(self) -> int:
        return self.boot

    def monotonic_us(self) -> int:
        return self.boot

    def boot_id(self) -> str:
        return self.boot_name

    def advance(self, duration_us: int) -> None:
        self.wall += duration_us
        self.boot += duration_us

    def step_wall(self, by_us: int) -> None:
        """Step the calendar clock, as an operator or NTP does."""
        self.wall += by_us

    def reboot(self) -> None:
        self.boot, self.boot_name = 0, self.boot_name + "'"
