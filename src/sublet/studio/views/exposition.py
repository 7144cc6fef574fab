"""The text format of Prometheus. It is a page of rules, and a client library would bring a registry of its
own.

Rules of this file:
- Only series of the table (name, kind, help) can be written: nothing undocumented is exposed.
- Label values may be any text. Backslash, quote and line break are escaped; in a help text, backslash and
  line break.
- Numbers are exact. A duration is microseconds divided by a million in decimal, never through a float.
- A histogram's buckets are cumulative and end with +Inf, which equals its count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sublet.core.journal.counters import Histogram

_MICRO = 1_000_000

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MetricSeries:
    name: str
    kind: str  # counter, gauge or histogram
    help: str


def millionths(value: int) -> str:
    """An integer of millionths as an exact decimal."""
    sign, value = ("-", -value) if value < 0 else ("", value)
    whole, rest = divmod(value, _MICRO)
    return f"{sign}{whole}.{rest:06d}".rstrip("0").rstrip(".") if rest else f"{sign}{whole}"


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


class MetricsPage:
    """The text of one scrape: series in the order of the table, each with its samples together."""

    def __init__(self, table: Iterable[MetricSeries]) -> None:
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
