"""Libraries whose loops are not the script's: stand-ins of their shape. `make matrix` runs the real ones."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from sublet.training.scripts.importing import WhenImported
from sublet.training.scripts.library_loops import FASTAI, KERAS, GraphsThatWait, watch_libraries
from tests.conftest import needed


class Told:
    """In the place of the script."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def before_optimizer(self, *_: Any) -> None:
        self.said.append("before")

    def after_optimizer(self, *_: Any) -> None:
        self.said.append("after")

    graphs = GraphsThatWait()

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


def test_a_step_of_fastai(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        def step(self, closure: int | None = None) -> int | None:
            return closure

    module(monkeypatch, FASTAI, Optimizer=Own)
    told = Told()
    watch_libraries(WhenImported(), told)
    assert Own().step(closure=3) == 3
    assert told.said == ["before", "after"]


@pytest.mark.parametrize("name", ["xgboost.training", "lightgbm.engine"])
def test_who_boosts_trees_is_told_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    boosting = module(monkeypatch, name, train=lambda rounds: told.said.append(f"{rounds} rounds"))
    watch_libraries(WhenImported(), told)
    vars(boosting)["train"](3)
    assert "where they cannot be saved" in told.said[0]
    assert told.said[1:] == ["3 rounds"]


def test_a_step_goes_on_while_a_function_has_a_graph_to_go_backward_through() -> None:
    """An actor's loss is made of what was computed before its critic stepped: saved there, it could not go on."""
    torch = needed("torch")
    actor, critic, graphs = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1), GraphsThatWait()

    def train(held: Callable[[Any], Any]) -> tuple[bool, bool]:
        action = actor(torch.ones(2, 3)).exp()
        kept = held(action)
        critic(torch.ones(2, 3)).square().mean().backward()
        before = graphs.are_there(sys._getframe())
        critic(action).square().mean().backward()
        assert kept is not None
        return before, graphs.are_there(sys._getframe())

    for held in (lambda one: one, lambda one: [one], lambda one: {"action": one}):
        assert train(held) == (True, False)


def test_a_graph_that_is_kept_for_long_is_not_waited_for() -> None:
    torch = needed("torch")
    weight, graphs = torch.ones(3, requires_grad=True), GraphsThatWait()
    kept = weight.exp()
    asked = [graphs.are_there(sys._getframe()) for _ in range(40)]
    assert kept.grad_fn is not None
    assert asked == [True] * 32 + [False] * 8
    assert not graphs.are_waited_for


def test_who_says_what_a_graph_keeps_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at what a checkpoint keeps would make it, and with it whatever its function does besides."""
    torch = needed("torch")
    hooks = torch.autograd.graph.saved_tensors_hooks
    monkeypatch.setattr(hooks, "__enter__", hooks.__enter__)  # as it was, afterwards
    told, made = Told(), list[Any]()
    told.graphs = GraphsThatWait()
    watch_libraries(WhenImported(), told)
    with hooks(lambda one: one, lambda one: made.append(one) or one):
        kept = torch.ones(3, requires_grad=True).exp()
    assert not told.graphs.are_there(sys._getframe())
    assert kept.grad_fn is not None
    assert made == []
