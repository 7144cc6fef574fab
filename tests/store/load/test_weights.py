"""Weights out and in, against the library whose format it is."""

from __future__ import annotations

import json
import os
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from sublet.core.errors import BadInput, Damaged, NotDurable, SubletError
from sublet.store.load.weights import (
    read_safetensors,
    read_weights,
    tensors_of,
    whole_file,
    write_safetensors,
)


def every_type() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    kinds = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16",
             "uint32", "uint64", "bool", "float8_e4m3fn", "float8_e5m2"]  # fmt: skip
    found = {kind: (torch.rand(3, 5) * 4).to(getattr(torch, kind)) for kind in kinds}
    found["none"] = torch.zeros(0, 4)
    found["scalar"] = torch.tensor(2.5)
    found["askew.t"] = torch.arange(12.0).reshape(3, 4).t()
    found["name with ünïcode"] = torch.ones(1, dtype=torch.uint8)
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .equal(other.contiguous().reshape(-1).view(torch.uint8))
    )


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensors = every_type()
    size = write_safetensors(path, tensors, {"name": "job"})
    assert path.stat().st_size == size
    found = safetensors.torch.load_file(path)
    assert found.keys() == tensors.keys()
    assert all(same(found[k], v) for k, v in tensors.items())
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"name": "job"}
    ours = read_weights(path)
    assert all(same(ours[k], v) for k, v in tensors.items())
    ours["float32"][0, 0] = 7  # it is the caller's


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensors = {k: v.contiguous() for k, v in every_type().items()}
    safetensors.torch.save_file(tensors, path)
    found = read_safetensors(path)
    assert all(same(found[k], v) for k, v in tensors.items())
    safetensors.numpy.save_file({"n": np.arange(6.0).reshape(2, 3)}, path)
    assert read_safetensors(path)["n"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_numpy_states(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    arrays = {"a": np.arange(6, dtype=">i4").reshape(2, 3).T, "b": np.float32([1, 2])}
    write_safetensors(path, arrays, {})
    found = safetensors.numpy.load_file(path)
    assert all(np.array_equal(found[k], v) for k, v in arrays.items())


def test_tensors_by_path_and_how_many_others() -> None:
    state = {
        "model": {"w": torch.ones(2), 3: torch.zeros(1)},
        "l": [torch.ones(1), 5],
        "lr": 0.1,
        "none": None,
    }
    found, others = tensors_of(state)
    assert (list(found), others) == (["model.w", "model.3", "l.0"], 3)
    with pytest.raises(BadInput, match=r"two tensors would be called 'a\.b'"):
        tensors_of({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    with pytest.raises(BadInput, match="complex128"):
        write_safetensors(Path("never"), {"c": torch.zeros(2, dtype=torch.complex128)}, {})


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    path.write_text("before")
    with pytest.raises(NotDurable, match="the checkpoint is untouched"), whole_file(path) as draft:
        draft.write_text("half")
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == ["w.safetensors"]
    assert path.read_text() == "before"
    with pytest.raises(NotDurable):
        write_safetensors(tmp_path / "nowhere" / "w.safetensors", {"a": torch.ones(1)}, {})


def header_of(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(data[8 : 8 + length])
    return found


def with_header(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_a_malformed_file_is_an_error_and_little_memory(tmp_path: Path) -> None:
    """THREATS 8: believed lengths, negative and overlapping places, wrong types, depth."""
    path = tmp_path / "w.safetensors"
    write_safetensors(path, {"a": torch.ones(4, 4), "b": torch.ones(3)}, {})
    good = path.read_bytes()
    header = header_of(good)
    body = good[-(16 + 3) * 4 :]
    entry = header["a"]
    bad: list[bytes] = [b"", good[:7], good[:20], good[:-1], b"\xff" * 8 + good[8:], with_header(b"[" * 100_000, body), with_header(b"nonsense", body), with_header([], body), with_header({"a": 3}, body)]  # fmt: skip
    for change in (
        {"dtype": "F63"}, {"dtype": 4}, {"shape": [-4, -4]}, {"shape": [2**62, 4]}, {"shape": "44"}, {"shape": [True] * 16},
        {"shape": [1] * 100}, {"data_offsets": [0, 2**63]}, {"data_offsets": [-64, 0]}, {"data_offsets": [12, 76]},
        {"data_offsets": [64, 0]}, {"data_offsets": [1.0, 65.0]}, {"data_offsets": [0]}, {"data_offsets": None},
    ):  # fmt: skip
        bad.append(with_header({**header, "a": {**entry, **change}}, body))
    bad.append(with_header({**header, "c": header["b"]}, body))  # the same place twice
    tracemalloc.start()
    for data in bad:
        path.write_bytes(data)
        with pytest.raises(Damaged):
            read_safetensors(path)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_random_damage(tmp_path: Path) -> None:
    """An error, or tensors: never anything else."""
    path = tmp_path / "w.safetensors"
    write_safetensors(path, {"a": torch.ones(4, 4), "b": torch.ones(3)}, {})
    good = path.read_bytes()
    rng = random.Random(5)
    for _ in range(400):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data) - 76)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            found = read_safetensors(path)
        except SubletError:
            continue
        assert all(isinstance(t, torch.Tensor) for t in found.values())


class Canary:
    def __reduce__(self) -> Any:
        return (os.system, (f"touch {Path.cwd()}/canary-fired",))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pt_is_read_without_running_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """THREATS 7."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(3), "deep": {"b": torch.zeros(2)}, "lr": 3}, "good.pt")
    assert sorted(read_weights(tmp_path / "good.pt")) == ["deep.b", "w"]
    torch.save({"w": torch.ones(3), "x": Canary()}, "bad.pt")
    Path("worse.pt").write_bytes(pickle.dumps(Canary()))
    Path("bad.bin").write_bytes(b"nothing")
    torch.save({"lr": 3}, "empty.pt")
    for name in ("bad.pt", "worse.pt", "bad.bin", "empty.pt", "missing.pt", "good.zip"):
        with pytest.raises(BadInput):
            read_weights(tmp_path / name)
    assert not Path("canary-fired").exists()


def test_a_tensor_may_not_be_called_what_the_format_calls_its_own(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    with pytest.raises(BadInput, match="__metadata__"):
        write_safetensors(file, {"__metadata__": torch.ones(2)}, {})
    assert not file.exists()


def test_a_shape_no_memory_has(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    text = json.dumps({"w": {"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(Damaged):
        read_weights(file)
