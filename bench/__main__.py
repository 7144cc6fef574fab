"""`python -m bench [ONLY]`: run the measurements and say which goals were reached."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

from bench import (
    bucket_saves,
    checkpoints,
    handover,
    launches,
    leases,
    notebooks,
    placing,
    queues,
    scaling,
    scheduling,
    simulating,
    studio,
    training,
    workers,
)
from bench.measure import MOST_WAITING_PERCENT, NOT_ALONE, progress, show, waited_s
from sublet.ledger.sqlite import file_system_of, library_version

SUITES = {
    "leases": leases.run,
    "queues": queues.run,
    "scaling": scaling.run,
    "scheduling": scheduling.run,
    "simulating": simulating.run,
    "handover": handover.run,
    "launches": launches.run,
    "workers": workers.run,
    "placing": placing.run,
    "checkpoints": checkpoints.run,
    "bucket": bucket_saves.run,
    "training": training.run,
    "notebooks": notebooks.run,
    "studio": studio.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("only", nargs="?", choices=sorted(SUITES), help="run one of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers of every round")
    parser.add_argument(
        "--place",
        type=Path,
        default=Path("/var/tmp"),
        help="a folder on the disk to measure (default: /var/tmp)",
    )
    wanted = parser.parse_args()
    kind = file_system_of(wanted.place)
    if kind in ("tmpfs", "ramfs"):
        parser.error(f"{wanted.place} is in memory ({kind}): name a folder on a disk with --place")
    place = Path(tempfile.mkdtemp(prefix="sublet-bench-", dir=wanted.place))
    place.chmod(0o755)  # the PostgreSQL server runs as another user
    machine: dict[str, object] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "sqlite": ".".join(map(str, library_version())),
        "file_system": kind,
    }
    began, waited = time.monotonic(), waited_s()
    try:
        sections = [
            section for name, run in SUITES.items() if wanted.only in (None, name) for section in run(place)
        ]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    took = time.monotonic() - began
    waiting_percent = machine["waited_for_cpu_percent"] = round(100 * (waited_s() - waited) / took, 1)
    progress(f"took {took:.0f} s")
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items()))
    print("Medians of interleaved rounds; a ratio is the median of the rounds' ratios.\n")
    if waiting_percent > MOST_WAITING_PERCENT:
        print(f"{NOT_ALONE}\n")
    show(sections)
    if wanted.json:
        wanted.json.write_text(
            json.dumps({"machine": machine, "sections": [s.as_json() for s in sections]}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
