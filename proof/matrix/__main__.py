"""`python -m proof.matrix [ONLY …]`: each program under plain Python and under the shim, disturbed; writes docs/proof-matrix.md and a JSON.

Exit code 0: nothing ended in a way that must not be. 1: something did. 3: something was not finished. 130: it was interrupted. With `--cases FILE` any
scripts can be tried, and the page is then written beside the results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from proof.__main__ import machine
from proof.matrix import case as a_case
from proof.matrix import catalogue, table
from proof.matrix.life import interrupted
from proof.matrix.trial import MUST_NOT_BE, ROOT, UNDETERMINED, Rig, Trial, Verdict, environment


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proof.matrix", description=__doc__)
    parser.add_argument("only", nargs="*", help="programs; all without")
    parser.add_argument("--cases", type=Path, help="a JSON of cases instead of the matrix's own programs")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SUBLET_MATRIX_SEED") or 0))
    parser.add_argument("--kills", type=int, default=5, help="kill -9 in each storm (default: 5)")
    parser.add_argument(
        "--twice",
        action="store_true",
        help="run plain Python twice, and try nothing that differs from itself",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="with --twice: only look whether new cases differ from themselves",
    )
    parser.add_argument("--lanes", type=int, default=2, help="programs at a time (default: 2)")
    parser.add_argument(
        "--minutes", type=float, default=40, help="no program is begun after this (default: 40)"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        help="one more option of the shim, as --option=--loop --option=12",
    )
    parser.add_argument("--python", type=Path, default=ROOT / ".venv" / "matrix" / "bin" / "python")
    parser.add_argument("--results", type=Path, default=ROOT / ".proof" / "matrix")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--list", action="store_true", help="the names, and what each is built as")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    wanted = arguments(argv)
    known = a_case.read(wanted.cases) if wanted.cases else catalogue.cases()
    if wanted.list:
        print("\n".join(f"{case.name:28} {case.model_of}" for case in known))
        return 0
    try:
        cases = a_case.chosen(known, wanted.only)
    except KeyError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    seed = wanted.seed or random.SystemRandom().randrange(1, 1 << 32)
    results = wanted.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    home = results / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    again = f"make matrix SEED={seed}" + (f" ONLY={','.join(wanted.only)}" if wanted.only else "")
    print(f"seed {seed}; again: {again}; logs in {results}", flush=True)
    rig = Rig(
        python=wanted.python.absolute(), results=results, home=home, seed=seed, kills=wanted.kills, twice=wanted.twice,
        plain_only=wanted.plain,
        environment=environment(home, wanted.python.absolute()),
        shim_options=("--vram", "128MiB", "--quiet", *wanted.option),
    )  # fmt: skip
    began, load = time.monotonic(), os.getloadavg()[0]
    # The one process that would be started by itself and live on: so it is known, and ended.
    warden = subprocess.Popen(
        [str(rig.python), "-m", "sublet", "warden"], env=rig.environment, cwd=results, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=(results / "warden.log").open("w"), start_new_session=True,
    )  # fmt: skip
    try:
        verdicts = in_lanes(cases, rig, wanted.lanes, began + wanted.minutes * 60)
    finally:
        warden.send_signal(signal.SIGTERM)
        try:
            warden.wait(10)
        except subprocess.TimeoutExpired:
            warden.kill()
            warden.wait()
    if interrupted.is_set():
        print("interrupted: the page is as it was")
        return 130
    summary: dict[str, Any] = {
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": time.monotonic() - began,
        "seed": seed,
        "kills": wanted.kills,
        "load_before": load,
        "tried": len(verdicts),
        "machine": {k: v for k, v in machine().items() if k != "postgres"},
        "programs": [asdict(verdict) for verdict in verdicts],
    }
    if wanted.plain:
        return 1 if any(v.verdict == UNDETERMINED for v in verdicts) else 0
    merge(summary, results / "results.json", known, only=bool(wanted.only))
    (results / "results.json").write_text(json.dumps(summary, indent=1) + "\n")
    written = wanted.page or (results / "matrix.md" if wanted.cases else ROOT / "docs" / "proof-matrix.md")
    written.write_text(table.page(summary))
    print(f"written to {written} and {results / 'results.json'}")
    if any(v.verdict in MUST_NOT_BE for v in verdicts):
        return 1
    return 3 if any(v.verdict == "not finished" for v in verdicts) else 0


def merge(summary: dict[str, Any], store: Path, known: list[a_case.Case], *, only: bool) -> None:
    """Programs that were tried alone replace their own lines and leave the others."""
    if not (only and store.exists()):
        return
    kept = {row["name"]: row for row in json.loads(store.read_text())["programs"]}
    kept |= {row["name"]: row for row in summary["programs"]}
    summary["programs"] = [kept[case.name] for case in known if case.name in kept]


def in_lanes(cases: list[a_case.Case], rig: Rig, lanes: int, until: float) -> list[Verdict]:
    found: dict[str, Verdict] = {}
    left, lock = list(cases), threading.Lock()

    def lane() -> None:
        while True:
            with lock:
                if not left or time.monotonic() > until or interrupted.is_set():
                    return
                case = left.pop(0)
            trial = Trial(case, rig)
            began = time.monotonic()
            try:
                verdict = trial.run()
            except Exception as error:
                verdict = trial.verdict
                verdict.said = f"the trial itself failed: {type(error).__name__}: {error}"
            with lock:
                found[case.name] = verdict
                print(
                    f"{len(found):3}/{len(cases)} {case.name:26} {verdict.verdict:30} {time.monotonic() - began:5.0f} s  {verdict.said[:150]}",
                    flush=True,
                )

    def end(number: int, frame: object) -> None:
        interrupted.set()

    for told in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told, end)
    with ThreadPoolExecutor(lanes) as pool:
        wait([pool.submit(lane) for _ in range(lanes)])
    return [
        found.get(case.name, Verdict(case.name, case.model_of, case.loop_of, said="the time was over"))
        for case in cases
    ]


if __name__ == "__main__":
    sys.exit(main())
