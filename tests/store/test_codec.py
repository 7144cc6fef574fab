"""The codec of a Durable's value: bit for bit there and back, and nothing but a value or `Damaged` from any bytes (C4, C7)."""

from __future__ import annotations

import json
import os
import random
import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from sublet.core.errors import Damaged, Misconfigured, SubletError, Unsavable
from sublet.store.codec import TreeCodec, find_codec

MUTATIONS = int(os.environ.get("SUBLET_CODEC_MUTATIONS", "1500"))


def through(value: Any) -> Any:
    return TreeCodec().decode(joined(value))


def joined(value: Any) -> memoryview:
    data = b"".join(TreeCodec().encode(value))
    return memoryview(bytearray(data))


@pytest.mark.parametrize(
    "value",
    [
        None, 0, -(10**30), 1.5, float("inf"), "", "ü\ud800", b"", b"\0" * 100, [], {}, (), {1: (2, [3])}, {"$x": {"a": None}},
        {"deep": [[[[{"k": (b"x", bytearray(b"y"))}]]]]}, {1, 2}, frozenset("ab"), 3 + 4j, {"epoch": 0},
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_come_back(value: Any) -> None:
    back = through(value)
    assert back == value
    assert type(back) is type(value)


def test_tensors_come_back_bit_for_bit() -> None:
    shared = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    value = {
        "f64": np.array([0.1, -0.0, np.nan, np.inf]),
        "strided": np.arange(20, dtype=">i2")[::3],
        "zero-d": np.array(7, dtype=np.uint8),
        "empty": np.empty((0, 3), np.float16),
        "bf16": torch.randn(5, dtype=torch.bfloat16),
        "row": shared[1],
        "all": shared,
        "column": shared[:, 2],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "bytes": b"between",
        "flag": np.bool_(True),
    }
    back = through(value)
    for name in ("f64", "strided", "zero-d", "empty"):
        assert back[name].dtype == value[name].dtype
        assert back[name].tobytes() == value[name].tobytes()
        assert back[name].shape == value[name].shape
    assert torch.equal(back["bf16"].view(torch.int16), value["bf16"].view(torch.int16))
    assert back["row"].untyped_storage().data_ptr() == back["all"].untyped_storage().data_ptr(), (
        "tied stays tied"
    )
    back["all"][1] = -1
    assert (back["row"] == -1).all()
    assert torch.equal(back["column"], torch.tensor([2.0, -1.0, 10.0]))
    assert isinstance(back["parameter"], torch.nn.Parameter)
    assert back["bytes"] == b"between"
    assert back["flag"] is np.bool_(True) or bool(back["flag"])
    back["f64"][0] = 5.0  # it is the value's own memory


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(Unsavable, match=r"state\['f'\]"):
        TreeCodec().encode({"f": lambda: 1})
    wide = np.dtype([(f"field{i}", "u1") for i in range(400)])
    with pytest.raises(Unsavable, match="read again"):
        TreeCodec().encode({"a": np.zeros(1, wide)})


def _value() -> Any:
    return {
        "w": np.arange(50.0),
        "t": torch.arange(30),
        "b": b"x" * 40,
        "n": [1, 2.5, None, {"k": "v"}],
        "i": {1: 2},
    }


def test_mutated_bytes_are_a_value_or_damaged() -> None:
    """Threat 8: as if somebody had also corrected the digest. No code, no memory, no time."""
    whole, rng = bytes(joined(_value())), random.Random(3)
    (length,) = struct.unpack_from("<Q", whole)
    body = whole[8 : 8 + length]
    tally = {"value": 0, "damaged": 0}
    tracemalloc.start()
    for number in range(MUTATIONS):
        if number % 3:
            changed = bytearray(body)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(changed))
                changed[at : at + rng.randint(0, 2)] = rng.choice(
                    [b"9", b"-1", b'"', b"[", b"{}", b"99999999999", b"null", b",", b"$"]
                )
            data = struct.pack("<Q", len(changed)) + changed + whole[8 + length :]
        else:
            data = bytearray(whole)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            data = data[: rng.randrange(len(data))] if rng.random() < 0.2 else data
        began = time.thread_time()  # its own: others may use the machine
        try:
            TreeCodec().decode(memoryview(bytearray(data)))
            tally["value"] += 1
        except Damaged:
            tally["damaged"] += 1
        assert time.thread_time() - began < 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    assert min(tally.values()) > MUTATIONS // 100, tally


def _raw(body: Any, rest: bytes = b"") -> memoryview:
    text = json.dumps(body).encode()
    padded = struct.pack("<Q", len(text)) + text
    return memoryview(bytearray(padded.ljust(-(-len(padded) // 64) * 64, b"\0") + rest if rest else padded))


@pytest.mark.parametrize(
    "data",
    [
        memoryview(b""),
        memoryview(b"\0" * 7),
        memoryview(struct.pack("<Q", 1 << 63) + b"{}"),
        memoryview(struct.pack("<Q", 3) + b"{}"),
        _raw([]),
        _raw({"tree": 1, "tensors": []}),
        _raw({"tree": 1, "tensors": [], "sizes": [], "more": 1}),
        _raw({"tree": 1, "tensors": [], "sizes": [1]}),
        _raw({"tree": 1, "tensors": [], "sizes": [-1]}),
        _raw({"tree": 1, "tensors": [], "sizes": [1 << 70]}),
        _raw({"tree": 1, "tensors": [], "sizes": [True]}, b"x"),
        _raw({"tree": 1, "tensors": [], "sizes": {}}),
        _raw({"tree": 1, "tensors": [], "sizes": [3]}, b"longer"),
        _raw({"tree": {"$bytes": 5}, "tensors": [], "sizes": []}),
        _raw({"tree": {"$tensor": 0}, "tensors": [["numpy", "O", [1], None, 0, 0, 0]], "sizes": [8]}, b"x" * 8),
        _raw({"tree": {"$code": "import os"}, "tensors": [], "sizes": []}),
        memoryview(struct.pack("<Q", 200_000) + b"[" * 200_000),
    ],
    ids=lambda d: bytes(d[:40]).hex(),
)  # fmt: skip
def test_bytes_that_are_no_value(data: memoryview) -> None:
    with pytest.raises(Damaged):
        TreeCodec().decode(data)


def test_a_tree_cannot_ask_for_one_storage_again_and_again() -> None:
    """Ten thousand times a megabyte from a file of one."""
    data = _raw({"tree": [{"$bytes": 0}] * 10_000, "tensors": [], "sizes": [1 << 20]}, bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(Damaged, match="twice"):
        TreeCodec().decode(data)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_codecs_are_found_by_their_id(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(find_codec("tree-1"), TreeCodec)
    with pytest.raises(Misconfigured, match="not installed"):
        find_codec("msgpack-7")

    class Found(dict[str, Any]):
        names = ("mine",)

    class Entry:
        @staticmethod
        def load() -> Any:
            return TreeCodec

    monkeypatch.setattr("sublet.store.codec.entry_points", lambda group: Found(mine=Entry))
    assert isinstance(find_codec("mine"), TreeCodec)
    with pytest.raises(SubletError):
        find_codec("other")
