"""A tenant's session as a real process: its requests run one at a time on a lease that is kept warm between them, as a notebook's cells do.

`python -m tests.sim.session_process TENANT START RESTORE_S TTL_S PLAN`: PLAN is JSON, a list of (arrival, work) in seconds after START, an instant of
the monotonic clock. Prints a line for each request: when it arrived and when the run that ended began; one for each time it asked for a GPU: how long
until it had one; and at the end how much longer it slept than it meant to.
"""

from __future__ import annotations

import json
import sys
import time

import sublet
from sublet.core.lease import LeaseState
from sublet.runtime.holding import Lease


def main(tenant: str, start: float, restore_s: float, ttl_s: float, plan: list[tuple[float, float]]) -> None:
    lease: Lease | None = None
    late = 0.0  # how much longer than asked it slept: a machine that stood still

    def sleep(seconds: float) -> None:
        nonlocal late
        until = time.monotonic() + seconds
        time.sleep(max(0.0, seconds))
        late = max(late, time.monotonic() - until) if seconds > 0 else late

    def usable() -> bool:
        return lease is not None and lease.status == "active" and lease.notice is None and not lease.yielded

    for arrives, work in plan:
        sleep(start + arrives - time.monotonic())
        while True:
            fresh = not usable()
            if fresh:
                if lease is not None:
                    lease.release()
                asked = time.monotonic()
                lease = sublet.gpu(
                    vram="16GiB", exclusivity="device", ttl=ttl_s, tenant=tenant, holder="process"
                )._keep()
                lease.keep_warm()
                print(json.dumps({"asked": time.monotonic() - asked}), flush=True)
            assert lease is not None
            with lease.working():
                if not usable():
                    continue  # it went as we came
                if fresh:
                    sleep(restore_s)
                    if lease.notice is not None:
                        continue  # told while it restored: nothing is begun
                began = time.monotonic()
                sleep(work)
                break
        print(json.dumps({"arrived": arrives, "began": began - start}), flush=True)
        if not usable():
            lease.release()
    while usable():
        sleep(0.02)
    if lease is not None:
        lease.release()
        # It may be given back by a thread of its keeper just now: a process that ends before that is a holder that was lost.
        while lease._ledger.look(lease.id).lease.state is not LeaseState.ENDED:
            time.sleep(0.02)
    print(json.dumps({"late": late}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), json.loads(sys.argv[5]))
