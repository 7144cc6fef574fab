"""Arguments of a kernel, typed by whoever writes the call and encoded exactly.

Rules of this file:
- A number has no type until it is given one: `u32(7)`. What does not fit its type is refused, never wrapped
  or rounded away.
- Encodings are little-endian and as wide as the type: what a device's calling convention expects.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from sublet.core.errors import BadInput

_FORMATS = {"u32": "<I", "u64": "<Q", "i32": "<i", "i64": "<q", "f32": "<f", "f64": "<d"}
_RANGES = {
    "u32": (0, 2**32 - 1),
    "u64": (0, 2**64 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63), 2**63 - 1),
}


@dataclass(frozen=True, slots=True)
class Scalar:
    kind: str
    value: int | float

    def encoded(self) -> bytes:
        return struct.pack(_FORMATS[self.kind], self.value)


def _whole(kind: str, value: int) -> Scalar:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{kind} takes a whole number, not {value!r}")
    low, high = _RANGES[kind]
    if not low <= value <= high:
        raise BadInput(f"{kind} cannot hold {value}: its range is {low} to {high}")
    return Scalar(kind, value)


def _real(kind: str, value: float) -> Scalar:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"{kind} takes a number, not {value!r}")
    number = float(value)
    if kind == "f32" and math.isfinite(number) and abs(number) > 3.4028235677973366e38:
        raise BadInput(f"f32 cannot hold {number}: use f64")
    return Scalar(kind, number)


def u32(value: int) -> Scalar:
    return _whole("u32", value)


def u64(value: int) -> Scalar:
    return _whole("u64", value)


def i32(value: int) -> Scalar:
    return _whole("i32", value)


def i64(value: int) -> Scalar:
    return _whole("i64", value)


def f32(value: float) -> Scalar:
    return _real("f32", value)


def f64(value: float) -> Scalar:
    return _real("f64", value)


Shape3 = tuple[int, int, int]


def launch_shape(extent: tuple[int, ...] | int, *, what: str) -> Shape3:
    """One to three positive extents, padded with ones."""
    single = isinstance(extent, int) and not isinstance(extent, bool)
    parts = (extent,) if single else tuple(extent)  # type: ignore[arg-type]
    good = 1 <= len(parts) <= 3 and all(
        isinstance(n, int) and not isinstance(n, bool) and 1 <= n < 2**31 for n in parts
    )
    if not good:
        raise BadInput(f"{what} must be one to three positive whole numbers, not {extent!r}")
    return (*parts, 1, 1)[:3]
