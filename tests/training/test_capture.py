"""What can be a part of the state, and how it comes back."""

from __future__ import annotations

import copy
import random
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest

import sublet
from sublet.store.tree import put_together, take_apart
from sublet.training.capture import Captured, is_per_rank, put_random, put_value, take_random, take_value

torch = pytest.importorskip("torch")


def stored(value: Any) -> Any:
    """As the store gives it back."""
    taken = take_apart(value)
    return put_together(taken.tree, taken.tensors, lambda n: memoryview(bytearray(taken.storages[n])))


def restore(parts: dict[str, Any], tree: Any) -> None:
    Captured(parts).put(tree, 0, 1)


def saved(parts: dict[str, Any]) -> Any:
    captured = Captured(parts)
    return stored(captured.take([captured.take_own()]))


Pair = namedtuple("Pair", "net count")


def test_generators_wherever_they_are() -> None:
    def made(seed: int) -> dict[str, Any]:
        return {
            "rng": numpy.random.default_rng(seed),
            "nested": {"list": [numpy.random.default_rng(seed + 1), torch.Generator().manual_seed(seed)]},
            "old": numpy.random.RandomState(seed),
            "python": random.Random(seed),
            "sfc": numpy.random.Generator(numpy.random.SFC64(seed)),
            "torch": torch.Generator().manual_seed(seed),
            "pair": (torch.Generator().manual_seed(seed + 2), 5),
        }

    def draw(parts: dict[str, Any]) -> list[float]:
        return [
            parts["rng"].random(),
            parts["nested"]["list"][0].random(),
            float(torch.rand((), generator=parts["nested"]["list"][1])),
            parts["old"].rand(),
            parts["python"].gauss(0, 1),
            parts["sfc"].random(),
            float(torch.rand((), generator=parts["torch"])),
            float(torch.rand((), generator=parts["pair"][0])),
        ]

    parts = made(1)
    draw(parts)
    tree = saved(parts)
    want = draw(parts)
    other = made(99)
    restore(other, tree)
    assert draw(other) == want
    assert all(is_per_rank(other[name]) for name in ("rng", "old", "python", "sfc", "torch"))


def test_everything_a_loop_has(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        net, second = torch.nn.Linear(3, 3), torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW([*net.parameters(), *second.parameters()], lr=0.1)
        schedulers = [
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5], gamma=0.1),
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n),
            torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
        ]
        return {
            "nets": [net, second],
            "optimizer": optimizer,
            "schedulers": schedulers,
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
            "ema": copy.deepcopy(net),
            "averaged": torch.optim.swa_utils.AveragedModel(net),
            "pair": Pair(torch.nn.Linear(1, 1), 0),
            "array": numpy.zeros(4),
            "tensor": torch.zeros(4),
            "best": float("inf"),
            "history": [],
            "counts": Counter("ab"),
        }

    parts = made()
    for _ in range(3):
        loss = sum(net(torch.ones(net.in_features)).sum() for net in parts["nets"])
        parts["scaler"].scale(loss).backward()
        parts["scaler"].step(parts["optimizer"])
        parts["scaler"].update()
        for schedule in parts["schedulers"]:
            schedule.step()
        parts["plateau"].step(float(loss.detach()))
        parts["averaged"].update_parameters(parts["nets"][0])
        parts["history"].append(float(loss.detach()))
    parts["pair"] = parts["pair"]._replace(count=3)
    parts["array"][:] = 7
    parts["tensor"][:] = 8
    parts["best"] = 0.5
    tree = saved(parts)
    other = made()
    array, tensor, history = other["array"], other["tensor"], other["history"]
    restore(other, tree)
    assert _same(saved(other)["state"], tree["state"])
    assert other["array"] is array
    assert other["tensor"] is tensor
    assert other["history"] is history
    assert isinstance(other["pair"], Pair)
    assert isinstance(other["schedulers"][0].milestones, Counter)
    assert other["best"] == 0.5


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, numpy.ndarray):
        return bool((a == b).all())
    return bool(a == b)


def test_the_random_states_come_back() -> None:
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    random.gauss(0, 1)
    numpy.random.randn()
    taken = stored(take_random())
    want = random.gauss(0, 1), numpy.random.randn(), float(torch.rand(()))
    random.seed(2)
    numpy.random.seed(2)
    torch.manual_seed(2)
    put_random(taken)
    assert (random.gauss(0, 1), numpy.random.randn(), float(torch.rand(()))) == want


def test_a_list_of_modules_of_another_length_is_refused() -> None:
    parts = {"nets": [torch.nn.Linear(1, 1)]}
    tree = saved(parts)
    with pytest.raises(sublet.BadInput, match="nets has 2 members, and 1 were saved"):
        restore({"nets": [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]}, tree)


def test_an_array_of_another_shape_is_refused() -> None:
    tree = saved({"w": [numpy.zeros(3)]})
    with pytest.raises(sublet.BadInput, match=r"w\[0\] has another shape"):
        restore({"w": [numpy.zeros(4)]}, tree)


def test_a_list_of_numbers_may_have_grown() -> None:
    holder = {"seen": [9, 9, 9]}
    put_value([1, 2], holder, "seen", "seen")
    assert holder["seen"] == [1, 2]
    assert take_value(holder["seen"]) == [1, 2]


class Odd:
    def state_dict(self) -> Any:
        return {"a": [1, {"b": object()}]}

    def load_state_dict(self, saved: Any) -> None: ...


def test_what_cannot_be_saved_is_named_with_its_remedy() -> None:
    captured = Captured({"net": torch.nn.Linear(1, 1), "odd": Odd()})
    with pytest.raises(sublet.Unsavable) as refused:
        take_apart(captured.take([captured.take_own()]))
    said = captured.explained(refused.value)
    assert "the part 'odd' of the state" in said.message
    assert "['a'][1]['b'] is builtins.object" in said.message
    assert "'odd' a state_dict()" in said.remedy


def test_what_cannot_be_saved_on_a_rank_names_the_rank() -> None:
    captured = Captured({"odd": Odd()}, per_rank=("odd",))
    with pytest.raises(sublet.Unsavable) as refused:
        take_apart({"state": {}, "ranks": [{}, {"parts": {"odd": Odd().state_dict()}}]})
    assert "the part 'odd' of the state on rank 1" in captured.explained(refused.value).message
