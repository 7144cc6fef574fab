"""Goodput under the preemptions of a real spot trace: how much of the time a job could have run became committed steps.

Rules of this file:
- The trace is read where it lies (`../shared/traces`, or SUBLET_TRACES) and is not part of the project. Without it the section is left out.
- One job per way of saving, all side by side in the same minutes, each always on the node that has been there longest. When that node
  goes the process is killed without a warning and started again at once, if there is another node.
- Time is compressed: trace, "10 minutes", "an hour", and what `core.progress.cadence` believes before it has seen a loss. Saves, leases and
  restarts are real and are not compressed, so each weighs as many times more than it would, which is against us.
- The oracle saves only when it must: it is told just before each loss, leaves with everything committed, and starts when the others do.
"""

from __future__ import annotations

import csv
import os
import signal
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.lives import DRAINED, Life, check_once, home, in_a_warm_process
from bench.measure import Goal, Section, progress
from sublet.core.progress import cadence

TRACE = "bamboo_p3_events.csv"
RUN_S = 240.0
STEP_S = 0.01
LEAD_S = 0.08  # how long before a loss the oracle is told
NEVER = 1 << 40
AUTO, TEN, HOURLY, ORACLE = 'every="auto"', "every 10 min", "hourly", "oracle"
WANTED = 0.97


def trace_path() -> Path:
    folder = os.environ.get("SUBLET_TRACES")
    return (Path(folder) if folder else Path(__file__).parents[2] / "shared" / "traces") / TRACE


@dataclass(frozen=True)
class Trace:
    """When one job that stays on the oldest node loses it, and when it could not run at all. Seconds."""

    losses: list[float]
    gaps: list[tuple[float, float]]
    length: float


def read_trace(path: Path) -> Trace:
    with path.open() as file:
        events = [(float(r["t_s"]), r["event"], r["node"]) for r in csv.DictReader(file)]
    since: dict[str, float] = {}
    on = ""
    losses, gaps, none_since = [], [], 0.0
    for at, batch in groupby(events, key=lambda event: event[0]):
        for _, what, node in batch:
            if what == "add":
                since[node] = at
            else:
                since.pop(node, None)
        if on and on not in since:
            losses.append(at)
            on, none_since = "", at
        if not on and since:
            on = min(since, key=lambda node: (since[node], node))
            if at > none_since:
                gaps.append((none_since, at))
    length = events[-1][0]
    if not on and none_since < length:
        gaps.append((none_since, length))
    return Trace(losses, gaps, length)


@dataclass
class Parts:
    """Where the time went, in seconds."""

    restart: float = 0.0
    lost: float = 0.0
    leaving: float = 0.0
    restarts: list[float] = field(default_factory=list)


def run(place: Path, run_s: float = RUN_S) -> list[Section]:
    path = trace_path()
    if not path.exists():
        progress(f"training: goodput is left out, there is no {path} (name its folder with SUBLET_TRACES)")
        return []
    trace = read_trace(path)
    progress(f"training: goodput over {len(trace.losses)} losses, {run_s:.0f} s ...")
    found = in_a_warm_process("bench.goodput", "measure", place / "goodput", path, run_s)
    return [_section(found, trace, run_s)]


def _section(found: dict[str, dict[str, Any]], trace: Trace, run_s: float) -> Section:
    factor = trace.length / run_s
    section = Section(
        f"Goodput under {len(trace.losses)} losses of a spot node in {trace.length / 3600:.1f} h, "
        f"{factor:.0f} x compressed, {STEP_S * 1e3:.0f} ms steps",
        [
            "",
            "goodput",
            "of the oracle",
            "saves",
            "restart s",
            "lost work s",
            "between steps s",
            "longer steps s",
            "",
        ],
    )
    best = found[ORACLE]["goodput"]
    for name, one in found.items():
        section.rows.append(
            [
                name,
                f"{one['goodput']:.4f}",
                f"{one['goodput'] / best:.4f}",
                str(one["saves"]),
                f"{one['restart']:.2f}",
                f"{one['lost']:.2f}",
                f"{one['between']:.2f}",
                f"{one['longer']:.2f}",
                one["note"],
            ]
        )
    section.goals.append(
        Goal('goodput of every="auto", of the oracle', found[AUTO]["goodput"] / best, WANTED)
    )
    restarts = sorted(found[AUTO]["restarts"])
    section.notes += [
        "goodput is committed steps x the time of a step / time with a node; every step was committed once, in order",
        f'a loss costs {restarts[len(restarts) // 2] * 1e3:.0f} ms (median) until the next step of every="auto" begins, '
        f"{restarts[len(restarts) // 2] * factor:.0f} s of the trace",
        "'longer steps' is what a step took beyond its time because others had the CPU",
        "nodes are processes of one host, whose warden sees a death at once; the loss of a whole host is seen when its lease expires",
    ]
    section.data = dict(found)
    return section


