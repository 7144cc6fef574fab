"""Workloads: who asks for a GPU when, and for how long. Read from a request log.

Rules of this file:
- The only file of `sim` that reads anything. What it returns is integers, in the order of arrival.
- The columns are a closed list: a file with other columns is refused, and they are named.
- A line that cannot be read is refused with its number. Nothing is guessed and nothing is left out in
  silence.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sublet.core.errors import BadInput
from sublet.core.values import DAY_US, SECOND_US, check_name, format_duration

#: The columns of a request log such as Alibaba's GenAI one: when, which tenant, how long it ran, how it
#: ended, and what was asked for.
COLUMNS = ("t_s", "group", "exec_s", "status", "type", "steps", "images", "base_model", "n_lora")
SUCCEEDED = "SUCCEED"
STATUSES = (SUCCEEDED, "FAILED", "PENDING", "PROCESSING")

_SECONDS = re.compile(r"(\d{1,12})(?:\.(\d{1,6}))?")
#: Longer than this is no request of an interactive service, but a mistake in the file.
MOST_WORK_US = 7 * DAY_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a tenant: it came at `at` and needs a GPU for `work_us`."""

    tenant: str
    at: int
    work_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    arrivals: tuple[Arrival, ...]
    left_out: Mapping[str, int] = field(
        default_factory=dict
    )  # status to lines: what did not succeed has no run time

    @property
    def work_us(self) -> int:
        return sum(a.work_us for a in self.arrivals)

    @property
    def tenants(self) -> int:
        return len({a.tenant for a in self.arrivals})


def read_requests(path: Path) -> Workload:
    """Every request that succeeded. The file may be in any order."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return parse_requests(lines, name=path.name)
    except OSError as e:
        raise BadInput(
            f"the trace {path} cannot be read: {e.strerror}",
            remedy="give the path of a request log in CSV",
        ) from e
    except (UnicodeDecodeError, csv.Error) as e:
        raise BadInput(
            f"the trace {path.name} is not CSV text: {e}", remedy="give the path of a request log in CSV"
        ) from e


def parse_requests(lines: Iterable[str], *, name: str) -> Workload:
    rows = csv.reader(lines, strict=True)
    header = next(rows, None)
    if header is None:
        raise BadInput(f"the trace {name} is empty", remedy=f"its first line must be {','.join(COLUMNS)}")
    if tuple(header) != COLUMNS:
        raise BadInput(
            f"the trace {name} is no request log: {_wrong_columns(header)}",
            remedy=f"its first line must be {','.join(COLUMNS)}",
        )
    arrivals: list[Arrival] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        where = f"line {rows.line_num} of {name}"
        if len(row) != len(COLUMNS):
            raise BadInput(f"{where} has {len(row)} columns, not {len(COLUMNS)}")
        at, tenant, work, status = row[:4]
        if status not in STATUSES:
            raise BadInput(f"{where}: status {status[:40]!r} is unknown: {', '.join(STATUSES)} are known")
        if status != SUCCEEDED:
            left_out[status] += 1
            continue
        work_us = microseconds(work, f"{where}: exec_s")
        if not 0 < work_us <= MOST_WORK_US:
            raise BadInput(f"{where}: exec_s {work!r} is not between 0 and {format_duration(MOST_WORK_US)}")
        arrivals.append(
            Arrival(
                tenant=check_name(tenant, what=f"{where}: group"),
                at=microseconds(at, f"{where}: t_s"),
                work_us=work_us,
            )
        )
    if not arrivals:
        raise BadInput(f"the trace {name} has no request that succeeded: there is nothing to replay")
    return Workload(
        arrivals=tuple(sorted(arrivals, key=lambda a: a.at)), left_out=dict(sorted(left_out.items()))
    )


def first_part(workload: Workload, until_us: int) -> Workload:
    """What arrived in the first `until_us`."""
    kept = tuple(a for a in workload.arrivals if a.at < until_us)
    if not kept:
        raise BadInput(f"nothing arrives in the first {format_duration(until_us)} of the trace")
    return Workload(arrivals=kept, left_out=workload.left_out)


def _wrong_columns(header: list[str]) -> str:
    missing = [c for c in COLUMNS if c not in header]
    unknown = [c[:40] for c in header if c not in COLUMNS]
    if not missing and not unknown:
        return "its columns are in another order, or there twice"
    found = [f"without {', '.join(missing)}"] if missing else []
    return " and ".join([*found, f"with {', '.join(map(repr, unknown[:9]))}"] if unknown else found)


def microseconds(text: str, what: str) -> int:
    found = _SECONDS.fullmatch(text)
    if found is None:
        raise BadInput(f"{what} {text[:40]!r} is no number of seconds, such as 32 or 32.5")
    return int(found[1]) * SECOND_US + int((found[2] or "").ljust(6, "0"))
