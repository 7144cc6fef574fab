"""Which parts of two states differ, to the last bit; and the digest that says so without looking."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sublet.core.checkpoints.checkpoint import ByteSpan, ChunkEntry, Manifest, TensorEntry, content_digest
from sublet.store.load.comparing import differing


def shown(one: Any, other: Any) -> list[str]:
    return [str(d) for d in differing(one, other)]


def test_the_same_is_the_same() -> None:
    state = {"w": np.arange(3.0), "n": [1, "x", None, b"b", float("nan")], "t": (1, 2)}
    again = {"w": np.arange(3.0), "n": [1, "x", None, b"b", float("nan")], "t": (1, 2)}
    assert shown(state, again) == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, ["a.b: 1 and 2"]),
        ({"a": 1}, {"a": 1.0}, ["a: int and float"]),
        ({"a": [1, 2]}, {"a": [1]}, ["a: 2 and 1 members"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a.1: 2 and 3"]),
        ({"a": 1}, {"b": 1}, ["a: only in the first", "b: only in the second"]),
        ({"w": np.zeros(3)}, {"w": np.zeros(4)}, ["w: float64 of (3,) and float64 of (4,)"]),
        ({"w": np.zeros(3)}, {"w": np.zeros(3, np.float32)}, ["w: float64 of (3,) and float32 of (3,)"]),
        (
            {"w": np.array([0.0, 1])},
            {"w": np.array([0.0, 2])},
            ["w: from element 1 of 2 on, the bits differ"],
        ),
        ({"w": np.array([0.0])}, {"w": np.array([-0.0])}, ["w: from element 0 of 1 on, the bits differ"]),
        ({"n": 1.0}, {"n": float("nan")}, ["n: 1.0 and nan"]),
    ],
)
def test_what_differs_is_named(one: Any, other: Any, expected: list[str]) -> None:
    assert shown(one, other) == expected


def test_tensors_of_every_kind() -> None:
    torch = pytest.importorskip("torch")
    one = {
        "w": torch.zeros(4, dtype=torch.bfloat16),
        "s": torch.tensor(1.5),
        "t": torch.arange(6).reshape(2, 3).T,
    }
    other = {
        "w": torch.zeros(4, dtype=torch.bfloat16),
        "s": torch.tensor(1.5),
        "t": torch.arange(6).reshape(2, 3).T,
    }
    assert shown(one, other) == []
    other["w"][2] = 1
    assert shown(one, other) == ["w: from element 2 of 4 on, the bits differ"]


def a_manifest() -> Manifest:
    return Manifest(
        name="j",
        version=1,
        step=5,
        schema="",
        policy="p",
        parent="",
        epoch=1,
        attempt="a",
        tree={"w": {"$tensor": 0}, "n": 1},
        tensors=(
            TensorEntry(framework="numpy", dtype="float64", shape=(2,), stride=None, offset=0, storage=0),
        ),
        storages=(ByteSpan(0, 16),),
        chunks=(ChunkEntry(ByteSpan(0, 16), "d" * 64, "p" * 64, 0),),
        size=4096,
    )


def test_the_content_is_the_state_and_nothing_else() -> None:
    """Version, step, parent, epoch, attempt, tenant, packs: two runs that ended alike differ in all of them."""
    made = a_manifest()
    pack = replace(made.chunks[0], pack="q" * 64, at=4096)
    other = replace(
        made,
        name="k",
        version=9,
        step=6,
        schema="s",
        policy="q",
        parent="e" * 64,
        epoch=4,
        attempt="b",
        tenant="t",
        chunks=(pack,),
    )
    assert content_digest(made) == content_digest(other)


@pytest.mark.parametrize(
    "changed",
    [
        {"tree": {"w": {"$tensor": 0}, "n": 2}},
        {"tree": {"v": {"$tensor": 0}, "n": 1}},
        {"chunks": (ChunkEntry(ByteSpan(0, 16), "e" * 64, "p" * 64, 0),)},
        {"storages": (ByteSpan(0, 8),)},
        {
            "tensors": (
                TensorEntry(framework="numpy", dtype="float32", shape=(2,), stride=None, offset=0, storage=0),
            )
        },
        {
            "tensors": (
                TensorEntry(
                    framework="numpy", dtype="float64", shape=(1, 2), stride=None, offset=0, storage=0
                ),
            )
        },
    ],
)
def test_every_part_of_the_state_is_in_its_content(changed: dict[str, Any]) -> None:
    assert content_digest(a_manifest()) != content_digest(replace(a_manifest(), **changed))
