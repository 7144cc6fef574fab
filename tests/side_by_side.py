"""`python -m tests.side_by_side [pytest options]`: the whole suite as several pytest runs at once.

Most tests here wait for real time to pass (a ttl, a deadline, a storm) or for a disk, so five runs share two cores well; with more, those
that measure time starve. The long places are in the five runs that begin; each that is over makes room for one of the short ones, so that all are
busy until the end wherever they run. Python may write down what it compiled: hundreds of interpreters are started. What a run has
said is shown when it is over, and at the end one line for each. A run that was killed, or left without a summary, has failed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parent
RUNS = 5
#: About how long each takes, all running; a file that is not named counts as `UNKNOWN`. Files that start the same servers, or fork from the same
#: process with torch, stay together: the longest name that fits a file is where it belongs.
SECONDS = {
    "training/ docs/ test_examples training/test_shim": 300,
    "studio/": 275,
    "ledger/": 265,
    "runtime/": 240,
    "remote/": 190,
    "store/": 200,
    "storms/": 165,
    "notebook/": 145,
    "drivers/": 125,
    "hosting/": 125,
    "cli/": 125,
    "studio/test_page": 115,
    "deploy/": 105,
    "store/test_bucket": 105,
    "brokers/": 105,
    "training/test_kills": 85,
    "core/": 75,
    "notebook/test_lab notebook/test_recipe_11": 65,
    "runtime/test_command": 60,
    "core/test_as_before core/test_cost": 45,
    "sim/": 35,
    "sinks/": 30,
    "everywhere/": 35,
    "studio/test_fuzz": 25,
    "notices/": 20,
    "proof/": 20,
    "training/test_run": 20,
    "training/test_step": 15,
    "placement/": 5,
}
#: A place that takes less is not among those that begin. Several are one run, until they take so long together as a run of its own is worth.
SHORT = 100
ENOUGH = 40
UNKNOWN = 5
PROGRESS_SECONDS = 30
NOTHING_CHOSEN = 5  # pytest's own code: with -k, none of a run's tests may be meant


@dataclass
class Run:
    names: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    seconds: float = 0  # expected, then measured
    process: subprocess.Popen[bytes] | None = None
    output: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def text(self) -> str:
        """So far, without moving the place where the run writes on."""
        number = self.output.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")

    def progress(self) -> int:
        """How many tests are over."""
        return sum(len(dots) for dots in re.findall(r"^[.sFExX]+", self.text(), re.M))

    def verdict(self, options: list[str]) -> tuple[bool, str]:
        """Whether it is good, and what pytest said last or why it could not."""
        assert self.process is not None
        code = self.process.returncode
        said = re.findall(
            r"^=*\s*(.*\d+ (?:passed|failed|error|skipped|deselected).* in [\d.]+s.*?)\s*=*$",
            self.text(),
            re.M,
        )
        if code < 0:
            return False, f"killed by {signal.Signals(-code).name}"
        if code == NOTHING_CHOSEN and options:
            return True, "no test was chosen"
        if not said:
            return False, f"ended with code {code} and no summary: not all of it was run"
        return code == 0, said[-1]


def split(tests: Path, runs: int) -> list[Run]:
    """In the order in which they begin: the long places, each to the run that has least to do, then what fills the gaps, the longest first."""
    belonging: dict[str, list[Path]] = {}
    for file in sorted(tests.rglob("test_*.py")):
        name = file.relative_to(tests).as_posix()
        fits = {part: place for place in SECONDS for part in place.split() if name.startswith(part)}
        folder, nested, _ = name.partition("/")
        belonging.setdefault(fits[max(fits, key=len)] if fits else folder + nested, []).append(file)
    expected = {place: SECONDS.get(place, UNKNOWN * len(files)) for place, files in belonging.items()}
    first = [Run() for _ in range(runs)]
    later = [Run()]
    for place in sorted(belonging, key=lambda p: (-expected[p], p)):
        if expected[place] >= SHORT:
            run = min(first, key=lambda r: r.seconds)
        else:
            if later[-1].seconds >= ENOUGH:
                later.append(Run())
            run = later[-1]
        run.names.append(place)
        run.files += belonging[place]
        run.seconds += expected[place]
    return [run for run in first + later if run.files]


def main(tests: Path, options: list[str]) -> int:
    runs = split(tests, RUNS)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    begun = shown = time.monotonic()
    try:
        waiting, left = list(runs), list[Run]()
        while waiting or left:
            while waiting and len(left) < RUNS:
                run = waiting.pop(0)
                command = [sys.executable, "-m", "pytest", *options, *map(str, run.files)]
                run.process = subprocess.Popen(
                    command, stdout=run.output, stderr=subprocess.STDOUT, env=environment
                )
                run.seconds = -time.monotonic()
                left.append(run)
            time.sleep(0.2)
            now = time.monotonic()
            for run in [r for r in left if r.process is not None and r.process.poll() is not None]:
                left.remove(run)
                run.seconds += now
                print(f"--- {', '.join(run.names)}\n{run.text()}", flush=True)
            if left and now - shown > PROGRESS_SECONDS:
                shown = now
                print(
                    f"{clock(now - begun)}  " + ", ".join(f"{r.progress()} of {r.names[0]}" for r in left),
                    flush=True,
                )
    finally:
        end(runs)
    verdicts = [run.verdict(options) for run in runs]
    for run, (good, words) in zip(runs, verdicts, strict=True):
        print(f"{'ok    ' if good else 'FAILED'} {clock(run.seconds)}  {words}  ({', '.join(run.names)})")
    return 0 if all(good for good, _ in verdicts) else 1


def end(runs: list[Run]) -> None:
    """As Ctrl-C would: what a run has started is ended by it."""
    going = [r.process for r in runs if r.process is not None and r.process.poll() is None]
    for process in going:
        process.send_signal(signal.SIGINT)
    for process in going:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell starts what it does not wait for with Ctrl-C ignored, and so would be every process of every test, those that test Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(TESTS, sys.argv[1:]))
