"""A program's trial: plain Python, the shim undisturbed, the shim disturbed; then the verdict.

Rules of this file:
- Plain Python is the reference; the program is run by it twice where the case is new (`--twice`), since what varies by itself proves
  nothing.
- Everything random is drawn from the seed and the program's name: the same seed disturbs at the same marks.
- Exit 0 with other bits is SILENTLY DIFFERENT, unless the shim warned. A sentence is a refusal, a traceback is not.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proof.matrix.case import Case
from proof.matrix.life import Disturbance, Life, Marks, live

ROOT = Path(__file__).resolve().parents[2]
LEFT_TO_CONTINUE = 85
STORMS = 2
FEWEST_MARKS = 10
EXACT, SILENT, FILES = "exact", "SILENTLY DIFFERENT", "FILES DIFFER"
REFUSED, REFUSED_LATER, DIES = "refused before the first step", "refused later", "DIES AT RESUME"
WARNED, BROKEN, UNDETERMINED = "warned, and different", "BROKEN UNDER THE SHIM", "not deterministic by itself"
MUST_NOT_BE = (SILENT, FILES, DIES, BROKEN)


@dataclass(slots=True)
class Verdict:
    name: str
    model_of: str
    loop_of: str
    verdict: str = "not finished"
    said: str = ""  # the refusal's sentence, or the first difference
    at: str = ""  # how far it was when it refused or died
    warnings: list[str] = field(default_factory=list)
    model_differs: dict[str, str] = field(default_factory=dict)
    files_differ: dict[str, str] = field(default_factory=dict)
    files: int = 0
    stdout: str = ""
    disturbed: list[str] = field(default_factory=list)
    marks: int = 0
    plain_s: float = 0.0
    shim_s: float = 0.0
    overhead: float | None = None  # of the loop, against plain Python
    resume_s: float | None = None  # median, more than plain Python needs to its first mark
    changed_lines: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """What all trials share."""

    python: Path  # of the matrix's environment
    results: Path
    home: Path  # of sublet: one ledger, one warden
    seed: int
    kills: int
    twice: bool
    plain_only: bool = False
    environment: dict[str, str]
    shim_options: tuple[str, ...]
    shim: tuple[str, ...] = ("-m", "sublet.shim")

    def sublet(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), "-m", "sublet", *args],
            env=self.environment, capture_output=True, text=True, timeout=60, cwd=self.results,
        )  # fmt: skip


class Trial:
    def __init__(self, case: Case, rig: Rig) -> None:
        self.case, self.rig = case, rig
        self.chance = random.Random(f"{rig.seed} {case.name}")
        self.base = rig.results / case.name
        self.verdict = Verdict(case.name, case.model_of, case.loop_of, seed=rig.seed)
        self.marks = Marks(case)
        self.reference: list[str] = []

    def run(self) -> Verdict:
        shutil.rmtree(self.base, ignore_errors=True)
        plain = self.plain("plain")
        if plain.code != 0:
            self.verdict.said = f"plain Python ended with {plain.code}: {_last_words(plain.errors)}"
            return self.verdict
        self.verdict.plain_s, self.verdict.marks = plain.seconds, len(self.marks)
        if not len(self.marks):
            self.verdict.said = "no line says how far it is: the case's `progress` finds none"
            return self.verdict
        if self.rig.twice:
            self.plain("plain-again")
            if differs := self.compared("plain-again")["others"]["plain-again"]:
                self.verdict.verdict, self.verdict.said = UNDETERMINED, _first(differs)
                return self.verdict
        if self.rig.plain_only:
            self.verdict.verdict = "tried by plain Python only"
            return self.verdict
        calm = self.start("calm", 0, self.limit(plain))
        self.verdict.warnings = _warnings(calm, self.case.name)
        if calm.code != 0:
            self.refused(calm, at_start=calm.furthest < 0)
            return self.verdict
        self.verdict.shim_s, self.verdict.overhead = calm.seconds, _overhead(plain, calm)
        left = self.plan(plain, calm, self.kinds())
        storms: dict[str, list[Life]] = {}
        # What ends before all of its disturbances came is begun anew for the rest of them.
        while left and len(storms) < STORMS:
            run = f"storm{len(storms) or ''}"
            storms[run], left = self.disturbed(run, calm, left)
            if storms[run][-1].code != 0:
                return self.verdict
            left = self.plan(plain, calm, [disturbance.kind for disturbance in left])
        self.judge(plain, calm, storms)
        return self.verdict

    # runs

    def folder(self, run: str) -> Path:
        folder = self.base / run
        if not folder.exists():
            if self.case.source.is_dir():
                ignored = shutil.ignore_patterns(".git", "__pycache__", "out", "runs")
                shutil.copytree(self.case.source, folder, ignore=ignored)
            else:
                folder.mkdir(parents=True)
                shutil.copy(self.case.source, folder / self.case.script)
        return folder

    def environment(self) -> dict[str, str]:
        above = self.rig.environment.get("PYTHONPATH", "")
        path = os.pathsep.join(p for p in (above, *self.case.pythonpath) if p)
        return {**self.rig.environment, **self.case.environment, "PYTHONPATH": path}

    def plain(self, run: str) -> Life:
        command = [str(self.rig.python), self.case.script, *self.case.arguments]
        life = live(
            command, self.folder(run), self.environment(), self.base / f"{run}-log", 0, self.marks, 600
        )
        if self.marks.learning:
            self.marks.learning, self.reference = False, life.lines
        return life

    def start(
        self,
        run: str,
        number: int,
        limit_s: float,
        disturbance: Disturbance | None = None,
        revoke: Callable[[], str] | None = None,
    ) -> Life:
        job = f"{self.case.name}-{run}"
        command = [str(self.rig.python), *self.rig.shim, "--name", job, "--every", self.case.every]
        command += [*self.rig.shim_options, self.case.script, *self.case.arguments]
        log = self.base / f"{run}-log"
        return live(
            command,
            self.folder(run),
            self.environment(),
            log,
            number,
            self.marks,
            limit_s,
            disturbance,
            revoke,
        )

    def limit(self, plain: Life) -> float:
        return 120 + 12 * plain.seconds

    def kinds(self) -> list[str]:
        kinds = [self.chance.choice(("kill", "kill", "kill all")) for _ in range(self.rig.kills)]
        kinds += ["notice", "revoke"]
        self.chance.shuffle(kinds)
        return kinds

    def plan(self, plain: Life, calm: Life, kinds: list[str]) -> list[Disturbance]:
        if len(self.marks) < FEWEST_MARKS:
            # It does not say how far it is: somewhere between its set-up and its end, by the clock.
            late = sorted(0.35 + 0.5 * self.chance.random() for _ in kinds)
            return [
                Disturbance(kind=kind, mark=-1, later_s=share * calm.seconds)
                for kind, share in zip(kinds, late, strict=True)
            ]
        top = max(len(self.marks) * 85 // 100, 1)
        marks = sorted(self.chance.choices(range(top), k=len(kinds)))
        apart = (plain.seconds / len(self.marks)) if len(self.marks) else 0.1
        return [
            Disturbance(kind=kind, mark=mark, later_s=self.chance.random() * min(apart, 1.0))
            for kind, mark in zip(kinds, marks, strict=True)
        ]

    def disturbed(
        self, run: str, calm: Life, planned: list[Disturbance]
    ) -> tuple[list[Life], list[Disturbance]]:
        """Start it until it ends by itself; each start before is disturbed. Also returns what was planned and did not come to be."""
        lives: list[Life] = []
        left = list(planned)
        job = f"{self.case.name}-{run}"
        failed = 0
        while True:
            # A life may have come further than the next mark: what is due is due then at once.
            disturbance = left[0] if left else None
            life = self.start(run, len(lives), self.limit(calm), disturbance, lambda: _revoke(self.rig, job))
            lives.append(life)
            self.verdict.disturbed.append(_shown(life))
            for warning in _warnings(life, self.case.name):
                if warning not in self.verdict.warnings:
                    self.verdict.warnings.append(warning)
            if life.disturbed:
                left.pop(0)
            if life.code == 0:
                return lives, left
            if life.disturbed or life.code == LEFT_TO_CONTINUE:
                failed = 0
                continue
            failed += 1
            if failed == 2 or life.late:
                self.refused(life, at_start=False)
                return lives, left

    # verdicts

    def refused(self, life: Life, *, at_start: bool) -> None:
        sentence, crashed = _sentence(life.errors.replace(f"{self.base}/", ""), self.case.name)
        furthest = max((int(m) for m in re.findall(r"@(\d+)", " ".join(self.verdict.disturbed))), default=-1)
        at = max(furthest, life.furthest)
        self.verdict.at = f"mark {at + 1} of {len(self.marks)}" if at >= 0 else "the beginning"
        self.verdict.said = life.late or sentence
        if at_start and not crashed and not life.late:
            self.verdict.verdict = REFUSED
        elif not self.verdict.disturbed:
            self.verdict.verdict = BROKEN if crashed or life.late else REFUSED_LATER
        else:
            self.verdict.verdict = DIES if crashed or life.late else REFUSED_LATER

    def compared(self, *runs: str) -> dict[str, Any]:
        folders = [str(self.base / run) for run in ("plain", *runs)]
        case = json.dumps(self.case.as_json())
        path = os.pathsep.join(p for p in (str(ROOT), *self.case.pythonpath) if p)
        done = subprocess.run(
            [str(self.rig.python), "-m", "proof.matrix.contents", case, *folders],
            env={**self.rig.environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
            cwd=self.rig.results,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"the folders of {self.case.name} could not be compared: {done.stderr[-600:]}")
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        said["others"] = {Path(folder).name: found for folder, found in said["others"].items()}
        return said

    def judge(self, plain: Life, calm: Life, storms: dict[str, list[Life]]) -> None:
        verdict = self.verdict
        said = self.compared("calm", *storms)
        models = set(said["models"])
        verdict.files = len(said["files"])
        for run in ("calm", *storms):
            for name, how in said["others"][run].items():
                into = verdict.model_differs if name in models else verdict.files_differ
                into.setdefault(name, f"{'undisturbed, ' if run == 'calm' else ''}{how}")
        verdict.stdout, twisted = _lines_compared(
            self.case, self.reference, {"calm": [calm], **storms}, self.base
        )
        verdict.resume_s = _resume_seconds(plain, storms.values())
        if verdict.model_differs or (not models and twisted):
            verdict.verdict = WARNED if verdict.warnings else SILENT
            verdict.said = _first(verdict.model_differs) or verdict.stdout
        elif verdict.files_differ:
            verdict.verdict = WARNED if verdict.warnings else FILES
            verdict.said = _first(verdict.files_differ)
        else:
            verdict.verdict = EXACT


def _revoke(rig: Rig, job: str) -> str:
    """By the number of its lease, as an operator would."""
    listed = rig.sublet("ps", "--json")
    try:
        rows = json.loads(listed.stdout)
    except ValueError:
        return f"its lease could not be listed: {listed.stderr.strip()[-200:]}"
    rows = rows if isinstance(rows, list) else next((v for v in rows.values() if isinstance(v, list)), [])
    mine = [row for row in rows if row.get("job") == job]
    if not mine:
        return "it has no lease that could be revoked"
    done = rig.sublet("revoke", str(mine[0].get("lease") or mine[0].get("id")), "--grace", "20s")
    return "" if done.returncode == 0 else f"its lease could not be revoked: {done.stderr.strip()[-200:]}"


def _shown(life: Life) -> str:
    where = f"@{life.furthest}" if life.furthest >= 0 else "before its first mark"
    what = life.disturbed or ("its end" if life.code == 0 else "")
    return f"{what or 'nothing'} {where}, exit {life.code}" + (f" ({life.late})" if life.late else "")


def _first(differs: dict[str, str]) -> str:
    return next((f"{name}: {how}" for name, how in differs.items()), "")


def _last_words(errors: str) -> str:
    lines = [line.strip() for line in errors.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was said"


def _sentence(errors: str, name: str) -> tuple[str, bool]:
    """The refusal, or the last line of a traceback and that it is one."""
    lines = [line.rstrip() for line in errors.strip().splitlines() if line.strip()]
    crashed = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if crashed:
        return next(
            (x for x in reversed(lines) if re.match(r"[\w.]+(Error|Exception|Exit)?\b.*:", x)), lines[-1]
        )[:300], True
    ours = [
        line for line in lines if re.match(r"(sublet|error|refused|Error)\b", line) or line.startswith(name)
    ]
    return " ".join((ours or lines[-2:])[-3:])[:500], False


def _warnings(life: Life, name: str) -> list[str]:
    found = re.findall(rf"^{re.escape(name)}[\w-]*: (warning: .*)$", life.errors, re.M)
    return list(dict.fromkeys(text[:400] for text in found))


def _overhead(plain: Life, calm: Life) -> float | None:
    """Of the time between the first and the last mark."""
    if None in (plain.first_mark_s, plain.last_mark_s, calm.first_mark_s, calm.last_mark_s):
        return None
    alone = plain.last_mark_s - plain.first_mark_s  # type: ignore[operator]
    return ((calm.last_mark_s - calm.first_mark_s) - alone) / alone if alone > 0.2 else None  # type: ignore[operator]


def _resume_seconds(plain: Life, storms: Iterable[list[Life]]) -> float | None:
    if plain.first_mark_s is None:
        return None
    again = [life.first_mark_s for lives in storms for life in lives[1:]]
    took = [first - plain.first_mark_s for first in again if first is not None]
    return statistics.median(took) if took else None


def _lines_compared(
    case: Case, reference: list[str], runs: dict[str, list[Life]], base: Path
) -> tuple[str, bool]:
    """How the lines differ, and whether one says something else than plain Python did: a line twice is not that."""
    wanted = Counter(case.masked(line, str(base / "plain")) for line in reference)
    said, twisted = [], False
    for run, lives in runs.items():
        found = Counter(case.masked(line, str(base / run)) for life in lives for line in life.lines)
        missing = sum((wanted - found).values())
        again = sum((found - wanted)[line] for line in found if line in wanted)
        other = [line for line in found if line not in wanted]
        parts = [f"{missing} missing"] * bool(missing) + [f"{again} twice"] * bool(again)
        parts += [f"{len(other)} others, first {other[0][:80]!r}"] if other else []
        twisted = twisted or bool(other)
        label = "undisturbed: " if run == "calm" else ""
        said += [label + ", ".join(parts)] if parts else []
    return "; ".join(said) or "each line once", twisted


def environment(home: Path, python: Path) -> dict[str, str]:
    """Few threads, so that trials side by side do not press each other; nothing is asked of a hub."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SUBLET_", "PYTHON"))}
    return kept | {
        "PYTHONPATH": str(ROOT / "src"),  # this tree's, whichever environment runs it
        "PATH": f"{python.parent}{os.pathsep}{kept.get('PATH', '')}",
        "SUBLET_HOME": str(home),
        "SUBLET_DEVICES": "host:1x64GiB",
        "SUBLET_HOST": f"matrix-{os.getpid()}",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": str(home.parent / "hub"),
        "KERAS_HOME": str(home.parent / "keras"),
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "NO_COLOR": "1",
    }
