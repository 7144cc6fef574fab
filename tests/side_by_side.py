"""`python -m tests.side_by_side [pytest options]`: the whole suite as several pytest runs at once.

Many tests wait for real time to pass (a ttl, a deadline, a storm) or for a disk, so four runs share two cores well; with more, those that
measure time starve. Files that start the same servers stay together in one place; places wait in one queue, the longest first, so that
none is left running alone at the end.

Rules of this file:
- This process imports what nearly every test needs, has no thread of its own, and each run is forked from it. The processes that
  `tests.forked` forks from are started here, once for all runs.
- What a run has said is shown when it is over, and at the end there is one line for each.
- A run that was killed, or left without a summary, has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO

import pytest

from sublet.testing.postgres import made_once
from tests import forked

TESTS = Path(__file__).parent
RUNS = 6
#: About how long each place takes, all running. The longest name that fits a file says where it belongs; a folder or file that is not
#: named is a place of its own and counts as `UNKNOWN` for each file.
SECONDS = {
    "studio/": 365,
    "ledger/": 300,
    "training/program_state/ training/scripts/": 255,
    "leases/ functions/": 240,
    "store/": 220,
    "training/test_shim": 220,
    "processes/": 200,
    "training/ test_examples": 180,
    "cli/": 170,
    "storms/": 165,
    "client/": 165,
    "notebook/": 160,
    "docs/": 135,
    "devices/": 125,
    "proof/": 115,
    "store/replicas/test_bucket store/test_bucket": 110,
    "queues/brokers/": 110,
    "studio/test_page": 110,
    "deploy/": 110,
    "training/test_kills": 95,
    "core/": 85,
    "training/test_programs training/test_small_programs": 80,
    "queues/": 60,
    "runs/": 60,
    "notebook/test_lab notebook/test_recipe_11": 55,
    "notice_bus/": 35,
    "queues/sinks/": 30,
    "training/test_step": 25,
    "sim/": 25,
    "training/test_run": 25,
    "studio/test_fuzz": 20,
    "core/test_as_before core/test_cost": 15,
    "everywhere/": 15,
    "test_forked": 10,
    "test_side_by_side": 10,
    "placement/": 5,
}
#: `make lint` runs these, beside the others.
OF_THE_LINTERS = {"test_tidy.py"}
#: Short places are one run, until they take so long together.
ENOUGH = 30
UNKNOWN = 3
PROGRESS_SECONDS = 30
NOTHING_CHOSEN = 5  # pytest's own code: with -k, none of a run's tests may be meant
#: A plug-in that is there before pytest is has its own asserts as they are.
OF_EACH_RUN = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
#: Beside what `tests.forked` imports for whoever it forks.
PRELOADED = ("_hypothesis_pytestplugin", "hypothesis.strategies", "pytest_timeout")


@dataclass
class Run:
    names: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    seconds: float = 0  # expected, then measured
    pid: int = 0
    code: int | None = None  # how it ended; below zero: by which signal
    output: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def begin(self, options: list[str]) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(self.output.fileno(), 1)
            os.dup2(self.output.fileno(), 2)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            code = 1
            try:
                code = pytest.main([*OF_EACH_RUN, *options, *map(str, self.files)])
            except BaseException:
                traceback.print_exc()
            finally:
                _end(code)

    def over(self) -> bool:
        if self.code is None and self.pid:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def text(self) -> str:
        """So far, without moving the place where the run writes on."""
        number = self.output.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")

    def progress(self) -> int:
        """How many tests are over."""
        return sum(len(dots) for dots in re.findall(r"^[.sFExX]+", self.text(), re.M))

    def verdict(self, options: list[str]) -> tuple[bool, str]:
        """Whether it is good, and what pytest said last or why it could not."""
        said = re.findall(
            r"^=*\s*(.*\d+ (?:passed|failed|error|skipped|deselected).* in [\d.]+s.*?)\s*=*$",
            self.text(),
            re.M,
        )
        if self.code is None:
            return False, "was not run to its end"
        if self.code < 0:
            return False, f"killed by {signal.Signals(-self.code).name}"
        if self.code == NOTHING_CHOSEN and options:
            return True, "no test was chosen"
        if not said:
            return False, f"ended with code {self.code} and no summary: not all of it was run"
        return self.code == 0, said[-1]


def _end(code: int) -> None:
    """As an interpreter ends, without taking every imported module apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def split(tests: Path) -> list[Run]:
    """In the order in which they begin."""
    belonging: dict[str, list[Path]] = {}
    for file in sorted(tests.rglob("test_*.py")):
        name = file.relative_to(tests).as_posix()
        if name in OF_THE_LINTERS:
            continue
        fits = {part: place for place in SECONDS for part in place.split() if name.startswith(part)}
        folder, nested, _ = name.partition("/")
        belonging.setdefault(fits[max(fits, key=len)] if fits else folder + nested, []).append(file)
    expected = {place: SECONDS.get(place, UNKNOWN * len(files)) for place, files in belonging.items()}
    runs: list[Run] = []
    for place in sorted(belonging, key=lambda p: (-expected[p], p)):
        if not runs or runs[-1].seconds >= ENOUGH:
            runs.append(Run())
        runs[-1].names.append(place)
        runs[-1].files += belonging[place]
        runs[-1].seconds += expected[place]
    return runs


def main(tests: Path, options: list[str]) -> int:
    waiting = split(tests)
    runs, left = list(waiting), list[Run]()
    begun = shown = time.monotonic()
    try:
        while waiting or left:
            while waiting and len(left) < RUNS:
                run = waiting.pop(0)
                run.seconds = -time.monotonic()
                run.begin(options)
                left.append(run)
            time.sleep(0.2)
            now = time.monotonic()
            for run in [r for r in left if r.over()]:
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
        interrupt(left)
    verdicts = [run.verdict(options) for run in runs]
    for run, (good, words) in zip(runs, verdicts, strict=True):
        print(f"{'ok    ' if good else 'FAILED'} {clock(run.seconds)}  {words}  ({', '.join(run.names)})")
    print(f"all of it took {clock(time.monotonic() - begun)}")
    return 0 if all(good for good, _ in verdicts) else 1


def interrupt(runs: list[Run]) -> None:
    """As Ctrl-C would: what a run has started is ended by it."""
    for number, seconds in ((signal.SIGINT, 20), (signal.SIGKILL, 20)):
        deadline = time.monotonic() + seconds
        for run in [r for r in runs if not r.over()]:
            os.kill(run.pid, number)
        while not all(r.over() for r in runs) and time.monotonic() < deadline:
            time.sleep(0.05)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def preload() -> None:
    """Once, instead of in each run."""
    for name in (*PRELOADED, *forked.WITH_STUDIO):
        with contextlib.suppress(ImportError):  # its tests say that it is missing
            import_module(name)
    for origin in (forked.plain, forked.with_studio, forked.with_torch):
        origin()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell starts what it does not wait for with Ctrl-C ignored, and so would be every process of every test, those that test Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As with `nohup`, which does the same to the end of a session: with it ignored, a test that ends one would see nothing happen.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Hundreds of interpreters are started: they may write down what they compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    preload()
    with made_once():
        sys.exit(main(TESTS, sys.argv[1:]))
