"""Copying behind the forward and backward passes: the state of the moment it was asked for, or a save that fails and says why."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from sublet.core.errors import BadInput, Unsavable
from sublet.store.arena import Arena
from sublet.store.save.saving import Owned
from sublet.store.tree import take_apart
from tests.store.rig import JOB, Shelf


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(64, 4000), torch.nn.BatchNorm1d(4000), torch.nn.ReLU(), torch.nn.Linear(4000, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def made(seed: int, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def state_of(model: Model, optim: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": dict(model.state_dict()), "optim": optim.state_dict()}


def train(model: Model, optim: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optim.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optim.step()


def frozen(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {k: frozen(v) for k, v in state.items()}
    return [frozen(v) for v in state] if isinstance(state, list) else state


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(v, other[k]) for k, v in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_the_state_of_that_moment(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """With the copy as slow as it may be: the next optimizer step waits for it, what the forward pass writes was copied before."""
    model, optim = made(1, fused=fused)
    train(model, optim)
    real = Arena.take

    def slow(self: Arena, *args: Any, only: Any = None, **options: Any) -> list[bool]:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.15)
        return real(self, *args, only=only, **options)

    monkeypatch.setattr(Arena, "take", slow)
    for version in range(4):
        expected = frozen(state_of(model, optim))
        saving = shelf.store.save_behind(
            JOB, state_of(model, optim), expected_version=version, lease=shelf.lease, overlap=optim
        )
        train(model, optim, 2)
        assert saving.result(30).version == version + 1
        assert equal(shelf.load(), expected)


def test_only_what_the_optimizer_owns_waits() -> None:
    model, optim = made(2)
    train(model, optim)
    state = state_of(model, optim)
    state["loose"] = torch.zeros(3)
    taken = take_apart(state)
    now, later = Owned(optim).split(taken)
    assert sorted(now + later) == list(range(len(taken.storages)))
    parameters = sum(1 for _ in model.parameters())
    assert len(later) == parameters * 4, "parameters, two moments and a step count each"
    assert len(now) == 4, "running mean, variance and count of the batch norm, and the loose one"


def test_a_write_that_is_no_step_fails_the_save(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optim = made(3)
    train(model, optim)
    gate = threading.Event()
    real = Arena.take

    def held(self: Arena, *args: Any, **options: Any) -> list[bool]:
        if threading.current_thread() is not threading.main_thread():
            gate.wait(60)
        return real(self, *args, **options)

    monkeypatch.setattr(Arena, "take", held)
    saving = shelf.store.save_behind(
        JOB, state_of(model, optim), expected_version=0, lease=shelf.lease, overlap=optim
    )
    with torch.no_grad():
        next(model.parameters()).clamp_(-0.01, 0.01)
    gate.set()
    with pytest.raises(Unsavable, match="written to while it was being copied"):
        saving.result(30)
    assert shelf.version == 0
    with pytest.raises(Unsavable):
        shelf.store.settle()
    monkeypatch.undo()
    # And nothing of it is believed: the next save has the state as it is.
    shelf.store.save(JOB, state_of(model, optim), expected_version=0, lease=shelf.lease)
    assert equal(shelf.load(), frozen(state_of(model, optim)))


def test_hooks_do_not_pile_up(shelf: Shelf) -> None:
    model, optim = made(4)
    train(model, optim)
    for version in range(3):
        shelf.store.save_behind(
            JOB, state_of(model, optim), expected_version=version, lease=shelf.lease, overlap=[optim]
        )
        train(model, optim)
        shelf.store.settle()
        assert len(optim._optimizer_step_pre_hooks) == 0


def test_a_copy_that_fails_does_not_hold_training_up(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optim = made(5)
    train(model, optim)
    real = Arena.take

    def failing(self: Arena, *args: Any, **options: Any) -> list[bool]:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room")
        return real(self, *args, **options)

    monkeypatch.setattr(Arena, "take", failing)
    shelf.store.save_behind(JOB, state_of(model, optim), expected_version=0, lease=shelf.lease, overlap=optim)
    train(model, optim)
    with pytest.raises(MemoryError):
        shelf.store.settle()
    assert shelf.version == 0


def test_something_else_than_an_optimizer(shelf: Shelf) -> None:
    with pytest.raises(BadInput, match="torch optimizers, not dict"):
        shelf.store.save_behind(JOB, {}, expected_version=0, lease=shelf.lease, overlap={})
    assert shelf.save({"x": 1}, 0).version == 1


def test_memory_that_others_write_to_as_well_does_not_wait(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and a running mean in one flat storage: the forward pass writes to the one, and torch counts nothing."""
    flat = torch.zeros(8)
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.data = flat[:4]
    optim = torch.optim.SGD([parameter], lr=1)
    state = {"p": parameter, "mean": flat.data[4:]}
    taken = take_apart(state)
    assert Owned(optim).split(taken) == ([0], [])
    both = torch.nn.Parameter(torch.empty(0))
    both.data = flat[4:].view(2, 2).t()
    assert Owned([optim, torch.optim.SGD([both], lr=1)]).split(taken) == ([], [0]), "all of it is owned"
    ends = [torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.empty(0))]
    ends[0].data, ends[1].data = flat[:2], flat[6:]
    assert Owned(torch.optim.SGD(ends, lr=1)).split(taken) == ([0], []), "what lies between them is not"
    expanded = torch.nn.Parameter(torch.zeros(4)[::2].expand(2, 2), requires_grad=False)
    assert (
        Owned(torch.optim.SGD([expanded], lr=1)).split(take_apart({"e": expanded, "x": expanded[0]}))[1] == []
    )


def test_what_was_copied_is_let_go(shelf: Shelf) -> None:
    model, optim = made(6)
    state = state_of(model, optim)
    state["loose"] = torch.zeros(3)
    gone = weakref.ref(state["loose"])
    saving = shelf.store.save_behind(JOB, state, expected_version=0, lease=shelf.lease, overlap=optim)
    del state
    saving.result(30)
    gc.collect()
    assert gone() is None
