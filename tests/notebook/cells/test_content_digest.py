"""Marks: equal for equal content, different after any change, whatever memory it lies in."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from sublet.notebook.cells.content_digest import LARGE_BYTES, is_large_array, mark, packed, unpacked
from sublet.processes.channel.pickling import pack, pack_seen, unpack
from tests import forked


def marked(value: Any) -> bytes:
    return mark(pack(value))


def with_optimizer() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    return {"model": model, "optim": {"lr": 0.1, "params": [*model.parameters()]}}


CHANGES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: [1, 2], lambda v: v.append(3)),
    (lambda: {"a": [1]}, lambda v: v["a"].append(2)),
    (lambda: {1, 2}, lambda v: v.add(3)),
    (lambda: bytearray(10), lambda v: v.__setitem__(9, 1)),
    (lambda: numpy.zeros(10), lambda v: v.__setitem__(9, 1)),
    (lambda: numpy.zeros(3_000_000, numpy.uint8), lambda v: v.__setitem__(-1, 1)),
    (lambda: numpy.zeros((1000, 1000)), lambda v: v.__setitem__((999, 999), 1)),
    (lambda: numpy.zeros((100, 100), order="F")[::2, ::2], lambda v: v.__setitem__((49, 49), 1)),
    (lambda: numpy.array([[1], None], dtype=object), lambda v: v[0].append(2)),
    (lambda: torch.zeros(1000), lambda v: v.__setitem__(999, 1)),
    (lambda: torch.zeros(1000, dtype=torch.bfloat16), lambda v: v.__setitem__(999, 1)),
    (with_optimizer, lambda v: v["optim"].__setitem__("lr", 0.2)),
    (with_optimizer, lambda v: v["model"].eval()),
    (with_optimizer, lambda v: v["model"].weight.data.add_(1)),
]


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_a_mark_stays_until_something_changes(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    value = make()
    before = marked(value)
    assert marked(value) == before
    change(value)
    assert marked(value) != before


def test_the_same_bytes_cut_elsewhere_are_not_the_same() -> None:
    assert mark([memoryview(b"ab"), memoryview(b"c")]) != mark([memoryview(b"a"), memoryview(b"bc")])
    assert mark([memoryview(b"")]) != mark([])


def test_memory_in_any_layout_can_be_marked() -> None:
    assert mark([memoryview(numpy.zeros((3, 4)))]) == mark([memoryview(bytes(96))])


def test_only_plain_memory_counts_as_a_large_array() -> None:
    assert is_large_array(numpy.zeros(LARGE_BYTES, numpy.uint8))
    assert not is_large_array(numpy.zeros(LARGE_BYTES - 1, numpy.uint8))
    assert not is_large_array(numpy.full(LARGE_BYTES, None))
    assert not is_large_array(numpy.zeros(LARGE_BYTES).view(numpy.matrix.__base__).view(numpy.recarray))
    assert not is_large_array(torch.zeros(LARGE_BYTES))
    assert not is_large_array(bytes(LARGE_BYTES))


def test_parts_travel_inside_another_pickle() -> None:
    value = {"a": numpy.arange(1000), "b": [1, "x"], "c": torch.ones(5)}
    inner = packed(pack(value))
    arrived = unpack(unpacked(unpack(pack({"cell": inner, "n": 1}))["cell"]))
    assert arrived["a"].sum() == 499500
    assert arrived["b"] == [1, "x"]
    assert torch.equal(arrived["c"], torch.ones(5))
    arrived["a"][0] = 1  # and is its receiver's to write to


def test_what_was_seen_on_the_way_is_every_object_in_the_value() -> None:
    shared: list[int] = []
    model = torch.nn.Linear(2, 1)
    for value in ([shared, {"a": shared}], {"x": (1, [shared])}, [model, shared]):
        parts, seen = pack_seen(value)
        assert parts[0] == pack(value)[0]
        assert seen[id(shared)][1] is shared
    assert seen[id(model.weight)][1] is model.weight
    assert id(copy.copy(shared)) not in seen


_IN_A_CYCLE = """
import gc
from sublet.notebook.cells.content_digest import packed
from sublet.processes.channel.pickling import pack

gc.disable()
value = {"memory": bytearray(100), "function": lambda x: x + 1, "array": __import__("numpy").arange(9.0)}
for make in (pack, lambda v: packed(pack(v)), lambda v: pack({"values": packed(pack(v))})):
    held = [make(value)]
    held.append(held)
    del held
    gc.collect()
print("alive")
"""


def test_what_was_packed_may_die_in_a_reference_cycle() -> None:
    """As the local variable of a frame that a kept traceback leads to. In a process of its own: it would not
    survive."""
    done = forked.run([sys.executable, "-c", _IN_A_CYCLE], timeout=60)
    assert done.stdout == "alive\n", done.stderr
    assert done.returncode == 0
