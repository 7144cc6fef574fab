"""Sizes, durations, names: what people type, turned into integers once, at the edge.

Rules of this file:
- Inside the system a size is bytes and a duration is microseconds, always `int`. Text and floats end here.
- Anything that cannot be read exactly is refused with a sentence that shows what would be accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sublet.core.errors import BadInput

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
HOUR_US = 60 * MINUTE_US
DAY_US = 24 * HOUR_US

#: Longer than any real lease; beyond it a typo is likelier than a wish.
MAX_DURATION_US = 366 * DAY_US
MAX_BYTES = 1 << 50
MOST_CHARACTERS = 64

_DURATION_UNITS = {
    "us": 1,
    "ms": 1_000,
    "s": SECOND_US,
    "m": MINUTE_US,
    "h": HOUR_US,
    "d": DAY_US,
}
_SIZE_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate(("K", "M", "G", "T"), start=1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}
_SIZE_BY_FOLDED = {unit.lower(): scale for unit, scale in _SIZE_UNITS.items()}

_DURATION_PART = re.compile(r"(\d+)(?:\.(\d{1,6}))?(us|ms|s|m|h|d)")
_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{2})")
_SIZE = re.compile(r"(\d+)(?:\.(\d{1,9}))?\s*([A-Za-z]*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/-]{0,126}")


def parse_duration(text: str | int | float, *, what: str = "duration") -> int:
    """'30s', '5m', '1h30m', '1:30:00' or a number of seconds, in microseconds."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise BadInput(f"{what} must be a duration like 30s, 5m or 1:30:00, not {_shown(text)}")
    if isinstance(text, int | float):
        if not abs(text) <= MAX_DURATION_US:  # also refuses NaN, and numbers too large to multiply
            raise BadInput(f"{what} {_shown(text)} is longer than a year: write a shorter one such as 24h")
        return _bounded_duration(round(text * SECOND_US), what, text)
    body = text.strip()
    if not body.isascii() or len(body) > MOST_CHARACTERS:
        raise BadInput(f"{what} {_shown(text)} is not a duration: write 30s, 5m, 2h or 1:30:00")
    if body.isdigit():
        return _bounded_duration(int(body) * SECOND_US, what, text)
    clock = _CLOCK.fullmatch(body)
    if clock:
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        if seconds < 60 and (minutes < 60 or clock.group(1) is None):
            return _bounded_duration(hours * HOUR_US + minutes * MINUTE_US + seconds * SECOND_US, what, text)
    total, end = 0, 0
    for part in _DURATION_PART.finditer(body):
        if part.start() != end:
            break
        whole, fraction, unit = part.groups()
        total += _scaled(whole, fraction, _DURATION_UNITS[unit])
        end = part.end()
    if not body or end != len(body):
        raise BadInput(f"{what} {_shown(text)} is not a duration: write 30s, 5m, 2h or 1:30:00")
    return _bounded_duration(total, what, text)


def _bounded_duration(us: int, what: str, text: object) -> int:
    if us < 0:
        raise BadInput(f"{what} {_shown(text)} is negative: write a positive duration such as 5m")
    if us > MAX_DURATION_US:
        raise BadInput(f"{what} {_shown(text)} is longer than a year: write a shorter one such as 24h")
    return us


def parse_size(text: str | int, *, what: str = "size") -> int:
    """'8GB' (decimal), '16GiB' or '16G' (binary) or a number of bytes, in bytes."""
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise BadInput(f"{what} must be a size like 8GB or 16GiB, not {_shown(text)}")
    if isinstance(text, int):
        return _bounded_size(text, what, text)
    readable = text.isascii() and len(text) <= MOST_CHARACTERS
    match = _SIZE.fullmatch(text.strip()) if readable else None
    scale = _SIZE_BY_FOLDED.get(match.group(3).lower()) if match else None
    if match is None or scale is None:
        raise BadInput(f"{what} {_shown(text)} is not a size: write 8GB, 16GiB or 512MB")
    return _bounded_size(_scaled(match.group(1), match.group(2), scale), what, text)


