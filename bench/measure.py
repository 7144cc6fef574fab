"""How everything here is measured, and how it is shown.

Rules of this file:
- What is compared is interleaved: every round gives each subject a few short turns, in a rotating order, so that a slow
  minute of the machine hits all of them. A rate is the median over rounds, a ratio is the median of the rounds' ratios.
- A goal that was not reached says so. A subject that could not run says why and stays in the table.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROUNDS = 7
TURNS = 2
TURN_S = 0.22
MOST_WAITING_PERCENT = 3.0
NOT_ALONE = "OTHERS USED THE CPU: this process often waited for one. Subjects suffer unequally: do not quote this run."
SETTLE_S = 0.03  # what the last subject left to its background threads should not be paid by the next


@dataclass(frozen=True)
class Subject:
    name: str
    cycle: Callable[[], object]
    ops: int  # operations one cycle counts for
    warm_cycles: int = 30


@dataclass(frozen=True)
class Goal:
    what: str
    measured: float
    wanted: float
    unit: str = "x"
    at_most: bool = False

    @property
    def reached(self) -> bool:
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted


@dataclass
class Section:
    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {
            "title": self.title,
            "columns": self.columns,
            "rows": self.rows,
            "data": self.data,
            "goals": [asdict(g) | {"reached": g.reached} for g in self.goals],
            "notes": self.notes,
        }


def interleave(
    subjects: Sequence[Subject], *, rounds: int = ROUNDS, turns: int = TURNS, turn_s: float = TURN_S
) -> dict[str, list[float]]:
    """Operations per second of each subject, one number per round."""
    for subject in subjects:
        for _ in range(subject.warm_cycles):
            subject.cycle()
    rates: dict[str, list[float]] = {s.name: [] for s in subjects}
    for number in range(rounds):
        done = dict.fromkeys(rates, 0)
        spent = dict.fromkeys(rates, 0.0)
        for turn in range(turns):
            first = (number * turns + turn) % len(subjects)
            for subject in [*subjects[first:], *subjects[:first]]:
                cycle, cycles = subject.cycle, 0
                began = now = time.perf_counter()
                while now - began < turn_s:
                    cycle()
                    cycles += 1
                    now = time.perf_counter()
                done[subject.name] += cycles * subject.ops
                spent[subject.name] += now - began
                time.sleep(SETTLE_S)
        for name in rates:
            rates[name].append(done[name] / spent[name])
    return rates


def waited_s() -> float:
    """How long the main thread was ready to run and had no CPU. A load from outside shows here and nowhere else."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def rate_row(name: str, rates: Mapping[str, Sequence[float]], against: Sequence[str], note: str) -> list[str]:
    """One line of a table of rates: the median, its spread, and the ratio to each of `against` that ran."""
    mine = rates[name]
    cells = [name, f"{statistics.median(mine):,.0f}", f"{min(mine):,.0f}-{max(mine):,.0f}"]
    for other in against:
        cells.append(f"{median_ratio(mine, rates[other]):.2f}" if other in rates else "-")
    return [*cells, note]


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def goal_cells(goal: Goal, at_most: str = "<=", at_least: str = ">=") -> list[str]:
    digits = 0 if goal.unit == "%" else 2
    return [
        goal.what,
        f"{goal.measured:.{digits}f} {goal.unit}",
        f"{at_most if goal.at_most else at_least} {goal.wanted:g} {goal.unit}",
        "reached" if goal.reached else "NOT REACHED",
    ]


GOAL_COLUMNS = ["goal", "measured", "wanted", ""]


def show(sections: Sequence[Section]) -> None:
    if sys.stdout.isatty():
        _show_rich(sections)
    else:
        _show_plain(sections)


def _show_rich(sections: Sequence[Section]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for section in sections:
        table = Table(title=section.title, title_justify="left")
        for i, column in enumerate(section.columns):
            last = i == len(section.columns) - 1
            table.add_column(column, justify="left" if i == 0 or last else "right")
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
        for note in section.notes:
            console.print(note, style="dim", markup=False)
        console.print()
    goals = Table(title="Goals", title_justify="left")
    for column in GOAL_COLUMNS:
        goals.add_column(column)
    for section in sections:
        for goal in section.goals:
            goals.add_row(*goal_cells(goal), style=None if goal.reached else "bold red")
    console.print(goals)


def _show_plain(sections: Sequence[Section]) -> None:
    for section in sections:
        print(section.title)
        _print_columns(section.columns, section.rows)
        for note in section.notes:
            print(f"  {note}")
        print()
    print("Goals")
    _print_columns(GOAL_COLUMNS, [goal_cells(goal) for section in sections for goal in section.goals])


def _print_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(r[i]) for r in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        cells = [
            cell.ljust(width) if i in (0, len(columns) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
