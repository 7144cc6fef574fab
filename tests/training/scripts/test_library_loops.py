"""Libraries whose loops are not the script's: stand-ins of their shape. `make matrix` runs the real ones."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from sublet.training.scripts.importing import WhenImported
from sublet.training.scripts.library_loops import KERAS, watch_libraries


class Told:
    """In the place of the script."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def before_optimizer(self, *_: Any) -> None:
        self.said.append("before")

    def after_optimizer(self, *_: Any) -> None:
        self.said.append("after")

    def cannot_save(self, why: str) -> None:
        self.said.append(why)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **variables: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(variables)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Optimizer:
    def apply(self, gradients: list[int]) -> str:
        return f"applied {gradients}"


class LossScaleOptimizer(Optimizer):
    def __init__(self) -> None:
        self.inner = Optimizer()

    def apply(self, gradients: list[int]) -> str:
        return self.inner.apply([2 * one for one in gradients])


@pytest.mark.parametrize(("backend", "steps"), [("torch", ["before", "after"]), ("jax", [])])
def test_a_step_of_keras(backend: str, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "apply", Optimizer.apply)  # as it was, afterwards
    module(monkeypatch, KERAS, BaseOptimizer=Optimizer)
    module(monkeypatch, "keras.src.backend.config", backend=lambda: backend)
    told = Told()
    watch_libraries(WhenImported(), told)
    assert Optimizer().apply([1]) == "applied [1]"
    assert told.said == steps
    assert LossScaleOptimizer().apply([1]) == "applied [2]"  # one step, not two
    assert told.said == 2 * steps


@pytest.mark.parametrize("name", ["xgboost.training", "lightgbm.engine"])
def test_who_boosts_trees_is_told_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    boosting = module(monkeypatch, name, train=lambda rounds: told.said.append(f"{rounds} rounds"))
    watch_libraries(WhenImported(), told)
    vars(boosting)["train"](3)
    assert "where they cannot be saved" in told.said[0]
    assert told.said[1:] == ["3 rounds"]
