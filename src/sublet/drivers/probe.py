"""What devices this host has, from SUBLET_DEVICES: `auto`, or a list such as `host:2x16GiB,cuda:all`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sublet.core.errors import BadInput
from sublet.ports.ledger import FoundDevice

Probe = Callable[[str, str], Sequence[FoundDevice]]


def find_devices(spec: str, host: str, probes: Mapping[str, Probe]) -> list[FoundDevice]:
    """`auto` asks every driver that has real devices, and falls back to the host's memory."""
    if spec == "auto":
        found = [d for name in sorted(probes) if name != "host" for d in probes[name]("auto", host)]
        return found or list(probes["host"]("auto", host))
    found = []
    for part in filter(None, (p.strip() for p in spec.split(","))):
        driver, _, rest = part.partition(":")
        if driver not in probes:
            known = ", ".join(sorted(probes))
            raise BadInput(f"SUBLET_DEVICES names the driver {driver[:40]!r}; known: {known}")
        found += probes[driver](rest, host)
    if not found:
        raise BadInput(
            f"this host has no device that SUBLET_DEVICES {spec[:60]!r} names",
            remedy="write auto, or for example host:2x16GiB",
        )
    return found
