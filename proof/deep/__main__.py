"""`python -m proof.deep --seed N --events M`: one simulated world, or many, with every rule checked after every event.

The seed is printed first. The same seed is the same world, whatever the machine: a violation is shown again by the command it names.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

from proof.deep.world import Outcome, simulate

YEAR_US = 365 * 24 * 3600 * 1_000_000

#: Worlds.
SHOW_EVERY = 50


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.deep", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: a new one)")
    parser.add_argument("--worlds", type=int, default=1, help="how many, with the seeds after it")
    parser.add_argument("--events", type=int, default=2000, help="messages to the ledger in each")
    parser.add_argument("--seconds", type=float, default=0, help="as many worlds as fit in so long, at most")
    parser.add_argument(
        "--faults", type=int, default=0, help="no more worlds when so many faults were injected"
    )
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument(
        "--journal", action="store_true", help="print the fingerprint of each world's journal"
    )
    wanted = parser.parse_args(argv)
    seed = wanted.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    done: list[Outcome] = []
    number = faults = 0
    while number < wanted.worlds or (
        time.monotonic() - began < wanted.seconds and not 0 < wanted.faults <= faults
    ):
        outcome = simulate(seed + number, wanted.events)
        number += 1
        done.append(outcome)
        faults += sum(outcome.faults.values())
        if number % SHOW_EVERY == 0 and not wanted.journal:
            print(f"{time.monotonic() - began:5.0f} s  {number} worlds, {faults:,} faults", flush=True)
        if wanted.journal:
            print(outcome.seed, outcome.fingerprint)
        if outcome.violation:
            print(
                f"VIOLATION {outcome.violation}\n  python -m proof.deep --seed {outcome.seed} --events {wanted.events}",
                flush=True,
            )
    numbers = total(done, time.monotonic() - began)
    print(json.dumps(numbers, indent=1) if not wanted.journal else "")
    if wanted.json:
        wanted.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 1 if numbers["violations"] else 0


def total(done: list[Outcome], seconds: float) -> dict[str, object]:
    faults: Counter[str] = Counter()
    work: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for outcome in done:
        faults.update(outcome.faults)
        work.update(outcome.done)
        ran.update(outcome.ran)
    return {
        "seed": done[0].seed,
        "worlds": len(done),
        "events": sum(o.events for o in done),
        "simulated_years": round(sum(o.simulated_us for o in done) / YEAR_US, 3),
        "simulated_days": int(sum(o.simulated_us for o in done) / YEAR_US * 365),
        "faults": sum(faults.values()),
        "faults_by_kind": dict(sorted(faults.items())),
        "work": dict(sorted(work.items())),
        "checks": dict(sorted(ran.items())),
        "violations": sum(bool(o.violation) for o in done),
        "violating": [
            {"seed": o.seed, "event": o.at_event, "what": o.violation} for o in done if o.violation
        ],
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
