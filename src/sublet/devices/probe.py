"""What devices this host has, from SUBLET_DEVICES: `auto`, or a list such as `host:2x16GiB,cuda:all`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sublet.core.errors import BadInput
from sublet.ports.ledger import FoundDevice

Probe = Callable[[str, str], Sequence[FoundDevice]]


def find_devices(spec: str, host: str, probes: Mapping[str, Probe]) -> list[FoundDevice]:
    """Find devices. `auto` takes what drivers of one vendor find; else OpenCL's; else the host's memory. They
    are never combined: OpenCL shows an NVIDIA GPU again, and a GPU found twice would be leased twice."""
    if spec == "auto":
        vendors = [name for name in sorted(probes) if name not in ("opencl", "host")]
        found = [d for name in vendors for d in probes[name]("auto", host)]
        for name in ("opencl", "host"):
            found = found or list(probes[name]("auto", host) if name in probes else ())
        return found
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
