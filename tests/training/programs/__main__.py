"""`python -m tests.training.programs --seeds 1..2000 --jobs 2`: judges so many programs, and says how often each feature was exact.

Exit code 0: none ended silently different, hung or crashed; with `--strict` none was refused late or printed something else either.
1: one did. The first ones are made small, and printed with a command that replays them.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.training.programs.features import all_features
from tests.training.programs.judge import Judge, Kind, Schedule, Verdict, judged, schedule_of
from tests.training.programs.life import Starter
from tests.training.programs.make import Program, alone, cook, make_program, recipe_of
from tests.training.programs.report import Tally, indented, lives_of, row_of, shown, told


class _Telling:
    """Of each verdict: counted, printed when it is bad, and written down."""

    def __init__(self, options: argparse.Namespace, schedule: Schedule | None, rows: object) -> None:
        self.options, self.schedule, self.rows = options, schedule, rows
        self.tally, self.lock, self.began = Tally(), threading.Lock(), time.monotonic()
        self.left_to_minimise = options.minimise

    def bad(self, kind: Kind) -> bool:
        return kind.bad or (self.options.strict and kind in (Kind.LATE, Kind.OUTPUT))

    def __call__(self, judge: Judge, verdict: Verdict) -> None:
        bad = self.bad(verdict.kind)
        with self.lock:
            small = bad and self.left_to_minimise > 0
            self.left_to_minimise -= small
        smaller = judge.smaller(verdict) if small else None
        with self.lock:
            self.tally.add(verdict)
            if self.rows is not None:
                print(json.dumps(row_of(verdict, smaller)), file=self.rows, flush=True)  # type: ignore[call-overload]
            if self.options.show:
                print(shown(verdict.program), lives_of(verdict), sep="\n")
            if bad or self.options.verbose or self.options.show:
                print(told(verdict), flush=True)
            if smaller is not None:
                self.tally.smallest["  ".join(smaller.program.features)] += 1
                print(f"  made small: {told(smaller)}\n{indented(shown(smaller.program))}", flush=True)
            done = sum(self.tally.kinds.values())
            if done % 100 == 0:
                counts = ", ".join(f"{count} {kind.value}" for kind, count in self.tally.kinds.most_common())
                print(
                    f"... {done} in {time.monotonic() - self.began:.0f} s: {counts}",
                    file=sys.stderr,
                    flush=True,
                )


def seeds_of(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("..")
        yield from range(int(first), int(last or first) + 1)


def main() -> int:
    options = _options()
    if options.features:
        for feature in all_features().values():
            why = f"may be refused: {feature.refusable}" if feature.refusable else ""
            print(f"{feature.family:14} {feature.name:45} {why}")
        return 0
    schedule = schedule_of(options.schedule) if options.schedule else None
    programs: Iterator[Program] = (make_program(seed) for seed in seeds_of(options.seeds))
    if options.recipe:
        programs = iter([cook(recipe_of(options.recipe), seed=options.seed)] * options.times)
    elif options.each:
        programs = (cook(recipe, seed=number) for number, (_, recipe) in enumerate(alone(), 1))
    with ExitStack() as stack:
        rows = stack.enter_context(Path(options.json).open("w")) if options.json else None
        telling = _Telling(options, schedule, rows)
        keep = Path(options.keep) if options.keep else None
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        starter = stack.enter_context(Starter(fresh=options.fresh))
        judged(
            programs,
            options.jobs,
            telling,
            starter=starter,
            schedule=schedule,
            stop=stop,
            limit_s=options.limit,
            keep=keep,
        )
    if not options.recipe:
        print(telling.tally.table())
    print(telling.tally.summary())
    return int(any(telling.bad(kind) for kind in telling.tally.kinds))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.training.programs", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seeds", default="1..100", help="such as 1..2000 or 3,17,40..50")
    parser.add_argument("--each", action="store_true", help="instead: each feature, holder, loop … alone")
    parser.add_argument("--recipe", help="instead: one program, as it was printed")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule of --recipe")
    parser.add_argument("--times", type=int, default=1, help="how often to judge --recipe")
    parser.add_argument("--schedule", help="the kills, as they were printed; '1:' is none")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one life")
    parser.add_argument("--fresh", action="store_true", help="start processes as users do, do not fork them")
    parser.add_argument("--strict", action="store_true", help="other output and late refusals are bad too")
    parser.add_argument(
        "--minimise", type=int, default=10, metavar="N", help="make the first N bad ones small"
    )
    parser.add_argument("--show", action="store_true", help="print the source and what each life said")
    parser.add_argument("--verbose", action="store_true", help="print every verdict")
    parser.add_argument("--json", help="a file for one line of JSON per program")
    parser.add_argument("--keep", help="a folder for what bad programs leave behind")
    parser.add_argument("--features", action="store_true", help="list the features, and leave")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
