"""Prices: what an hour of a device costs, by its class and the tier, and what a lease cost.

Rules of this file:
- Money is integers, in millionths of whatever currency the operator counts in. A price is for one whole
  device, however much of it a lease has.
- A price is valid from the moment it is set until the next one: a lease costs what the list said when it was
  granted, so a change never touches what was used before. Taking a price off the list is a row too.
- The narrowest price counts: class and tier, class, any class (`*`) and tier, any class.
- A cost is rounded down once for each part it is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sublet.core.errors import BadInput
from sublet.core.leasing.lease import LeaseRecord, Tier
from sublet.core.scheduling.device import Device, Slice
from sublet.core.values import HOUR_US

#: Any class.
ANY = "*"
CLASS_CHARACTERS = 100
MOST_MICRO = 10**13


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    device_class: str
    tier: str  # '': every tier
    micro_per_gpu_hour: int | None  # None: taken off the list
    valid_from: int


@dataclass(frozen=True, slots=True)
class Tariff:
    """What all devices of one lease cost together."""

    micro_per_hour: int
    devices: int

    def cost(self, gpu_us: int) -> int:
        """The cost of this much device time."""
        return gpu_us * self.micro_per_hour // (self.devices * HOUR_US)


def class_of(device: Device) -> str:
    """What devices are priced by: their model, or one class for all simulated ones."""
    return "host" if device.driver == "host" else device.name


def check_class(text: str) -> str:
    if not isinstance(text, str) or not 1 <= len(text) <= CLASS_CHARACTERS or not text.isprintable():
        raise BadInput(
            f"a device class is 1 to {CLASS_CHARACTERS} printable characters: 'sublet gpus' shows them, * is "
            "any"
        )
    return text


def check_tier(text: str) -> str:
    if text and text not in {t.value for t in Tier}:
        raise BadInput(f"tier {text[:40]!r} is unknown: use interactive, batch or spot, or none for all")
    return text


def check_micro(micro: int) -> int:
    if not 0 <= micro <= MOST_MICRO:
        raise BadInput("a price is not negative, and less than ten million an hour: write for example 2.50")
    return micro


class PriceList:
    """Every price there ever was, looked up by moment."""

    def __init__(self, prices: Iterable[Price]) -> None:
        self._by_key: dict[tuple[str, str], tuple[list[int], list[int | None]]] = {}
        for price in sorted(prices, key=lambda p: p.valid_from):
            starts, amounts = self._by_key.setdefault((price.device_class, price.tier), ([], []))
            starts.append(price.valid_from)
            amounts.append(price.micro_per_gpu_hour)

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def at(self, device_class: str, tier: str, at: int) -> int | None:
        """The price per GPU-hour, or None when nothing on the list fits."""
        for key in ((device_class, tier), (device_class, ""), (ANY, tier), (ANY, "")):
            starts, amounts = self._by_key.get(key, ([], []))
            place = bisect_right(starts, at)
            if place and (amount := amounts[place - 1]) is not None:
                return amount
        return None

    def current(self, now: int) -> list[Price]:
        """The present list, by class and tier."""
        found = []
        for (device_class, tier), (starts, amounts) in sorted(self._by_key.items()):
            place = bisect_right(starts, now)
            if place and amounts[place - 1] is not None:
                found.append(
                    Price(
                        device_class=device_class,
                        tier=tier,
                        micro_per_gpu_hour=amounts[place - 1],
                        valid_from=starts[place - 1],
                    )
                )
        return found

    def tariff(
        self, lease: LeaseRecord, classes: Mapping[str, str], default: int | None = None
    ) -> Tariff | None:
        """What a granted lease costs, by the class of each of its devices. `default` is the price of what is
        not on the list; without one the result is None."""
        if not lease.granted_at:
            return None
        return self.of(lease.slices, lease.request.tier.value, lease.granted_at, classes, default)

    def of(
        self,
        slices: Sequence[Slice],
        tier: str,
        granted_at: int,
        classes: Mapping[str, str],
        default: int | None = None,
    ) -> Tariff | None:
        """The same for what was granted, without the lease."""
        total = 0
        for s in slices:
            price = self.at(classes.get(s.device_id, ""), tier, granted_at)
            price = default if price is None else price
            if price is None:
                return None
            total += price
        return Tariff(total, len(slices)) if slices else None