def _bounded_size(size: int, what: str, text: object) -> int:
    if size <= 0:
        raise BadInput(f"{what} {_shown(text)} is not positive: write a size such as 8GB")
    if size > MAX_BYTES:
        raise BadInput(f"{what} {_shown(text)} is larger than any device: write a size such as 80GB")
    return size


def _scaled(whole: str, fraction: str | None, scale: int) -> int:
    """whole.fraction × scale, rounded down, without a float in between."""
    value = int(whole) * scale
    if fraction:
        value += int(fraction) * scale // 10 ** len(fraction)
    return value


@dataclass(frozen=True, slots=True)
class SizeRange:
    """What a request accepts: as much as `most`, not less than `least`."""

    least: int
    most: int


def parse_size_range(text: str | int, *, what: str = "size") -> SizeRange:
    """'16GB' or '24GB..80GB'."""
    if isinstance(text, str) and ".." in text:
        low, _, high = text.partition("..")
        span = SizeRange(parse_size(low, what=what), parse_size(high, what=what))
        if span.least > span.most:
            raise BadInput(f"{what} {_shown(text)} runs backwards: write the smaller size first")
        return span
    size = parse_size(text, what=what)
    return SizeRange(size, size)


def check_has_unit(size: str | int, *, what: str) -> None:
    """Refuse a bare number of bytes that no GPU is asked for: whoever writes 8 means gigabytes."""
    for part in str(size).split(".."):
        bare = part.strip()
        if bare.isascii() and bare.isdigit() and len(bare) <= 7 and 0 < int(bare) < 1 << 20:
            raise BadInput(
                f"{what} {bare} is {bare} bytes: write a unit",
                remedy=f"write {bare}GiB if you mean gigabytes",
            )


_PRICE = re.compile(r"(\d{1,7})(?:\.(\d{1,6}))?")


def parse_price(text: str, *, what: str = "price") -> int:
    """What a GPU-hour costs, such as '2.50', in millionths."""
    found = _PRICE.fullmatch(text.strip())
    if found is None or not text.isascii():
        raise BadInput(f"{what} {_shown(text)} is not a price: write for example 2.50")
    return _scaled(found[1], found[2], 1_000_000)


def format_duration(us: int) -> str:
    """Short and readable: '350ms', '4.2s', '12m05s', '3h07m', '2d04h'."""
    if us < 0:
        return "-" + format_duration(-us)
    if us < SECOND_US:
        return f"{us // 1000}ms"
    if us < 10 * SECOND_US:
        return f"{us / SECOND_US:.1f}s"
    seconds = us // SECOND_US
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86_400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86_400}d{seconds % 86_400 // 3600:02d}h"


def format_size(size: int) -> str:
    """The shortest exact unit if there is a short one, else a tenth of a decimal one: '16GiB', '8GB',
    '1.5GB'."""
    if size < 0:
        return "-" + format_size(-size)
    exact = [
        f"{size // base**power}{unit}"
        for base, units in ((1024, ("KiB", "MiB", "GiB", "TiB")), (1000, ("KB", "MB", "GB", "TB")))
        for power, unit in enumerate(units, start=1)
        if size >= base**power and size % base**power == 0
    ]
    if exact and len(shortest := min(exact, key=len)) <= 7:
        return shortest
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
        if size >= 1000**power:
            return f"{size / 1000**power:.1f}{unit}"
    return f"{size}B"


def check_name(text: str, *, what: str) -> str:
    """A tenant, host or device name: letters, digits and . _ @ - only, so it is safe anywhere."""
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise BadInput(
            f"{what} {_shown(text)} is not a name: use 1-63 letters, digits, dots, dashes, "
            "underscores or @, starting with a letter or digit"
        )
    return text


def check_job(text: str) -> str:
    """A job name may also carry / and :, never a parent folder."""
    if not isinstance(text, str) or not _JOB.fullmatch(text) or ".." in text:
        raise BadInput(
            f"job {_shown(text)} is not a name: use 1-127 letters, digits and . _ @ : / -, "
            "starting with a letter or digit"
        )
    return text


def _shown(text: object) -> str:
    """What was typed, short enough for a sentence. A number of thousands of digits cannot even be printed."""
    if isinstance(text, int) and abs(text) > 10**40:
        return "a number of that size"
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "...'"
