"""One process that uses a PostgreSQL ledger as fast as it can, told when and for how long on standard input.

`python -m bench.postgres_load URL HOST leases|steps`; each line in is a number of seconds, each line out how many operations were done.
"""

from __future__ import annotations

import sys
import time

from bench.ledgers import lease_cycle, step_cycle
from sublet.ledger.engines.postgres.engine import open_ledger
from sublet.processes.clock import HostClock

OPS = {"leases": 3, "steps": 1}


def main() -> None:
    url, host, kind = sys.argv[1:4]
    ledger = open_ledger(url, HostClock())
    cycle = (lease_cycle if kind == "leases" else step_cycle)(ledger, host)
    for _ in range(20):
        cycle()
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, cycles = float(line), 0
        began = now = time.perf_counter()
        while now - began < seconds:
            cycle()
            cycles += 1
            now = time.perf_counter()
        print(cycles * OPS[kind] / (now - began), flush=True)
    ledger.close()


if __name__ == "__main__":
    main()
