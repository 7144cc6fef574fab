"""How long a waiter waits once the holder is gone, with real processes and a real warden; and how long a start takes."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.measure import Goal, Section, progress
from sublet import wiring
from sublet.core.leasing.lease import LeaseState
from sublet.leases.warden import warden_process
from sublet.settings import load_settings

TURNS = 15
HOLD = (
    "import sublet, sys, time\n"
    "with sublet.gpu(vram='16GiB', ttl='10m') as lease:\n"
    "    print(time.monotonic_ns(), flush=True)\n"
    "    sys.stdin.readline()\n"
)


def run(place: Path) -> list[Section]:
    return [_handover(place), _starts()]


def _start(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _handover(place: Path) -> Section:
    """Each holder is the last one's waiter, so every turn is one handover."""
    settings = {
        "SUBLET_HOME": str(place / "home"),
        "SUBLET_LEDGER": f"sqlite:{place}/home/ledger.db",
        "SUBLET_DEVICES": "host:1x16GiB",
    }
    os.environ.update(settings)
    environment = dict(os.environ)
    loaded = load_settings()
    section = Section("Handover of one device between two processes, ms", ["", "median", "longest"])
    holder = _start(environment)
    assert holder.stdout is not None
    holder.stdout.readline()
    ledger = wiring.open_ledger(loaded)
    try:
        for how in ("release", "kill -9"):
            progress(f"handover: {how} ...")
            taken: list[float] = []
            for _ in range(TURNS):
                waiter = _start(environment)
                while not any(a.lease.state is LeaseState.WAITING for a in ledger.leases()):
                    time.sleep(0.002)
                time.sleep(0.1)  # the waiter has gone to sleep
                assert holder.stdin is not None
                assert waiter.stdout is not None
                gone_at = time.monotonic_ns()
                if how == "release":
                    with contextlib.suppress(BrokenPipeError):
                        holder.stdin.write("\n")
                        holder.stdin.flush()
                else:
                    holder.kill()
                taken.append((int(waiter.stdout.readline()) - gone_at) / 1e6)
                holder.wait()
                holder = waiter
            section.rows.append([f"after {how}", f"{statistics.median(taken):.1f}", f"{max(taken):.1f}"])
            section.data[how] = taken
            section.goals.append(
                Goal(f"handover after {how}, longest of {TURNS}", max(taken), 100, "ms", at_most=True)
            )
    finally:
        holder.kill()
        holder.wait()
        pid = warden_process.warden_state(loaded)[2]
        wiring.close_all()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    return section


def _starts() -> Section:
    section = Section("Starts, ms (median of 15)", ["", "ms", "over bare python"])
    commands = {
        "python -c pass": ["-c", "pass"],
        "import sublet": ["-c", "import sublet"],
        "sublet --help": ["-m", "sublet", "--help"],
    }
    progress("starts ...")
    rounds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(15):
        for name, args in commands.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, *args], stdout=subprocess.DEVNULL, check=True)
            rounds[name].append((time.perf_counter() - begun) * 1000)
    bare = statistics.median(rounds["python -c pass"])
    for name, taken in rounds.items():
        median = statistics.median(taken)
        section.rows.append([name, f"{median:.0f}", f"{median / bare:.1f} x"])
        if name != "python -c pass":
            section.goals.append(Goal(name, median, 150, "ms", at_most=True))
    section.data = dict(rounds)
    return section
