"""How a request for several devices is laid over hosts.

Rules of this file:
- One host that has them all is always taken before several: processes of one machine talk through memory,
  those of two through a wire.
- Several are taken only if the request says so: a program that was not written for it cannot use a device of
  another machine.
- Of several, the fewest hosts; of those, the part that is left over comes from where the fewest devices stay
  behind; of equals the first by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from sublet.core.errors import BadInput


class Spread(Enum):
    """May a lease of several devices be of several hosts?"""

    NO = "no"
    OK = "ok"  # when no single host has them


def parse_spread(text: str) -> Spread:
    try:
        return Spread(text)
    except ValueError:
        raise BadInput(f"spread {str(text)[:40]!r} is unknown: use no or ok") from None


def share_out(count: int, room: Mapping[str, int], spread: Spread) -> list[tuple[str, int]] | None:
    """How many devices to take of which host, when each has so many; None when they are not there. The
    largest part comes first: it is the home of rank 0."""
    alone = min(((n - count, host) for host, n in room.items() if n >= count), default=None)
    if alone is not None:
        return [(alone[1], count)]
    if spread is not Spread.OK:
        return None
    found: list[tuple[str, int]] = []
    left = count
    largest = sorted((-n, host) for host, n in room.items() if n > 0)
    for at, (minus, _) in enumerate(largest):
        if left <= -minus:
            # The last part: whoever is left with the fewest devices afterwards.
            _, host = min((-n - left, name) for n, name in largest[at:] if -n >= left)
            return [*found, (host, left)]
        found.append((largest[at][1], -minus))
        left += minus
    return None