# --- in a process of its own ---------------------------------------------------------------------------------


def measure(place: str, path: str, run_s: str) -> dict[str, dict[str, Any]]:
    trace = read_trace(Path(path))
    factor = trace.length / float(run_s)
    cadence.BELIEVED_US = round(cadence.BELIEVED_US / factor)
    cadence.LONGEST_US = round(cadence.LONGEST_US / factor)
    ways: dict[str, Any] = {
        AUTO: "auto",
        TEN: f"{600 / factor:.3f}s",
        HOURLY: f"{3600 / factor:.3f}s",
        ORACLE: NEVER,
    }
    lives = {name: Life(f"job-{n}", every, STEP_S) for n, (name, every) in enumerate(ways.items())}
    parts = {name: Parts() for name in ways}
    with home(Path(place)):
        _live_through(trace, factor, lives, parts)
        committed = check_once([life.job for life in lives.values()])
    gone = sum(until - since for since, until in trace.gaps)
    available = (trace.length - gone) / factor
    found = {}
    for name, life in lives.items():
        told, part, steps = life.told, parts[name], committed[life.job]
        every_s = told["body_ns"] / 1e9 / max(1, told["bodies"])
        found[name] = {
            "goodput": steps * STEP_S / available,
            "steps": steps,
            "saves": told["saves"],
            "restart": part.restart,
            "restarts": part.restarts,
            "lost": part.lost,
            "between": told["between_ns"] / 1e9 + part.leaving,
            "longer": steps * (every_s - STEP_S),
            "available": available,
            "note": {ORACLE: "told before each loss"}.get(
                name, f"saves every {ways[name]}" if name != AUTO else ""
            ),
        }
    return found


def _live_through(trace: Trace, factor: float, lives: dict[str, Life], parts: dict[str, Parts]) -> None:
    start = time.monotonic()
    until = dict(trace.gaps)
    order = list(lives)
    begun_at = {name: time.monotonic() for name in order}
    for life in lives.values():
        life.begin()
    for number, loss in enumerate([*trace.losses, trace.length]):
        over = number == len(trace.losses)
        at = start + loss / factor
        warned = order if over else [ORACLE]  # the trace ends for everybody with a warning
        _sleep_until(at - LEAD_S)
        warned_at = {name: time.monotonic() for name in warned}
        for name in warned:
            lives[name].told_to(signal.SIGTERM)
        _sleep_until(at)
        killed_at = time.monotonic()
        for name in order:
            if name not in warned:
                lives[name].told_to(signal.SIGKILL)
        in_body = {name: life.told["body_at"] for name, life in lives.items()}
        for name, life in lives.items():
            code = life.ended()
            if code != (DRAINED if name in warned else -signal.SIGKILL):
                raise RuntimeError(f"{life.job} ({name}) ended with {code}")
            first = life.told["first_at"] / 1e9
            parts[name].restart += (first or killed_at) - begun_at[name]
            if first:
                parts[name].restarts.append(first - begun_at[name])
            if name in warned:
                parts[name].leaving += max(0.0, killed_at - warned_at[name])
            elif in_body[name]:
                parts[name].lost += killed_at - in_body[name] / 1e9
        done = {name: life.told["done"] for name, life in lives.items()}
        if over:
            return
        if loss in until:
            _sleep_until(start + until[loss] / factor)
        order = [*order[1:], order[0]]
        again_at = max(killed_at, start + until.get(loss, loss) / factor)
        for name in order:
            begun_at[name] = again_at
            lives[name].begin()
        _note_lost(lives, parts, done)


def _note_lost(lives: dict[str, Life], parts: dict[str, Parts], done: dict[str, int]) -> None:
    """When they have resumed: what of the steps they had done is not committed."""
    deadline = time.monotonic() + 10.0
    waiting = dict(lives)
    while waiting and time.monotonic() < deadline:
        for name, life in list(waiting.items()):
            if life.told["first_at"]:
                del waiting[name]
                parts[name].lost += (done[name] - life.told["resumed"]) * STEP_S
        time.sleep(0.002)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))
