"""Traces of nodes that come and go, and of jobs: read from CSV, line by line.

Rules of this file:
- It only reads. It returns integers (microseconds), in the order of time.
- The first line tells the kind of file; an unknown first line is refused with the list of known ones.
- A line that cannot be read is refused with its number. Nothing is guessed and nothing is left out in
  silence.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sublet.core.errors import BadInput
from sublet.core.leasing.lease import MAX_COUNT
from sublet.core.values import DAY_US, check_name, format_duration
from sublet.sim.workload import microseconds

EVENTS = ("t_s", "event", "node")
COUNTS = ("t_s", "instances")
SEGMENTS = ("segment", "t_s", "event", "n_nodes", "nodes")
JOBS = ("submit_s", "duration_s", "gpus", "vc")
KINDS = {
    EVENTS: "one node comes (add) or goes (remove) in a line",
    COUNTS: "how many nodes there are from then on",
    SEGMENTS: "several nodes come or go in a line, in named parts that have nothing to do with each other",
}
#: Lines of a file of parts in which no node comes or goes.
NOTHING = ("no-op", "migration")
Found = TypeVar("Found")
MOST_NODES = 100_000
MOST_RUN_US = 366 * DAY_US


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpan:
    """A node was there from `since` to `until`; `lost`: it was taken, and not only the trace was over."""

    since: int
    until: int
    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    name: str
    spans: tuple[NodeSpan, ...]  # by when they began
    ends_at: int

    @property
    def node_us(self) -> int:
        return sum(s.until - s.since for s in self.spans)

    @property
    def losses(self) -> int:
        return sum(s.lost for s in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    tenant: str
    at: int
    work_us: int
    gpus: int


def read_availability(path: Path) -> list[Availability]:
    """Return one trace for a file of events or counts, and one per part for a file of parts."""
    return _read(path, "an availability trace", lambda lines: parse_availability(lines, name=path.name))


def read_jobs(path: Path) -> list[TraceJob]:
    return _read(path, "a job log", lambda lines: parse_jobs(lines, name=path.name))


def _read(path: Path, what: str, parse: Callable[[Iterable[str]], Found]) -> Found:
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return parse(lines)
    except OSError as e:
        raise BadInput(
            f"the trace {path} cannot be read: {e.strerror}", remedy=f"give the path of {what} in CSV"
        ) from e
    except (UnicodeDecodeError, csv.Error) as e:
        raise BadInput(
            f"the trace {path.name} is not CSV text: {e}", remedy=f"give the path of {what} in CSV"
        ) from e


def _rows(
    lines: Iterable[str], name: str, known: Iterable[tuple[str, ...]]
) -> tuple[tuple[str, ...], Iterator[tuple[str, list[str]]]]:
    """The columns, and each row with where it stands."""
    rows = csv.reader(lines, strict=True)
    header = tuple(next(rows, ()))
    if header not in known:
        says = " or ".join(",".join(columns) for columns in known)
        shown = ",".join(header)[:80]
        raise BadInput(
            f"the trace {name} begins with {shown!r}, which is no trace known here",
            remedy=f"its first line must be {says}",
        )

    def each() -> Iterator[tuple[str, list[str]]]:
        for row in rows:
            where = f"line {rows.line_num} of {name}"
            if len(row) != len(header):
                raise BadInput(f"{where} has {len(row)} columns, not {len(header)}")
            yield where, row

    return header, each()


class _Presence:
    """Who is there, as a trace is read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.now = 0
        self._since: dict[str, int] = {}  # in the order they came
        self._spans: list[NodeSpan] = []

    def at(self, instant: int, where: str) -> None:
        if instant < self.now:
            raise BadInput(f"{where}: t_s goes back in time: lines are in the order of time")
        self.now = instant

    def comes(self, node: str, where: str) -> None:
        if node in self._since:
            raise BadInput(f"{where}: node {node[:40]!r} comes and is there already")
        if len(self._since) >= MOST_NODES:
            raise BadInput(f"{where}: more than {MOST_NODES} nodes at once")
        self._since[node] = self.now

    def goes(self, node: str, where: str) -> None:
        if node not in self._since:
            raise BadInput(f"{where}: node {node[:40]!r} goes and is not there")
        since = self._since.pop(node)
        if self.now > since:
            self._spans.append(NodeSpan(since=since, until=self.now, lost=True))

    def to_number(self, wanted: int, where: str) -> None:
        """Change the number of nodes. The file does not say which ones go: the last to come go first."""
        while len(self._since) > wanted:
            self.goes(next(reversed(self._since)), where)
        for number in range(len(self._since), wanted):
            self.comes(f"{self.now}-{number}", where)

    def whole(self) -> Availability:
        rest = [
            NodeSpan(since=since, until=self.now, lost=False)
            for since in self._since.values()
            if self.now > since
        ]
        spans = sorted([*self._spans, *rest], key=lambda s: (s.since, s.until, s.lost))
        return Availability(name=self.name, spans=tuple(spans), ends_at=self.now)


