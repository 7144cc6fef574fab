"""One batch of recorded operations: read from what its clients wrote, sorted by object, and explained. Runs in a process of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from proof.linear.checker import UNKNOWN, Flaw, Op, check
from proof.linear.specs import SPECS


@dataclass(frozen=True, slots=True)
class Recorded:
    """Of a batch whose clients are gone: where they wrote, when each died, and what was freed for them."""

    folder: Path
    died: dict[str, int]
    janitor: list[list[str]]


def lines_of(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    text = path.read_text()
    return [line.split(" ") for line in text[: text.rfind("\n") + 1].splitlines()]


def history(clients: Recorded, afterlife_ns: int) -> dict[str, list[Op]]:
    """By object, everything everybody did."""
    objects: dict[str, list[Op]] = {}

    def add(where: str, op: Op) -> None:
        objects.setdefault(where, []).append(op)

    for name in sorted(clients.died, key=int):
        calls: dict[str, list[str]] = {}
        answers: dict[str, list[str]] = {}
        for words in lines_of(clients.folder / name):
            (calls if words[0] == "c" else answers)[words[1]] = words
        for number, words in calls.items():
            found = answers.get(number)
            called = int(words[2])
            returned = int(found[2]) if found else clients.died[name] + afterlife_ns
            said = found[3:] if found else []
            kind, rest = words[3], words[4:]
            if kind == "head":
                add(
                    f"head {rest[0]}",
                    Op(called, returned, "read", None, int(said[0]) if said else UNKNOWN, name),
                )
            elif kind == "effect":
                answer = ("" if said[0] == "-" else said[0]) if said else UNKNOWN
                add(f"effect {rest[0]}", Op(called, returned, "read", None, answer, name))
            elif kind == "commit":
                job, version, key, lease = rest
                if said and said[0] == "refused":
                    continue  # by a rule of epochs, which says nothing of these objects
                answer = (said[0], int(said[1])) if said else UNKNOWN
                add(f"head {job}", Op(called, returned, "commit", int(version), answer, name))
                if key.count(":") == 1:
                    how = {"ok": "ok", "done": "done", "moved": "not"}[said[0]] if said else UNKNOWN
                    add(f"effect {key}", Op(called, returned, "commit", lease, how, name))
            else:
                add(
                    f"lock {rest[0]}", Op(called, returned, kind, rest[1], said[0] if said else UNKNOWN, name)
                )
    for kind, lock, lease, called, returned, answer in clients.janitor:
        add(f"lock {lock}", Op(int(called), int(returned), kind, lease, answer, "janitor"))
    return objects


def explain(objects: dict[str, list[Op]]) -> list[Flaw]:
    flaws = []
    for name in sorted(objects):
        first, step = SPECS[name.split(" ")[0]]
        flaw = check(name, objects[name], first, step)
        if flaw is not None:
            flaws.append(flaw)
    return flaws


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What one batch showed."""

    operations: int
    by_kind: dict[str, int]
    without_answer: int
    overlapping: int
    objects: int
    flaws: list[str]


def check_batch(recorded: Recorded, afterlife_ns: int) -> Checked:
    objects = history(recorded, afterlife_ns)
    flaws = explain(objects)
    kinds: Counter[str] = Counter()
    unknown = overlapping = 0
    for name, known in objects.items():
        overlapping += beside_another(known)
        for op in known:
            if not (name.startswith("effect") and op.kind == "commit"):  # counted at its head
                kinds[f"{name.split(' ')[0]} {op.kind}"] += 1
                unknown += op.answer == UNKNOWN
    return Checked(
        operations=sum(kinds.values()),
        by_kind=dict(kinds),
        without_answer=unknown,
        overlapping=overlapping,
        objects=len(objects),
        flaws=[str(flaw)[:500] for flaw in flaws],
    )


def beside_another(ops: list[Op]) -> int:
    """How many began while another on the same object was under way: without any, every history would be in order."""
    count, until = 0, -1
    for op in sorted(ops, key=lambda o: o.called):
        count += op.called < until
        until = max(until, op.returned)
    return count
