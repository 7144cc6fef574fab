"""The demo's training job: a real loop that leases, steps, commits, and can be run again after any death.

`python -m sublet.cli.demo_job JOB STEPS SECONDS_PER_STEP`. Its state is a few numbers, small enough to live in the commit
itself (the cursor); they are written in hexadecimal, so that equal means equal to the last bit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import sublet
from sublet.core.effect import Commit
from sublet.settings import load_settings
from sublet.wiring import open_ledger

WIDTH = 6


def initial() -> list[float]:
    return [0.0] * WIDTH


def sample(step: int) -> tuple[list[float], float]:
    """Deterministic by step: the data cursor is the step itself."""
    inputs = [((step * 7919 + i * 104729) % 1000) / 500.0 - 1.0 for i in range(WIDTH)]
    return inputs, sum(x * (i + 1) for i, x in enumerate(inputs))


def train_one(weights: list[float], step: int) -> tuple[list[float], float]:
    """One step of gradient descent towards weights 1, 2, 3, …"""
    inputs, target = sample(step)
    error = sum(w * x for w, x in zip(weights, inputs, strict=True)) - target
    rate = 0.4 / (1.0 + step / 100.0)
    return [w - rate * error * x for w, x in zip(weights, inputs, strict=True)], error * error


def pack(weights: list[float]) -> str:
    return json.dumps([w.hex() for w in weights])


def unpack(text: str) -> list[float]:
    return [float.fromhex(w) for w in json.loads(text)]


def run(job: str, steps: int, pause: float) -> int:
    ledger = open_ledger(load_settings())
    with sublet.gpu(vram="8GiB", ttl="3s", tier="spot", exclusivity="device", job=job) as lease:
        head = ledger.head(job)
        version, done = (head.version, head.step) if head else (0, 0)
        weights = unpack(head.cursor) if head else initial()
        while done < steps:
            if lease.notice is not None:
                return 85  # preempted and committed: everything up to `done` is durable
            lease.check()
            weights, loss = train_one(weights, done + 1)
            time.sleep(pause)
            committed = ledger.commit(
                lease.key,
                Commit(
                    job=job,
                    key=f"{job}:{done + 1}",
                    step=done + 1,
                    fingerprint="demo",
                    expected_version=version,
                    digest=f"{loss:.6f}",
                    cursor=pack(weights),
                ),
            )
            version, done = committed.version, done + 1
    return 0


def misbehave() -> None:
    """What the tour runs in a leased worker: it ignores every request to leave and leaves daemons behind."""
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()  # away from its parent's group, where a simple kill does not reach
            while True:
                time.sleep(60)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
    except sublet.LeaseLost:
        sys.exit(76)
