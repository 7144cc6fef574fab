"""What is said about verdicts: a line for each bad one, and how often each thing was exact."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.training.programs.features import all_features
from tests.training.programs.judge import Kind, Verdict
from tests.training.programs.make import MAIN, Program

_COLUMNS = {
    Kind.EXACT: 6,
    Kind.OUTPUT: 6,
    Kind.REFUSED: 7,
    Kind.MIDWAY: 6,
    Kind.LATE: 5,
    Kind.DIFFERENT: 9,
    Kind.CRASHED: 7,
    Kind.HUNG: 5,
}


@dataclass(slots=True)
class Tally:
    """What happened to the programs, and to each thing in them."""

    kinds: Counter[Kind] = field(default_factory=Counter)
    by_name: dict[str, Counter[Kind]] = field(default_factory=lambda: defaultdict(Counter))
    smallest: Counter[str] = field(default_factory=Counter)  # what is left of bad programs
    refusals: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)  # seed of the first program with this refusal
    unexpected: int = 0  # refused, with nothing in it that justifies that
    resumed: int = 0
    killed: int = 0
    seconds: float = 0.0

    def add(self, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        self.unexpected += not verdict.expected
        self.resumed += verdict.resumed
        self.killed += sum(life.killed for life in verdict.lives)
        self.seconds += verdict.seconds
        for name in verdict.program.features:
            self.by_name[name][verdict.kind] += 1
        if verdict.kind in (Kind.REFUSED, Kind.MIDWAY, Kind.LATE):
            reason = f"{verdict.kind.value}: {_general(verdict.why)}"
            self.refusals[reason] += 1
            self.first.setdefault(reason, verdict.program.seed)

    def table(self) -> str:
        """Worst first. A thing stands beside faults of others, so the share says more than the number."""
        words = ("exact", "output", "refused", "midway", "late", "DIFFERENT", "crashed", "hung")
        widths = _COLUMNS.values()
        head = " ".join(f"{word:>{width}}" for word, width in zip(words, widths, strict=True))
        lines = [f"{'':42} {'programs':>8} {head}"]

        def row(name: str, kinds: Counter[Kind]) -> str:
            counts = " ".join(f"{kinds[kind] or '':>{width}}" for kind, width in _COLUMNS.items())
            return f"{name:42} {sum(kinds.values()):>8} {counts}"

        def bad(kinds: Counter[Kind]) -> float:
            return sum(kinds[kind] for kind in Kind if kind.bad) / sum(kinds.values())

        for name, kinds in sorted(self.by_name.items(), key=lambda item: (-bad(item[1]), item[0])):
            lines.append(row(name, kinds))
        return "\n".join([*lines, row("all", self.kinds)])

    def summary(self) -> str:
        counts = ", ".join(f"{count} {kind.value}" for kind, count in self.kinds.most_common())
        lines = [
            f"{sum(self.kinds.values())} programs: {counts}",
            f"{self.killed} kills, {self.resumed} lives went on from a step; {self.unexpected} programs were refused with nothing "
            f"in them that justifies it; {self.seconds:.0f} s of work",
        ]
        never = len(all_features().keys() - self.by_name.keys())
        if never:
            lines.append(f"{never} of {len(all_features())} features did not occur")
        if self.refusals:
            lines.append("refusals, and the seed of the first of each:")
            lines += [f"{n:6}  {why} ({self.first[why]})" for why, n in self.refusals.most_common(40)]
        if self.smallest:
            lines.append("what was left of the bad ones:")
            lines += [f"{n:6}  {names}" for names, n in self.smallest.most_common()]
        return "\n".join(lines)


def _general(sentence: str) -> str:
    """Without the names, lines and numbers of one program."""
    if (at := sentence.find("came out differently")) >= 0:
        return sentence[at : at + 58]
    sentence = re.sub(r"^\S+\.py, line \d+: ", "", sentence.split("\n")[0])
    sentence = re.sub(r"/\S+/", "", re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", sentence))
    return re.sub(r"\d+", "#", re.sub(r"\b\w*\d+_\w+", "NAME", sentence))[:160]


def told(verdict: Verdict) -> str:
    program = verdict.program
    lines = [f"seed {program.seed}: {verdict.kind.value}: {verdict.why}", f"    {replay(verdict)}"]
    if verdict.undisturbed is not None:
        lines.append(f"    with nobody killing it: {verdict.undisturbed.value}")
    return "\n".join(lines)


def replay(verdict: Verdict) -> str:
    given = f"--recipe '{verdict.program.recipe}' --schedule '{verdict.schedule}'"
    return f"python -m tests.training.programs {given} --show"


def shown(program: Program) -> str:
    order = sorted(program.files, key=lambda name: (name != MAIN, name))
    return "\n".join(f"# --- {name}\n{program.files[name]}" for name in order)


def lives_of(verdict: Verdict) -> str:
    lines = []
    for number, life in enumerate(verdict.lives, 1):
        how = "killed" if life.killed else f"exit code {life.code}"
        lines.append(
            f"# life {number}: {how}, started anew {life.restarts} times, resumed after step {life.resumed_at}, "
            f"{len(life.steps)} steps ended"
        )
        lines.append(indented(f"{life.out}{life.err}".strip()))
    return "\n".join(lines)


def indented(text: str) -> str:
    return "\n".join(f"    | {line}" for line in text.split("\n"))


def row_of(verdict: Verdict, small: Verdict | None) -> dict[str, object]:
    """For a file that a program reads."""
    return {
        "seed": verdict.program.seed,
        "kind": verdict.kind.name.lower(),
        "why": verdict.why,
        "recipe": str(verdict.program.recipe),
        "schedule": str(verdict.schedule),
        "features": verdict.program.features,
        "may_be_refused": verdict.program.may_be_refused,
        "resumed": verdict.resumed,
        "seconds": round(verdict.seconds, 2),
        **({"small": str(small.program.recipe), "small_why": small.why} if small is not None else {}),
    }
