"""A tenant's session as a real process: its requests run one at a time on a lease that is kept warm between them, as a notebook's cells do.

`python -m tests.sim.session_process TENANT RESTORE_S TTL_S PLAN`: PLAN is JSON, a list of (arrival, work) in seconds after an instant of the
monotonic clock, which it reads from its standard input once it has said that it is ready. Says in a line each what it did and when, in seconds
after that instant: woke for a request, asked for a GPU, restored, ran, told the ledger that it is idle. At the end, how much longer it slept at
worst than it meant to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import sublet
from sublet import wiring
from sublet.core.leasing.lease import LeaseState
from sublet.leases.lease import Lease
from sublet.ports.ledger import Ledger
from sublet.settings import load_settings


def say(**facts: Any) -> None:
    """In one write: the keeper's thread speaks too."""
    os.write(1, json.dumps(facts).encode() + b"\n")


def overheard(ledger: Ledger, start: float) -> None:
    known = ledger.mark

    def mark(key: Any, *, busy: bool) -> None:
        known(key, busy=busy)
        if not busy:
            say(idle=time.monotonic() - start)

    ledger.mark = mark  # type: ignore[method-assign]


def main(tenant: str, restore_s: float, ttl_s: float, plan: list[tuple[float, float]]) -> None:
    ledger = wiring.open_ledger(load_settings())
    say(ready=tenant)
    start = float(sys.stdin.readline())
    overheard(ledger, start)
    lease: Lease | None = None
    late = 0.0  # how much longer than asked it slept: a machine that stood still

    def sleep(seconds: float) -> None:
        nonlocal late
        until = time.monotonic() + seconds
        time.sleep(max(0.0, seconds))
        late = max(late, time.monotonic() - until) if seconds > 0 else late

    def since() -> float:
        return time.monotonic() - start

    def usable() -> bool:
        return lease is not None and lease.status == "active" and lease.notice is None and not lease.yielded

    for arrives, work in plan:
        slept = since() < arrives
        sleep(arrives - since())
        say(woke=since(), slept=slept)
        while True:
            fresh = not usable()
            if fresh:
                if lease is not None:
                    lease.release()
                asked = time.monotonic()
                lease = sublet.gpu(
                    vram="16GiB", exclusivity="device", ttl=ttl_s, tenant=tenant, holder="process"
                ).hold()
                lease.keep_warm()
                say(asked=time.monotonic() - asked)
            assert lease is not None
            with lease.working():
                if not usable():
                    continue  # it went as we came
                if fresh:
                    sleep(restore_s)
                    say(restored=since(), lease=lease.id)
                    if lease.notice is not None:
                        continue  # told while it restored: nothing is begun
                began = since()
                sleep(work)
                ended = since()
                break
        say(arrived=arrives, began=began, ended=ended, lease=lease.id)
        if not usable():
            lease.release()
    while usable():
        sleep(0.02)
    if lease is not None:
        lease.release()
        # It may be given back by a thread of its keeper just now: a process that ends before that is a holder that was lost.
        while lease._ledger.look(lease.id).lease.state is not LeaseState.ENDED:
            time.sleep(0.02)
    say(late=late)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4]))
