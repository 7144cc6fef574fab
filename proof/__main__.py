"""`python -m proof [ONLY …]`: everything, three or four parts at a time, within an hour; writes docs/proof.md and a JSON of the numbers.

Exit code 0: no violation, every part finished. 1: something was violated or failed. 3: nothing was, but a part did not finish in time.
130: it was interrupted; what it had started was ended, and the page is as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from proof.page import page
from proof.parts import Part, parts
from sublet.ledger.engines.sqlite.engine import library_version
from sublet.testing.postgres import find_binaries

ROOT = Path(__file__).resolve().parents[1]
#: Parts at a time. Most of them wait for a disk, a deadline or each other's processes half of the time, so three share two cores well, and
#: four when the one is over that only computes.
LANES = 3
#: How nice a part of many processes is: the scheduler is fair to processes, and one that counts alone would get a tenth of what they do.
MAKING_WAY = "10"


@dataclass(slots=True)
class Result:
    name: str
    shows: str
    rules: str
    verdict: str = "not begun"  # 'held', 'VIOLATED', 'not finished', 'not begun'
    counts: list[tuple[str, int]] = field(default_factory=list)
    seconds: float = 0
    last_words: str = ""
    replay: str = ""
    numbers: Any = None
    at: str = ""
    commit: str = ""
    run: str = ""  # when the run began that it was part of


def run(part: Part, limit_s: float, logs: Path, run_of: str, interrupted: threading.Event) -> Result:
    result = Result(part.name, part.shows, part.rules, run=run_of)
    result.replay = " ".join([*(f"{k}={v}" for k, v in part.environment.items()), *part.command[1:]])
    result.at, result.commit = time.strftime("%H:%M UTC", time.gmtime()), commit()
    numbers = logs / f"{part.name}.json"
    log = logs / f"{part.name}.log"
    command = [*part.command, *(["--json", str(numbers)] if part.json else [])]
    if not part.alone:
        command = ["nice", "-n", MAKING_WAY, *command]
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={"SUBLET_SEED": "random", **os.environ, **part.environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = _ended(process, began + min(limit_s, part.limit_s), interrupted)
    said = log.read_text(errors="replace")
    result.seconds = round(time.monotonic() - began, 1)
    result.last_words = "\n".join(said.strip().splitlines()[-3:])[-600:]
    if code is None:
        result.verdict = "not finished"
        return result
    result.verdict = "held" if code == 0 else "VIOLATED"
    if code == 0:
        result.counts = part.counts(said, numbers, part.environment)
    if part.json and numbers.exists():
        result.numbers = json.loads(numbers.read_text())
    return result


def _ended(process: subprocess.Popen[bytes], until: float, interrupted: threading.Event) -> int | None:
    """Its exit code, or None when it had to be ended."""
    while (code := process.poll()) is None and time.monotonic() < until and not interrupted.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    if code is not None:
        return code
    # As Ctrl-C would, so that it ends the servers and processes it started.
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def machine() -> dict[str, str]:
    binaries = find_binaries()
    postgres = (
        subprocess.run(
            [str(binaries / "postgres"), "--version"], capture_output=True, text=True
        ).stdout.strip()
        if binaries
        else "none"
    )
    memory = next(
        (
            line.split()[1]
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemTotal")
        ),
        "0",
    )
    return {
        "cores": str(os.cpu_count()),
        "memory": f"{int(memory) >> 20} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "sqlite": ".".join(map(str, library_version())),
        "postgres": postgres,
        "commit": commit(),
    }


def commit() -> str:
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip()


def merged(earlier: list[dict[str, Any]], now: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Parts that were run alone replace their own lines and leave the others; one that was cut off does not replace one that was not."""
    kept = {p["name"]: p for p in earlier}
    for part in now:
        over = part["verdict"] in ("held", "VIOLATED")
        if over or kept.get(part["name"], {}).get("verdict") not in ("held", "VIOLATED"):
            kept[part["name"]] = part
    return kept


