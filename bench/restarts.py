"""From a kill to the first new step, in parts; and what is wasted when there is a warning.

Rules of this file:
- A cold start is `python` with nothing imported; a forked one has everything imported, as the zygote's workers have.
- The predecessor is killed in the middle of a step, with its lease held and a version committed.
- "Wasted" are steps begun and not committed when the process has left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.lives import DRAINED, Life, check_once, forked, home, in_a_warm_process, looking
from bench.measure import Goal, Section, progress
from bench.stamps import Stamps
from sublet.core.leasing.lease import EndReason

ROUNDS = 7
WARNINGS = 20
EVERY = 1000
STEP_S = 0.02
START_S = 60.0
GRACE_US = 15_000_000

_JOBS = {
    "numpy": """
import numpy as np
import sublet
sublet.train
stamps.watch_train()
stamps.mark("imported")
values = np.zeros(1 << 17)
state = {"values": values}
def work():
    values.__iadd__(1.0)
""",
    "torch": """
import torch
import sublet
sublet.train
stamps.watch_train()
stamps.mark("imported")
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
batch = torch.randn(8, 256)
state = {"model": model, "optim": optim}
def work():
    optim.zero_grad()
    model(batch).square().mean().backward()
    optim.step()
""",
}
_COLD = """
import sys
from bench.stamps import Stamps
stamps = Stamps(sys.argv[2])
{job}
stamps.mark("built")
{run}
"""
_RUN = """
run = sublet.train(sys.argv[1], state, every=1, vram="256MiB", ttl="20s", wait="30s", progress=False)
import time
first = True
for step in run.steps(1 << 40):
    if first:
        stamps.mark("first step")
    work()
    if first:
        stamps.mark("done")
        stamps.tell()
        first = False
    # Then it sits still in a step until it is killed, so that the next one is measured alone.
    time.sleep(0.02 if step.number < run.resumed_at + 3 else 3600)
"""
COLD_NUMPY, COLD_TORCH, FORKED = "NumPy, cold python", "torch, cold python", "NumPy, forked warm"
#: What is shown, and between which two stamps it lies.
PARTS = {
    "process": ("killed", "begun"),
    "imports": ("begun", "imported"),
    "build": ("imported", "built"),
    "open, notices": ("built", "notices"),
    "lease": ("notices", "lease"),
    "own": ("lease", "owned"),
    "restore": ("owned", "restored"),
    "to the step": ("restored", "first step"),
    "all": ("killed", "first step"),
}


def run(place: Path) -> list[Section]:
    progress("training: kill to first step ...")
    started = in_a_warm_process("bench.restarts", "measure_starts", place / "starts", ROUNDS)
    progress("training: warnings ...")
    wasted = in_a_warm_process("bench.restarts", "measure_warnings", place / "warnings", WARNINGS)
    return [_starts(started), _wasted(wasted)]


def _starts(found: dict[str, list[dict[str, float]]]) -> Section:
    section = Section(
        f"From kill -9 to the first new step, ms (medians of {ROUNDS})", ["", *PARTS, "seen dead after"]
    )
    for name, rounds in found.items():
        cells = [f"{statistics.median(r[part] for r in rounds) * 1e3:.0f}" for part in (*PARTS, "noticed")]
        section.rows.append([name, *cells])
    section.notes += [
        "'own' waits until the warden has seen the death and the lease is over ('seen dead after', beside the other parts)",
        "'open, notices' opens the ledger and looks for whoever could warn: metadata services, files, the batch system",
    ]
    section.data = dict(found)
    return section


def _wasted(found: dict[str, list[int]]) -> Section:
    section = Section(
        f"Steps begun and not committed, {WARNINGS} warnings each at random moments, every={EVERY}",
        ["", "mean", "worst"],
    )
    for name, wasted in found.items():
        section.rows.append([name, f"{statistics.mean(wasted):.2f}", str(max(wasted))])
        section.goals.append(
            Goal(f"steps wasted per {name}, worst", float(max(wasted)), 1.0, "steps", at_most=True)
        )
    section.notes.append(
        "Ray published 23 wasted steps per preemption with a just-in-time checkpoint, and 129 with a periodic one"
    )
    section.data = dict(found)
    return section


# --- kill to first step, in a process of its own -------------------------------------------------------------


def measure_starts(place: str, rounds: str) -> dict[str, list[dict[str, float]]]:
    folder = Path(place)
    ways: dict[str, Callable[[str, Path], int]] = {
        COLD_NUMPY: lambda job, told: _cold("numpy", job, told),
        FORKED: _forked,
    }
    if find_spec("torch") is not None:
        ways[COLD_TORCH] = lambda job, told: _cold("torch", job, told)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    with home(folder):
        alive: dict[str, tuple[int, str]] = {}
        try:
            for number in range(int(rounds) + 1):
                for name, start in ways.items():
                    job = f"job-{name[:5].strip(',').lower()}-{list(ways).index(name)}"
                    told = folder / f"told-{number}-{list(ways).index(name)}"
                    killed, ledger_at = _kill(alive.pop(name, None))
                    pid = start(job, told)
                    said = _wait_for(told, pid)
                    if number:
                        found[name].append(_parts(killed, said) | {"noticed": _noticed(*ledger_at)})
                    alive[name] = (pid, said["lease"])
        finally:
            for pid, _ in alive.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return found


def _kill(living: tuple[int, str] | None) -> tuple[float, tuple[str, int]]:
    """When on the monotonic clock, and the lease that was killed with when on the ledger's."""
    if living is None:
        return time.monotonic(), ("", 0)
    pid, lease = living
    time.sleep(0.2)  # it has committed something
    with looking() as ledger:
        at = ledger.now()
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return killed, (lease, at)


