"""The text Prometheus reads, written by hand: it is a page of rules, and a client library would bring a registry of its own.

Rules of this file:
- A series exists in the table it was made from (name, kind, help), or writing it raises: nothing is exposed that nobody described.
- Label values may be anything. Backslash, quote and line break are escaped; so are backslash and line break in a help text.
- Numbers are written exactly. A duration is microseconds divided by a million in decimal, never by way of a float.
- A histogram's buckets are cumulative and end with +Inf, which equals its count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sublet.core.meters import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MICRO = 1_000_000

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    kind: str  # counter, gauge or histogram
    help: str


def millionths(value: int) -> str:
    """Microseconds as seconds, micro-currency as currency, exactly."""
    sign, value = ("-", -value) if value < 0 else ("", value)
    whole, rest = divmod(value, _MICRO)
    return f"{sign}{whole}.{rest:06d}".rstrip("0").rstrip(".") if rest else f"{sign}{whole}"


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


class Page:
    """What is told in one scrape. Series come out in the order of the table, each with all its samples together."""

    def __init__(self, table: Iterable[Series]) -> None:
        self._series = {series.name: series for series in table}
        self._lines: dict[str, list[str]] = {name: [] for name in self._series}

    def tell(self, name: str, value: int | str, labels: Labels | None = None) -> None:
        self._lines[name].append(f"{name}{_labels((labels or {}).items())} {value}")

    def tell_histogram(self, name: str, found: Histogram, labels: Labels | None = None) -> None:
        own = list((labels or {}).items())
        lines, so_far = self._lines[name], 0
        for bound, count in zip([*map(millionths, found.bounds_us), "+Inf"], found.counts, strict=True):
            so_far += count
            lines.append(f"{name}_bucket{_labels([*own, ('le', bound)])} {so_far}")
        lines.append(f"{name}_sum{_labels(own)} {millionths(found.sum_us)}")
        lines.append(f"{name}_count{_labels(own)} {so_far}")

    def text(self) -> str:
        parts: list[str] = []
        for series in self._series.values():
            help_text = series.help.replace("\\", "\\\\").replace("\n", "\\n")
            parts += [f"# HELP {series.name} {help_text}", f"# TYPE {series.name} {series.kind}"]
            parts += self._lines[series.name]
        return "\n".join(parts) + "\n"
