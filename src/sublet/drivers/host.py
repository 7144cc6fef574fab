"""The host driver's devices: main memory declared as VRAM, `host:2x16GiB`. Needs nothing, works everywhere."""

from __future__ import annotations

import os
import re

from sublet.core.errors import BadInput
from sublet.core.values import format_size, parse_size
from sublet.ports.ledger import FoundDevice

_SPEC = re.compile(r"(?:(\d+)x)?(.+)")
MOST = 1024


def probe(spec: str, host: str) -> list[FoundDevice]:
    """`spec` is what follows `host:`; empty or `auto` means one device of half the machine's memory."""
    if spec in ("", "auto"):
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        return [_device(host, 0, max(1 << 30, half >> 30 << 30))]
    match = _SPEC.fullmatch(spec)
    assert match is not None
    count = int(match.group(1) or 1)
    if not 1 <= count <= MOST:
        raise BadInput(f"SUBLET_DEVICES declares {count} host devices: use 1 to {MOST}")
    size = parse_size(match.group(2), what="SUBLET_DEVICES size")
    return [_device(host, ordinal, size) for ordinal in range(count)]


def _device(host: str, ordinal: int, size: int) -> FoundDevice:
    return FoundDevice(
        id=f"{host}-host{ordinal}",
        driver="host",
        ordinal=ordinal,
        name=f"host memory {format_size(size)}",
        capacity_bytes=size,
    )
