"""The linearizability checker against trying every order, against answers that are wrong, and on a short real history."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proof.linear.__main__ import record
from proof.linear.batch import explain, history
from proof.linear.checker import UNKNOWN, WRONG, Op, check
from proof.linear.specs import SPECS, head, lock


def test_a_stale_read_is_found() -> None:
    written = Op(0, 10, "commit", 0, ("ok", 1))
    assert check("head", [written, Op(5, 15, "read", None, 0)], 0, head) is None, "they overlap"
    assert check("head", [written, Op(11, 15, "read", None, 0)], 0, head) is not None


def test_two_that_hold_one_device_are_found() -> None:
    first, second = Op(0, 10, "acquire", "a", "granted"), Op(11, 20, "acquire", "b", "granted")
    assert check("lock", [first, second], "", lock) is not None
    assert check("lock", [first, Op(5, 12, "release", "a", "yes"), second], "", lock) is None


def test_two_commits_of_one_version_are_found() -> None:
    both = [Op(0, 10, "commit", 4, ("ok", 5)), Op(0, 10, "commit", 4, ("ok", 5))]
    assert check("head", both, 4, head) is not None


def test_an_operation_without_an_answer_happened_or_not() -> None:
    lost = Op(0, 100, "commit", 0, UNKNOWN)
    assert check("head", [lost, Op(10, 20, "read", None, 1), Op(30, 40, "read", None, 1)], 0, head) is None
    assert check("head", [lost, Op(10, 20, "read", None, 0), Op(30, 40, "read", None, 1)], 0, head) is None
    assert (
        check("head", [lost, Op(10, 20, "read", None, 1), Op(30, 40, "read", None, 0)], 0, head) is not None
    )
    assert (
        check("head", [lost, Op(110, 120, "read", None, 0), Op(130, 140, "read", None, 1)], 0, head)
        is not None
    )


def by_trying(ops: list[Op], first: Any, step: Any) -> bool:
    """Every choice of what happened, in every order that time allows."""
    certain = [op for op in ops if op.answer != UNKNOWN]
    unsure = [op for op in ops if op.answer == UNKNOWN]
    for some in itertools.chain.from_iterable(
        itertools.combinations(unsure, n) for n in range(len(unsure) + 1)
    ):
        for order in itertools.permutations([*certain, *some]):
            if any(b.returned < a.called for a, b in itertools.combinations(order, 2)):
                continue
            state = first
            for op in order:
                state = step(state, op.kind, op.argument, op.answer)
                if state is WRONG:
                    break
            else:
                return True
    return False


def a_history(chance: random.Random, what: str) -> list[Op]:
    ops = []
    for _ in range(chance.randint(1, 5)):
        called = chance.randrange(20)
        returned = called + chance.randint(1, 15)
        if what == "head":
            if chance.random() < 0.5:
                op = Op(called, returned, "read", None, chance.randrange(3))
            else:
                expected = chance.randrange(2)
                answer: Any = chance.choice(
                    [("ok", expected + 1), ("moved", chance.randrange(3)), ("done", expected + 1), UNKNOWN]
                )
                op = Op(called, returned, "commit", expected, answer)
        else:
            kind = chance.choice(["acquire", "release", "renew"])
            answers = {
                "acquire": ["granted", "refused"],
                "release": ["yes", "no"],
                "renew": ["held", "over"],
            }[kind]
            op = Op(called, returned, kind, chance.choice("ab"), chance.choice([*answers, UNKNOWN]))
        ops.append(op)
    return ops


@pytest.mark.parametrize("what", ["head", "lock"])
def test_it_agrees_with_trying_every_order(what: str) -> None:
    chance = random.Random(4)
    first, step = SPECS[what]
    seen = {True: 0, False: 0}
    for _ in range(1500):
        ops = a_history(chance, what)
        expected = by_trying(ops, first, step)
        assert (check(what, ops, first, step) is None) is expected, ops
        seen[expected] += 1
    assert min(seen.values()) > 100, seen


def test_a_real_history_is_explained_and_a_falsified_one_is_not(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    clients = record(f"sqlite:{tmp_path}/ledger.db", 4, 2000, 8, logs, kill_every=0.3)
    objects = history(clients.recorded(), 0)
    assert sum(map(len, objects.values())) > 200
    assert clients.kills
    assert explain(objects) == []
    chance = random.Random(4)
    found = tried = 0
    while tried < 30:
        name = chance.choice(
            sorted(n for n in objects if n.startswith(("head", "lock")) and len(objects[n]) > 20)
        )
        number = chance.randrange(len(objects[name]))
        op = objects[name][number]
        lie = _lie(op)
        if lie is None:
            continue
        tried += 1
        false = {name: [*objects[name][:number], replace(op, answer=lie), *objects[name][number + 1 :]]}
        found += bool(explain(false))
    assert found > tried * 0.8, f"{found} of {tried} false answers were seen"


def _lie(op: Op) -> Any:
    if op.kind == "read" and isinstance(op.answer, int):
        return op.answer + 7
    if op.kind == "commit" and op.answer != UNKNOWN and op.answer[0] == "moved":
        return ("ok", op.argument + 1)
    return (
        {"granted": "refused", "yes": "no", "held": "over", "refused": "granted"}.get(op.answer)
        if isinstance(op.answer, str)
        else None
    )