def _noticed(lease: str, killed_at: int) -> float:
    with looking() as ledger:
        return (ledger.look(lease).lease.ended_at - killed_at) / 1e6


def _parts(killed: float, said: dict[str, Any]) -> dict[str, float]:
    at: dict[str, float] = {**said["at"], "killed": killed}
    at.setdefault("imported", at["begun"])
    at.setdefault("built", at["imported"])
    return {part: at[until] - at[since] for part, (since, until) in PARTS.items()}


def _cold(kind: str, job: str, told: Path) -> int:
    program = _COLD.format(job=_JOBS[kind], run=_RUN)
    return subprocess.Popen([sys.executable, "-c", program, job, str(told)]).pid


def _forked(job: str, told: Path) -> int:
    def live() -> None:
        stamps = Stamps(str(told))
        names: dict[str, Any] = {"stamps": stamps}
        exec(_JOBS["numpy"], names)
        stamps.mark("built")
        sys.argv[1:] = [job]
        exec(f"import sys\n{_RUN}", names)

    return forked(live)


def _wait_for(path: Path, pid: int) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > deadline or os.waitpid(pid, os.WNOHANG)[0]:
            raise RuntimeError(f"process {pid} made no step")
        time.sleep(0.001)
    told: dict[str, Any] = json.loads(path.read_text())
    return told


# --- warnings, in a process of its own -----------------------------------------------------------------------


def measure_warnings(place: str, times: str) -> dict[str, list[int]]:
    chance = random.Random(1)
    found: dict[str, list[int]] = {"SIGTERM": [], "revoke": []}
    with home(Path(place)):
        lives = {name: Life(f"job-{name.lower()}", EVERY, STEP_S) for name in found}
        for _ in range(int(times)):
            for name, life in lives.items():
                life.begin()
                deadline = time.monotonic() + START_S
                while not life.told["first_at"] and time.monotonic() < deadline:
                    time.sleep(0.001)
                time.sleep(chance.uniform(0.0, 0.3))
                if name == "SIGTERM":
                    life.told_to(signal.SIGTERM)
                else:
                    _revoke(life.job)
                code = life.ended()
                if code != DRAINED:
                    raise RuntimeError(f"{life.job} ended with {code}")
                found[name].append(life.told["begun"] - _committed(life.job))
        check_once([life.job for life in lives.values()])
    return found


def _revoke(job: str) -> None:
    with looking() as ledger:
        held = [a.lease for a in ledger.leases() if a.lease.request.job == job]
        for lease in held:
            ledger.revoke(
                lease.id, reason=EndReason.REVOKED, detail="measured", grace_us=GRACE_US, actor="bench"
            )


def _committed(job: str) -> int:
    with looking() as ledger:
        head = ledger.head(job)
        return head.step if head is not None else 0
