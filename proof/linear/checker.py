"""Whether a history of concurrent operations on one object has an order that explains every answer.

Rules of this file:
- Wing and Gong's question, answered as time passes: calls and returns are walked in the order they happened, with every configuration that is
  still possible (the object's state, and which of the operations under way have taken effect). At a return, the operation has taken effect in
  each of them, or that configuration is gone; when none is left, the history has no explanation. Equal configurations are one.
- An operation whose caller died or was cut off has no answer: it took effect at some time before it was given up on, or never.
- Objects are checked one by one: a history is linearizable when that of each object is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

State = Hashable
#: (state, kind, argument, answer) -> the state after it, or `WRONG` when it cannot have happened here. The answer is `UNKNOWN` when nobody heard it.
Step = Callable[[Any, str, Any, Any], Any]

WRONG = object()
UNKNOWN = "?"
#: More configurations than this at once: the history has too many operations without an answer to be decided.
MOST = 200_000


@dataclass(frozen=True, slots=True)
class Op:
    called: int
    returned: int
    kind: str
    argument: Any
    answer: Any = UNKNOWN
    who: str = ""


@dataclass(frozen=True, slots=True)
class Flaw:
    """The first answer that no order explains."""

    object: str
    op: Op
    under_way: tuple[Op, ...]
    states: tuple[Any, ...]

    def __str__(self) -> str:
        beside = "; ".join(f"{o.kind} {o.argument} -> {o.answer} by {o.who}" for o in self.under_way)
        return f"{self.object}: {self.op.kind} {self.op.argument} -> {self.op.answer} by {self.op.who}, beside [{beside}], from {self.states}"


class TooMany(RuntimeError):
    """Not decided: too many operations without an answer."""


def check(name: str, ops: Iterable[Op], first: State, step: Step) -> Flaw | None:
    events: list[tuple[int, int, int]] = []
    known = list(ops)
    for number, op in enumerate(known):
        # At the same instant calls come first: two that only touch count as concurrent.
        events.append((op.called, 0, number))
        events.append((op.returned, 1, number))
    events.sort()
    under_way: list[int] = []
    configurations: set[tuple[State, frozenset[int]]] = {(first, frozenset())}
    for _, returns, number in events:
        if not returns:
            under_way.append(number)
            continue
        op = known[number]
        if op.answer == UNKNOWN:
            # It may have happened by now, or will never have.
            configurations = _with(number, configurations, under_way, known, step) | {
                c for c in configurations if number not in c[1]
            }
        else:
            kept = _with(number, configurations, under_way, known, step)
            if not kept:
                return Flaw(
                    name,
                    op,
                    tuple(known[n] for n in under_way if n != number),
                    tuple(sorted({repr(c[0]) for c in configurations})[:5]),
                )
            configurations = kept
        if len(configurations) > MOST:
            raise TooMany(name)
        under_way.remove(number)
        configurations = {(state, done - {number}) for state, done in configurations}
    return None


def _with(
    wanted: int,
    configurations: set[tuple[State, frozenset[int]]],
    under_way: list[int],
    known: list[Op],
    step: Step,
) -> set[tuple[State, frozenset[int]]]:
    """Every configuration reachable from these in which the wanted operation has taken effect."""
    found: set[tuple[State, frozenset[int]]] = set()
    seen = set(configurations)
    left = list(configurations)
    while left:
        state, done = left.pop()
        if wanted in done:
            found.add((state, done))
            continue
        for number in under_way:
            if number in done:
                continue
            op = known[number]
            after = step(state, op.kind, op.argument, op.answer)
            if after is WRONG:
                continue
            made = (after, done | {number})
            if made not in seen:
                seen.add(made)
                left.append(made)
    return found