def parse_availability(lines: Iterable[str], *, name: str) -> list[Availability]:
    header, rows = _rows(lines, name, KINDS)
    found: dict[str, _Presence] = {}
    for where, row in rows:
        part = row[0] if header == SEGMENTS else ""
        presence = found.setdefault(part, _Presence(f"{name}:{part}" if part else name))
        presence.at(microseconds(row[1] if part else row[0], f"{where}: t_s"), where)
        if header == COUNTS:
            presence.to_number(_whole(row[1], f"{where}: instances", most=MOST_NODES), where)
            continue
        event = row[2] if header == SEGMENTS else row[1]
        nodes = [n for n in row[4].split("|") if n] if header == SEGMENTS else [row[2]]
        if header == SEGMENTS and _whole(row[3], f"{where}: n_nodes", most=MOST_NODES) != len(nodes):
            raise BadInput(f"{where}: n_nodes is {row[3]}, and {len(nodes)} nodes are named")
        if event == "add":
            for node in nodes:
                presence.comes(node, where)
        elif event == "remove":
            for node in nodes:
                presence.goes(node, where)
        elif header != SEGMENTS or event not in NOTHING:
            raise BadInput(f"{where}: event {event[:40]!r} is unknown: add and remove are known")
    made = [presence.whole() for presence in found.values()]
    if not any(m.spans for m in made):
        raise BadInput(
            f"the trace {name} has no node that was there for any time: there is nothing to replay"
        )
    return [m for m in made if m.spans]


def parse_jobs(lines: Iterable[str], *, name: str) -> list[TraceJob]:
    _, rows = _rows(lines, name, [JOBS])
    jobs: list[TraceJob] = []
    for where, (at, work, gpus, tenant) in rows:
        work_us = microseconds(work, f"{where}: duration_s")
        if not 0 < work_us <= MOST_RUN_US:
            raise BadInput(
                f"{where}: duration_s {work!r} is not between 0 and {format_duration(MOST_RUN_US)}"
            )
        jobs.append(
            TraceJob(
                tenant=check_name(tenant, what=f"{where}: vc"),
                at=microseconds(at, f"{where}: submit_s"),
                work_us=work_us,
                gpus=_whole(gpus, f"{where}: gpus", least=1, most=MAX_COUNT),
            )
        )
    if not jobs:
        raise BadInput(f"the trace {name} has no job: there is nothing to replay")
    return sorted(jobs, key=lambda j: j.at)


def of_busy_tenants(jobs: Iterable[TraceJob], least: int) -> list[TraceJob]:
    """Without the tenants that have fewer than `least` jobs: their means say nothing."""
    found = list(jobs)
    counts = Counter(j.tenant for j in found)
    kept = [j for j in found if counts[j.tenant] >= least]
    if not kept:
        raise BadInput(f"no tenant has {least} jobs or more: ask for fewer with --least-jobs")
    return kept


def _whole(text: str, what: str, *, most: int, least: int = 0) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
        raise BadInput(f"{what} {text[:40]!r} is no whole number from {least} to {most}")
    return int(text)