def hear_interrupts() -> None:
    """A shell starts what it does not wait for with Ctrl-C ignored, and so would be every process of every part, those that test Ctrl-C too."""
    for told in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told, signal.default_int_handler)


def main(argv: list[str] | None = None) -> int:
    known = parts()
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument("only", nargs="*", help=f"parts: {', '.join(p.name for p in known)}")
    parser.add_argument(
        "--minutes", type=float, default=60, help="no part begins or goes on after this (default: 60)"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / ".proof", help="where logs and numbers go (default: .proof)"
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "proof.md")
    wanted = parser.parse_args(argv)
    names = [name for given in wanted.only for name in given.replace(",", " ").split()]
    unknown = sorted(set(names) - {p.name for p in known})
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}")
    chosen = [p for p in known if not names or p.name in names]
    wanted.results.mkdir(parents=True, exist_ok=True)
    seed = os.environ.get("SUBLET_PROOF_SEED", "1")
    print(f"seed {seed}; logs in {wanted.results}", flush=True)
    # To the millisecond: two short runs may begin within one second, and are two.
    run_of = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
    results = {p.name: Result(p.name, p.shows, p.rules, run=run_of) for p in chosen}
    left = sorted(chosen, key=lambda p: (not p.first, -p.expected_s))
    began, load = time.monotonic(), os.getloadavg()[0]
    lock, interrupted = threading.Lock(), threading.Event()

    def lane() -> None:
        while True:
            with lock:
                if not left or interrupted.is_set():
                    return
                part = left.pop(0)
            remaining = wanted.minutes * 60 - (time.monotonic() - began)
            if remaining < 20:
                continue
            print(f"{_clock(began)}  {part.name} …", flush=True)
            done = run(part, remaining, wanted.results, run_of, interrupted)
            results[part.name] = done
            counts = ", ".join(f"{n:,} {what}" for what, n in done.counts)
            print(
                f"{_clock(began)}  {part.name}: {done.verdict} in {done.seconds:.0f} s  {counts}", flush=True
            )
            if done.verdict == "VIOLATED":
                print(done.last_words, flush=True)
            if part.alone:
                lanes.append(pool.submit(lane))

    # Futures, because a thread whose `join` was interrupted is taken for ended (Python 3.11).
    with ThreadPoolExecutor(LANES + sum(p.alone for p in chosen)) as pool:
        lanes = [pool.submit(lane) for _ in range(LANES)]
        try:
            while not all(each.done() for each in lanes):
                wait(lanes)
        except KeyboardInterrupt:
            print(
                f"{_clock(began)}  interrupted: ends what it started; {wanted.page} is as it was", flush=True
            )
            interrupted.set()
            wait(lanes)
            return 130
    for done in lanes:
        done.result()
    ordered = [results[p.name] for p in chosen]
    summary = {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "seed": seed,
        "lanes": len(lanes),
        "run": run_of,
        "tried": len(chosen),  # of one that was cut off, what an earlier run found is shown
        "seconds": round(time.monotonic() - began, 1),
        "load_before": load,
        "machine": machine(),
        "parts": [asdict(r) for r in ordered],
    }
    store = wanted.results / "results.json"
    earlier = json.loads(store.read_text())["parts"] if names and store.exists() else []
    kept = merged(earlier, [asdict(r) for r in ordered])
    summary["parts"] = [kept[p.name] for p in known if p.name in kept]
    summary["never"] = [p.name for p in known if p.name not in kept]
    store.write_text(json.dumps(summary, indent=1) + "\n")
    wanted.page.write_text(page(summary))
    print(f"{_clock(began)}  written to {wanted.page} and {store}")
    if any(r.verdict == "VIOLATED" for r in ordered):
        return 1
    return 0 if all(r.verdict == "held" for r in ordered) else 3


def _clock(began: float) -> str:
    seconds = int(time.monotonic() - began)
    return f"{seconds // 60:02d}:{seconds % 60:02d}"


if __name__ == "__main__":
    tempfile.tempdir = tempfile.gettempdir()
    hear_interrupts()
    sys.exit(main())
