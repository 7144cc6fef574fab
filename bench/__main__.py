"""`python -m bench [PART,PART]`: run the measurements, say which goals were reached, and write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

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
from bench.measure import MOST_WAITING_PERCENT, NOT_ALONE, Section, progress, show, waited_s
from bench.page import page, versions
from sublet.ledger.engines.sqlite.engine import library_version
from sublet.ledger.engines.sqlite.ledger_file import file_system_of

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
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".bench" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"


def chosen(names: str) -> list[str]:
    """Parts by their names or the beginnings of them: `queue,leases` is `queues` and `leases`."""
    parts = []
    for name in names.split(","):
        found = [name] if name in SUITES else [suite for suite in SUITES if suite.startswith(name)]
        if len(found) != 1:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SUITES)}")
        parts += found
    return parts


def keep(results: dict[str, dict[str, Any]]) -> None:
    """After each part: a run that is ended early has measured what it has measured."""
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    in_order = {name: results[name] for name in SUITES if name in results}
    PAGE.write_text(page(in_order, [name for name in SUITES if name not in results], versions(ROOT)))


def commit() -> str:
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "only",
        nargs="?",
        type=chosen,
        default=list(SUITES),
        metavar="PART,PART",
        help=f"run some of them: {', '.join(SUITES)}",
    )
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
    described = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items())
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    sections: list[Section] = []
    all_began, all_waited = time.monotonic(), waited_s()
    try:
        for name, run in SUITES.items():
            if name not in wanted.only:
                continue
            began, waited = time.monotonic(), waited_s()
            found = list(run(place))
            took = time.monotonic() - began
            sections += found
            results[name] = {
                "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
                "commit": commit(),
                "seconds": round(took),
                "waited_percent": round(100 * (waited_s() - waited) / took, 1),
                "machine": described,
                "sections": [section.as_json() for section in found],
            }
            keep(results)
            progress(f"{name}: {took:.0f} s")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    took = time.monotonic() - all_began
    waiting_percent = machine["waited_for_cpu_percent"] = round(100 * (waited_s() - all_waited) / took, 1)
    progress(f"took {took:.0f} s; written to {PAGE.relative_to(ROOT)}")
    print(f"{described}, waited for cpu percent {waiting_percent}")
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
