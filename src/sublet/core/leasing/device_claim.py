"""Who grants a physical device of a machine: what a lock file says of it, and in which words it is refused.

Rules of this file:
- A ledger knows only the leases it granted itself. Two that do not know of each other must not grant the same
  physical device, so each says on the machine that it grants it (I3).
- Wardens of one ledger know of each other through it: the device is theirs together.
- What the file says was written by another user, and is not trusted: it is only read for its words.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

#: A claim is written in place, so it has one length.
CLAIM_BYTES = 1024
_MOST_CHARACTERS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClaim:
    """Who grants the device: a ledger, and the warden that speaks for it on this machine."""

    ledger: str
    user: str
    home: str
    pid: int


def write_claim(claim: DeviceClaim) -> bytes:
    text = json.dumps(asdict(claim)).encode()
    if len(text) >= CLAIM_BYTES:  # a path of many characters that JSON spells out
        text = json.dumps(asdict(claim) | {"home": ""}).encode()
    return text.ljust(CLAIM_BYTES - 1) + b"\n"


def read_claim(data: bytes) -> DeviceClaim | None:
    """None where nobody has written anything that could be one."""
    try:
        found = json.loads(data)
        return DeviceClaim(
            ledger=_printable(found["ledger"]),
            user=_printable(found["user"]),
            home=_printable(found["home"]),
            pid=int(found["pid"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _printable(value: object) -> str:
    return "".join(c for c in str(value)[:_MOST_CHARACTERS] if c.isprintable())


def taken_words(device_id: str, holder: DeviceClaim | None) -> str:
    """Say who has the device."""
    if holder is None:
        return f"{device_id} is granted by another ledger of this machine, which does not say whose it is"
    home = f", home {holder.home}" if holder.home else ""
    return (
        f"{device_id} is granted by another ledger of this machine: "
        f"user {holder.user}{home}, warden pid {holder.pid}"
    )
