"""The verdict on a program: it is run plainly, then under the shim, killed and started again until it ends, and both ends are compared.

Rules of this file:
- The result and the files that lie in its folder decide. Standard output is compared too, and told apart: a line printed twice is
  announced to nobody, but changes no weight.
- A refusal is a sentence of ours, an exit code that is not 0 and no result. One after a step is `midway`, as when a rehearsal does not
  come out the same. One that comes after a kill is `late`: the state is kept and the user knows, but the work is in the way.
- A schedule is drawn from the seed, and can be written down: the same kills again, as far as time allows.
- A fault is made small: what does not change the verdict is taken out, one thing after the other.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from tests.training.programs.features import all_features
from tests.training.programs.life import Kill, Life, Starter
from tests.training.programs.make import MAIN, Program, Recipe, cook

#: Starts of one program, those that were killed and those that left by themselves.
_STARTS = 12
#: 85 says that it left and wants to be started again.
_LEFT, _OUR_BUG = 85, 70
#: Programs after which a home is thrown away: what they committed would be carried along.
_PER_HOME = 100


class Kind(Enum):
    EXACT = "exact"
    REFUSED = "refused"  # before its first step
    MIDWAY = "refused midway"  # after some steps: when it is rehearsed, or when it makes what cannot be saved
    LATE = "refused late"  # when there was something to lose
    OUTPUT = "output differs"  # exact but for what was printed
    DIFFERENT = "SILENTLY DIFFERENT"
    HUNG = "hung"
    CRASHED = "crashed"
    SKIPPED = "skipped"  # a package is missing
    UNUSABLE = "unusable"  # it fails under plain Python, or ends in two ways: the generator's fault

    @property
    def bad(self) -> bool:
        return self in (Kind.DIFFERENT, Kind.HUNG, Kind.CRASHED, Kind.UNUSABLE)


@dataclass(frozen=True, slots=True)
class Schedule:
    every: int
    kills: tuple[Kill, ...]
    repeated: int = (
        0  # steps of its rehearsal; 0: as many as there are otherwise, which short programs do not have
    )
    verify: str = "auto"

    def __str__(self) -> str:
        how = (
            f"{f'r{self.repeated}' if self.repeated else ''}{self.verify[0] if self.verify != 'auto' else ''}"
        )
        return f"{self.every}{how}:{','.join(map(str, self.kills))}"


_HOW = re.compile(r"(\d+)(?:r(\d+))?([nf]?)")


def schedule_of(text: str) -> Schedule:
    how, _, kills = text.partition(":")
    found = []
    for word in filter(None, kills.split(",")):
        plain = word.rstrip("gr")
        flags = word[len(plain) :]
        when, _, seconds = plain.partition("/")
        at = 0 if when == "start" else int(when.rstrip("+"))
        after, group, again = when.endswith("+"), "g" in flags, "r" in flags
        found.append(Kill(at=at, after=after, seconds=float(seconds or 0), group=group, again=again))
    read = _HOW.fullmatch(how)
    assert read is not None, f"{how} is the beginning of no schedule"
    verify = {"n": "never", "f": "first"}.get(read[3], "auto")
    return Schedule(int(read[1]), tuple(found), int(read[2] or 0), verify)


def draw_schedule(seed: int, steps: int) -> Schedule:
    """One to four kills: at the end of a step, a moment after one, or somewhere between the start and the first step. Half of the
    programs are rehearsed, and killed during that or after it; some resume without any check, which finds what a check would hide."""
    rng = random.Random(f"schedule {seed}")
    count = rng.choice((1, 2, 2, 3, 3, 4))
    verify = rng.choice(("auto", "auto", "auto", "first", "never"))
    repeated = rng.choice((0, 1, 2, 3)) if verify != "never" else 0
    kills = []
    for at in sorted(rng.sample(range(2, steps + 1), min(count, steps - 1))):
        how = rng.random()
        after = how > 0.4
        seconds = rng.uniform(0.0005, 0.02) if how > 0.7 else 0.0
        kills.append(Kill(at=at, after=after, seconds=round(seconds, 4), group=rng.random() < 0.5))
    if rng.random() < 0.3:
        moment = Kill(at=0, seconds=round(rng.uniform(0.005, 0.25), 4), group=rng.random() < 0.5)
        kills.insert(rng.randrange(len(kills) + 1), moment)
    if repeated and rng.random() < 0.7:
        kills[0] = replace(kills[0], again=True)
    return Schedule(rng.choice((1, 1, 1, 2, 3)), tuple(kills[:4]), repeated, verify)


@dataclass(slots=True, kw_only=True)
class Verdict:
    kind: Kind
    why: str = ""
    program: Program
    schedule: Schedule
    lives: list[Life] = field(default_factory=list)
    seconds: float = 0.0
    undisturbed: Kind | None = None  # of a bad one: the verdict when nobody kills it

    @property
    def resumed(self) -> int:
        """How often it went on from a step."""
        return sum(life.restarts + (life.resumed_at > 0) for life in self.lives)

    @property
    def expected(self) -> bool:
        return self.kind not in (Kind.REFUSED, Kind.MIDWAY, Kind.LATE) or bool(self.program.may_be_refused)


@dataclass(frozen=True, slots=True)
class End:
    """What is compared."""

    result: str
    printed: str
    files: dict[str, bytes]


class Judge:
    """Judges programs one after the other, in a folder and a home of its own."""

    def __init__(self, starter: Starter, *, limit_s: float = 60.0, keep: Path | None = None) -> None:
        self.starter, self.limit_s, self.keep = starter, limit_s, keep
        self._room = Path(tempfile.mkdtemp(prefix="sublet-programs-"))
        self._judged = 0
        self._home: dict[str, str] = {}

    def close(self) -> None:
        self._end_home()
        shutil.rmtree(self._room, ignore_errors=True)

    # homes

    def _environment(self) -> dict[str, str]:
        if self._judged % _PER_HOME == 0:
            self._end_home()
            home = self._room / f"home-{self._judged}"
            self._home = {
                "SUBLET_HOME": str(home),
                "SUBLET_LEDGER": f"sqlite:{home}/ledger.db",
                "SUBLET_DEVICES": "host:1x64GiB",
                "SUBLET_HOST": f"h{uuid.uuid4().hex[:8]}",
                "SUBLET_PRELOAD": "none",
            }
        self._judged += 1
        return {**os.environ, **self._home}

    def _end_home(self) -> None:
        """With the warden that its first program started."""
        from sublet.settings import load_settings
        from tests.homes import Home

        if not self._home:
            return
        names = {"home": "SUBLET_HOME", "ledger": "SUBLET_LEDGER", "host": "SUBLET_HOST"}
        settings = load_settings(**{name: self._home[variable] for name, variable in names.items()})
        home = Home(settings, self._home)
        with suppress(AssertionError):
            home.end_warden()
        home.end_zygotes()
        shutil.rmtree(self._home["SUBLET_HOME"], ignore_errors=True)
        self._home = {}

    # judging

    def judge(self, program: Program, schedule: Schedule | None = None) -> Verdict:
        schedule = schedule or draw_schedule(program.seed, program.steps)
        verdict = Verdict(kind=Kind.SKIPPED, program=program, schedule=schedule)
        missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
        if missing:
            verdict.why = f"{', '.join(missing)} cannot be imported"
            return verdict
        began = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="p", dir=self._room))
        try:
            self._judge(verdict, folder, self._environment())
        finally:
            verdict.seconds = time.monotonic() - began
            if self.keep is not None and verdict.kind.bad:
                shutil.copytree(
                    folder, self.keep / f"{program.seed}-{uuid.uuid4().hex[:6]}", dirs_exist_ok=True
                )
            shutil.rmtree(folder, ignore_errors=True)
        return verdict

    def _judge(self, verdict: Verdict, folder: Path, environment: dict[str, str]) -> None:
        program = verdict.program
        plain = self.plain(program, folder / "plain", environment)
        if isinstance(plain, str):
            verdict.kind, verdict.why = Kind.UNUSABLE, plain
            return
        script = written(program, folder / "resumed")
        kills = list(verdict.schedule.kills)
        for number in range(_STARTS):
            options = (
                "--vram",
                "1GiB",
                "--quiet",
                "--name",
                f"p{folder.name}",
                "--every",
                str(verdict.schedule.every),
                "--verify",
                verdict.schedule.verify,
            )
            life = self.starter.live(
                script,
                environment=environment,
                options=options,
                kill=kills[number] if number < len(kills) else None,
                torch=program.torch,
                repeated=verdict.schedule.repeated,
                hash_seed=1,
                limit_s=self.limit_s,
            )
            verdict.lives.append(life)
            if life.killed or life.code == _LEFT:
                continue
            verdict.kind, verdict.why = self.ended(verdict, life, plain, script.parent)
            return
        verdict.kind, verdict.why = Kind.HUNG, f"it did not end within {_STARTS} starts"

    def ended(self, verdict: Verdict, life: Life, plain: End, folder: Path) -> tuple[Kind, str]:
        said = life.err.strip()
        if life.hung:
            return Kind.HUNG, f"it did not end within {self.limit_s:.0f} s: {_last(said)}"
        sentence = next((line for line in said.split("\n") if line.startswith("sublet:")), "")
        if sentence and life.code not in (0, _OUR_BUG) and "Traceback (most" not in said:
            if "result " in life.out:
                return Kind.CRASHED, f"exit code {life.code} with a result: {said[-300:]}"
            before = max((one.committed for one in verdict.lives[:-1]), default=0)
            kind = Kind.LATE if before else Kind.MIDWAY if life.steps else Kind.REFUSED
            return kind, sentence.removeprefix("sublet: ")
        if life.code != 0:
            return Kind.CRASHED, f"exit code {life.code}: {_last(said)}"
        ended = end_of(folder, "".join(one.out for one in verdict.lives), life.out)
        difference = differs(plain, ended)
        if difference:
            return Kind.DIFFERENT, difference
        if plain.printed != ended.printed:
            return Kind.OUTPUT, _first_difference(plain.printed, ended.printed)
        return Kind.EXACT, ""

    def plain(
        self, program: Program, folder: Path, environment: dict[str, str], *, hash_seed: int = 1
    ) -> End | str:
        """How it ends undisturbed; in words, when it does not."""
        script = written(program, folder)
        life = self.starter.live(
            script,
            environment=environment,
            torch=program.torch,
            hash_seed=hash_seed,
            limit_s=self.limit_s,
        )
        if life.hung or life.code != 0:
            return f"under plain Python it ends with {life.code}: {life.err.strip()[-2000:]}"
        return end_of(folder, life.out, life.out)

    def plainly(self, program: Program, *, hash_seed: int = 1) -> End | str:
        """The same in a folder of its own, for whoever asks about the program alone."""
        folder = Path(tempfile.mkdtemp(prefix="q", dir=self._room))
        try:
            return self.plain(program, folder / "plain", dict(os.environ), hash_seed=hash_seed)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # made small

    def smaller(self, verdict: Verdict, tries: int = 40) -> Verdict:
        """The same verdict from less."""
        best = verdict
        changed = True
        while changed:
            changed = False
            for recipe in _less(best.program.recipe):
                if tries <= 0:
                    break
                tries -= 1
                found = self.judge(cook(recipe, seed=best.program.seed), best.schedule)
                if found.kind is best.kind:
                    best, changed = found, True
                    break
        for schedule in _fewer(best.schedule):
            found = self.judge(best.program, schedule)
            if found.kind is best.kind:
                best = found
                break
        best.undisturbed = self.judge(best.program, replace(best.schedule, kills=())).kind
        return best


def _less(recipe: Recipe) -> Iterator[Recipe]:
    """The likeliest first: one feature alone, then one alone where it is held, then one thing less."""
    plain, with_torch = Recipe(), Recipe(model=recipe.model)
    size = len(recipe.names)
    for keep_holder in (False, True):
        for use in recipe.uses:
            base = with_torch if all_features()[use.feature].weights == "torch" else plain
            alone = replace(base, uses=(use if keep_holder else replace(use, holder="inline"),))
            if len(alone.names) < size:
                yield alone
    if recipe.uses:
        yield replace(recipe, uses=())
    for number in range(len(recipe.uses)):
        yield replace(recipe, uses=recipe.uses[:number] + recipe.uses[number + 1 :])
    needs_torch = any(all_features()[use.feature].weights == "torch" for use in recipe.uses)
    for piece in ("body", "around", "loop", "site", "frame", *(() if needs_torch else ("model",))):
        if getattr(recipe, piece) != getattr(plain, piece):
            given = {piece: getattr(plain, piece)}
            if piece == "frame":
                given["site"] = plain.site
            yield replace(recipe, **given)
    for number, use in enumerate(recipe.uses):
        if use.holder != "inline" and recipe.frame != "body_of_a_class":
            inline = replace(use, holder="inline")
            yield replace(recipe, uses=(*recipe.uses[:number], inline, *recipe.uses[number + 1 :]))


def _fewer(schedule: Schedule) -> Iterator[Schedule]:
    for kill in schedule.kills:
        yield replace(schedule, kills=(replace(kill, seconds=0.0, group=False),))
        yield replace(schedule, kills=(kill,))


# --- ends ----------------------------------------------------------------------------------------------------


def written(program: Program, folder: Path) -> Path:
    for name, text in program.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / MAIN


def end_of(folder: Path, printed: str, last: str) -> End:
    """`printed` by all lives, `last` by the one that ended: it prints no line that one before it printed."""
    results = [line for line in last.split("\n") if line.startswith("result ")]
    results = results or [line for line in printed.split("\n") if line.startswith("result ")][-1:]
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if "__pycache__" in name or path.is_dir():
            continue
        files[name] = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
    return End("\n".join(results), printed, files)


def differs(one: End, other: End) -> str:
    """In words, or '' when they are alike."""
    if one.result != other.result:
        a, b = (end.files.get("result.txt", b"").decode().split("\n") for end in (one, other))
        lines = [f"{x[:80]} became {y[:80]}" for x, y in zip(a, b, strict=False) if x != y]
        return f"another result: {lines[0] if lines else f'{one.result!r} became {other.result!r}'}"
    for name in sorted(one.files.keys() | other.files.keys()):
        a, b = one.files.get(name), other.files.get(name)
        if a is None or b is None:
            return f"the file {name} is {'there' if a is None else 'not there'}"
        if a != b:
            return (
                f"another {name}: {_first_difference(a.decode(errors='replace'), b.decode(errors='replace'))}"
            )
    return ""


def _first_difference(one: str, other: str) -> str:
    a, b = one.split("\n"), other.split("\n")
    for number, (x, y) in enumerate(zip(a, b, strict=False), 1):
        if x != y:
            return f"line {number}: {x[:80]!r} became {y[:80]!r}"
    return f"{len(a)} lines became {len(b)}"


def _last(said: str) -> str:
    lines = said.split("\n")
    return " / ".join(line.strip() for line in lines[-3:])[:400]


def judged(
    programs: Iterable[Program],
    jobs: int,
    report: Callable[[Judge, Verdict], None],
    *,
    starter: Starter,
    schedule: Schedule | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> None:
    """So many at a time, each judge in a thread of its own: the work is done by the processes that it starts. None is begun any more
    when `stop` is set."""
    waiting, taking = iter(programs), threading.Lock()

    def work() -> None:
        judge = Judge(starter, **options)
        try:
            while True:
                with taking:
                    program = next(waiting, None)
                if program is None or (stop is not None and stop.is_set()):
                    return
                report(judge, judge.judge(program, schedule))
        finally:
            judge.close()

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(work) for _ in range(jobs)]:
            done.result()
