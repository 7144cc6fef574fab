"""`sublet.train` says what its loop changes and `state=` does not hold, and does not say it of anything else."""

from __future__ import annotations

import collections
import gc
import itertools
import random
import re
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sublet.training.left_out import looking_at_the_loop
from tests.conftest import needed


class Model:
    """Something of the program's own."""

    def __init__(self) -> None:
        self.weights = np.zeros(4)
        self.steps_done = 0


def steps(state: Any, number: int = 4) -> Iterator[int]:
    return looking_at_the_loop(iter(range(1, number + 1)), state, "job")


@pytest.fixture
def said() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def names(said: list[warnings.WarningMessage]) -> set[str]:
    assert all("not in state=" in str(one.message) and one.category is RuntimeWarning for one in said)
    return {name for one in said for name in re.findall(r"`([^`]*)`", str(one.message))}


def test_what_is_left_out_is_named_once(said: list[warnings.WarningMessage]) -> None:
    model, ema = Model(), Model()
    losses: list[float] = []
    recent: collections.deque[int] = collections.deque(maxlen=2)
    drawn, own = np.random.default_rng(0), random.Random(0)
    best, ids, rows = 0.0, itertools.count(), iter(range(100))
    lines = (number for number in range(100))
    nested = {"deep": [Model()]}
    for step in steps({"model": model}):
        model.weights += 1
        ema.weights *= 0.5
        ema.weights += model.weights
        losses.append(float(step))
        recent.append(step)
        best = max(best, drawn.random() + own.random())
        nested["deep"][0].steps_done += 1 + next(ids) + next(rows) + next(lines)
    assert names(said) == {
        "ema",
        "losses",
        "recent",
        "drawn",
        "own",
        "best",
        "ids",
        "rows",
        "lines",
        "nested",
    }
    assert len(said) == 1  # all in one sentence
    assert said[0].filename == __file__


def test_what_a_state_holds_and_what_does_not_change_is_not_named(
    said: list[warnings.WarningMessage],
) -> None:
    model, config, names_of_rows = Model(), {"lr": 0.1}, ["a", "b"]
    view = model.weights[:2]
    state: dict[str, Any] = {"model": model, "seen": 0, "w": np.zeros(3), "history": []}
    history, seen, w = state["history"], 0, state["w"]
    began = time.monotonic()
    for step in steps(state, 12):
        x = config["lr"] * len(names_of_rows) * step
        view += x
        history.append(x)
        seen = step + seen
        state["seen"] = seen
        w = w + x
        state["w"] = w
        took = time.monotonic() - began
        began = time.monotonic()
        assert took >= 0
    assert names(said) == set()


class Loader:
    """Knows its place, and is in the state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.place += 1
            yield self.place


def over_and_over(loader: Loader) -> Iterator[int]:
    while True:
        yield from loader


def test_an_iterator_over_what_a_state_holds_is_not_named(said: list[warnings.WarningMessage]) -> None:
    loader = Loader()
    rows, around = iter(loader), over_and_over(loader)
    for _ in steps({"loader": loader}):
        next(rows)
        next(around)
    assert names(said) == set()


COUNTED = {"calls": 0}


def count_a_call() -> None:
    COUNTED["calls"] += 1


def test_what_its_own_functions_change_is_named(said: list[warnings.WarningMessage]) -> None:
    inside = [0]

    def work() -> None:
        inside[0] += 1

    for _ in steps({"model": Model()}):
        work()
        count_a_call()
    assert names(said) == {"inside", "COUNTED"}


class Trainer:
    def __init__(self) -> None:
        self.model, self.history, self.name = Model(), [0.0], "a"

    def fit(self) -> None:
        for step in steps({"model": self.model}):
            self.model.steps_done += 1
            self.history.append(step * 0.1)
            assert self.name


def test_of_a_method_its_attributes_are_named(said: list[warnings.WarningMessage]) -> None:
    Trainer().fit()
    assert names(said) == {"self.history"}


def test_it_is_said_before_the_loop_is_over(said: list[warnings.WarningMessage]) -> None:
    found: list[int] = []
    for step in steps({"model": Model()}, 1_000_000):
        found.append(step)
        if step == 2:
            break
    assert names(said) == {"found"}


def test_what_changes_late_is_seen_at_the_end(said: list[warnings.WarningMessage]) -> None:
    found: list[int] = []
    for step in steps({"model": Model()}, 7):
        if step == 5:
            found.append(step)
    assert names(said) == {"found"}


def test_it_keeps_nothing_of_the_program_alive(said: list[warnings.WarningMessage]) -> None:
    gone: list[weakref.ref[Any]] = []
    gc.disable()
    try:
        for _ in steps({"model": Model()}, 5):
            assert not [one for one in gone[:-1] if one() is not None]
            batch = Model()
            gone.append(weakref.ref(batch))
        left = steps({"model": Model()})
        ended = weakref.ref(left)
        for _ in left:
            break
        del left
        assert ended() is None  # nothing of it is in a cycle with the frame that asked
    finally:
        gc.enable()


def test_torch(said: list[warnings.WarningMessage]) -> None:
    torch = needed("torch")
    model, frozen, ema = (torch.nn.Linear(3, 1) for _ in range(3))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 1)
    draws, parameters, inputs = torch.Generator(), list(model.parameters()), torch.randn(8, 3)
    for _ in steps({"model": model, "optim": optim}):
        inputs[torch.randperm(8, generator=draws)]
        optim.zero_grad()
        (model(inputs) - frozen(inputs)).pow(2).mean().backward()
        optim.step()
        schedule.step()
        for mean, now in zip(ema.parameters(), parameters, strict=True):
            mean.data.mul_(0.9).add_(now.data, alpha=0.1)
    assert names(said) == {"schedule", "ema", "draws"}


def test_another_optimizer_is_named(said: list[warnings.WarningMessage]) -> None:
    torch = needed("torch")
    model = torch.nn.Linear(3, 1)
    optim = torch.optim.Adam(model.parameters())
    for _ in steps({"model": model}):
        optim.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optim.step()
    assert names(said) == {"optim"}
