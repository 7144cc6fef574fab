"""Parts of a state, and states in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from sublet.core.errors import BadInput, Damaged
from sublet.store.arena import Arena
from tests.store.rig import JOB, Shelf

BIG = 3 << 20


def a_state() -> dict[str, Any]:
    shared = torch.arange(BIG // 8, dtype=torch.float64)
    return {
        "model": {"layer.weight": torch.full((BIG,), 1, dtype=torch.uint8), "layer.bias": torch.ones(3), "tied": shared},
        "optim": {"state": {0: {"m": torch.full((BIG,), 2, dtype=torch.uint8)}, 1: {"m": shared}}, "groups": [{"lr": 0.1}]},
        "raw": b"bytes",
        "step": 7,
    }  # fmt: skip


def packs_read(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, int]:
    read = []
    store = shelf.open()
    real = store._replicas.chunk
    monkeypatch.setattr(
        store._replicas,
        "chunk",
        lambda entry, into, health: (read.append(into.nbytes), real(entry, into, health)),
    )
    return store.load(JOB, **options), sum(read)


def test_only_some_keys(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.save(a_state(), 0)
    whole, all_bytes = packs_read(shelf, monkeypatch)
    assert sorted(whole) == ["model", "optim", "raw", "step"]
    part, some = packs_read(shelf, monkeypatch, keys=["model.layer.weight", "step"])
    assert (list(part), list(part["model"]), part["step"]) == (["model", "step"], ["layer.weight"], 7)
    assert torch.equal(part["model"]["layer.weight"], a_state()["model"]["layer.weight"])
    assert some == BIG < all_bytes
    part, some = packs_read(shelf, monkeypatch, keys=["optim.state.1", "model.tied"])
    assert part["optim"]["state"][1]["m"].data_ptr() == part["model"]["tied"].data_ptr(), "tied again"
    assert some == BIG
    part, some = packs_read(shelf, monkeypatch, keys=["optim.groups", "raw"])
    assert part == {"optim": {"groups": [{"lr": 0.1}]}, "raw": b"bytes"}
    assert 0 < some < 1 << 20, "one group of small ones"
    assert packs_read(shelf, monkeypatch, keys=["step"]) == ({"step": 7}, 0)
    assert packs_read(shelf, monkeypatch, keys=["model", "model.tied"])[0].keys() == {"model"}


@pytest.mark.parametrize("key", ["modell", "model.layer", "optim.groups.0", "", "step.x"])
def test_a_key_that_names_nothing(shelf: Shelf, key: str) -> None:
    shelf.save(a_state(), 0)
    with pytest.raises(BadInput, match="has nothing called") as caught:
        shelf.load(keys=[key])
    assert "model" in caught.value.remedy or "optim" in caught.value.remedy or "step" in caught.value.remedy


def test_some_keys_into_what_is_there(shelf: Shelf) -> None:
    shelf.save(a_state(), 0)
    live = {
        "model": {"layer.weight": torch.zeros(BIG, dtype=torch.uint8), "layer.bias": torch.zeros(3)},
        "mine": 3,
    }
    shelf.load(keys=["model.layer.bias"], into=live)
    assert live["model"]["layer.bias"].tolist() == [1, 1, 1]
    assert not live["model"]["layer.weight"].any()
    assert live["mine"] == 3
    with pytest.raises(BadInput, match="other keys"):
        shelf.load(keys=["model.tied"], into=live)


def test_loading_into_tensors_makes_the_next_save_cheap(shelf: Shelf) -> None:
    shelf.save(a_state(), 0)
    store = shelf.open()
    live = a_state()
    for part in (live["model"]["layer.weight"], live["optim"]["state"][0]["m"], live["model"]["tied"]):
        part.zero_()
    store.load(JOB, into=live)
    live["model"]["layer.bias"][0] = 9
    saved = store.save(JOB, live, expected_version=1, lease=shelf.lease)
    assert saved.bytes_written < 1 << 20
    assert shelf.load()["model"]["layer.bias"].tolist() == [9, 1, 1]
    # Back to what was saved: nothing has to be read for it.
    live["model"]["layer.weight"].zero_()
    for path in shelf.files("packs"):
        path.unlink()
    store.load(JOB, into=live)
    assert live["model"]["layer.weight"].all()


def test_nothing_of_the_arena_gets_into_the_callers_hands(shelf: Shelf) -> None:
    """Where there was nothing to copy into, what is put there must not change with the next save."""
    shelf.save({"a": np.full(BIG, 1, np.uint8), "late": torch.full((BIG,), 2, dtype=torch.uint8), "t": (np.ones(4),)}, 0)  # fmt: skip
    store = shelf.open()
    live: dict[str, Any] = {"a": np.zeros(BIG, np.uint8), "late": None, "t": None}
    store.load(JOB, into=live)
    assert live["late"].all()
    store.save(JOB, {"a": np.full(BIG, 5, np.uint8), "late": torch.full((BIG,), 6, dtype=torch.uint8), "t": (np.zeros(4),)}, expected_version=1, lease=shelf.lease)  # fmt: skip
    assert (live["a"] == 1).all()
    assert (live["late"] == 2).all()
    assert live["t"][0].all()


def test_a_load_beside_a_save_does_not_touch_its_arena(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = ({"a": np.full(BIG, n, np.uint8)} for n in (1, 2))
    shelf.save(one, 0)
    real = shelf.store._write_elsewhere

    def loading(arena: Arena, spans: Any) -> Any:
        live = {"a": np.zeros(BIG, np.uint8)}
        shelf.store.load(JOB, into=live)
        assert (live["a"] == 1).all()
        return real(arena, spans)

    monkeypatch.setattr(shelf.store, "_write_elsewhere", loading)
    shelf.store.save_behind(JOB, two, expected_version=1, lease=shelf.lease).result(30)
    assert (shelf.load()["a"] == 2).all()


def test_targets_that_cannot_take_it_are_refused_before_anything_is_copied(shelf: Shelf) -> None:
    shelf.save({"n": 1, "a": torch.ones(4), "b": torch.ones(4)}, 0)
    for target in (
        torch.empty(4, device="meta"),
        torch.zeros(1).expand(4),
        torch.zeros(4).to_sparse(),
        np.broadcast_to(np.zeros(1, np.float32), 4),
    ):
        live = {"n": 0, "a": torch.zeros(4), "b": target}
        with pytest.raises(BadInput, match=r"state\['b'\]"):
            shelf.load(into=live)
        assert live["n"] == 0
        assert not live["a"].any()


def test_names_that_are_the_beginning_of_others(shelf: Shelf, tmp_path: Path) -> None:
    state = {"a": {"c": 1}, "a.b": {"w": torch.ones(2)}, "": {"x": torch.ones(1)}, 3: {"w": torch.ones(3)}}
    shelf.save(state, 0)
    assert shelf.load(keys=["a.b"]).keys() == {"a.b"}
    done = shelf.open().export(JOB, tmp_path / "w.safetensors", weights="a.b")
    assert (done.tensors, done.left_out) == (1, 0)
    assert shelf.load(keys=["3"]).keys() == {3}
    assert shelf.load(keys=[]) == {}


def test_a_tuple_for_a_key_cannot_be_named(shelf: Shelf, tmp_path: Path) -> None:
    shelf.save({(1, 2): {"w": torch.ones(2)}}, 0)
    with pytest.raises(BadInput):
        shelf.open().export(JOB, tmp_path / "w.safetensors", weights="(1, 2)")
    with pytest.raises(BadInput):
        shelf.open().export(JOB, tmp_path / "w.safetensors", weights="{'$tuple': [1, 2]}")


def test_no_keys_of_what_is_no_dict(shelf: Shelf) -> None:
    shelf.save([1, torch.ones(2)], 0)
    with pytest.raises(BadInput, match="no dict"):
        shelf.load(keys=[])


def test_an_export_says_the_version_it_has(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the head moves meanwhile."""
    shelf.save({"w": torch.full((4,), 1.0)}, 0)
    store = shelf.open()
    real = store._load_apart

    def moving(*args: Any) -> Any:
        state = real(*args)
        shelf.save({"w": torch.full((4,), 2.0)}, 1)
        return state

    monkeypatch.setattr(store, "_load_apart", moving)
    file = tmp_path / "w.safetensors"
    store.export(JOB, file)
    with safe_open(file, "pt") as found:
        assert found.metadata()["sublet.version"] == "1"
        assert found.get_tensor("w").tolist() == [1.0] * 4


def test_what_another_process_saved_since_is_read(shelf: Shelf) -> None:
    """The arena has a state of the same layout, and not the one that is wanted."""
    shelf.save({"a": np.full(BIG, 1, np.uint8), "b": np.full(9, 1, np.uint8)}, 0)
    shelf.open().save(
        JOB,
        {"a": np.full(BIG, 1, np.uint8), "b": np.full(9, 2, np.uint8)},
        expected_version=1,
        lease=shelf.lease,
    )
    live = {"a": np.zeros(BIG, np.uint8), "b": np.zeros(9, np.uint8)}
    shelf.store.load(JOB, into=live)
    assert (live["a"] == 1).all()
    assert (live["b"] == 2).all()


def test_an_arena_is_not_believed_after_a_load_that_failed(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = ({"a": np.full(BIG, n, np.uint8)} for n in (1, 2))
    shelf.save(one, 0)
    slot = shelf.store._slots.get(JOB)
    assert slot is not None
    assert slot.written == {}, "what was committed is the head's; what else it wrote a sweep may delete"
    shelf.open().save(JOB, two, expected_version=1, lease=shelf.lease)

    def torn(entry: Any, into: memoryview, health: Any) -> None:
        into[: BIG // 2] = b"\x09" * (BIG // 2)
        raise Damaged("no copy is good")

    with monkeypatch.context() as patch:
        patch.setattr(shelf.store._replicas, "chunk", torn)
        live = {"a": np.zeros(BIG, np.uint8)}
        with pytest.raises(Damaged):
            shelf.store.load(JOB, into=live)
        assert not live["a"].any()
    shelf.open().save(JOB, one, expected_version=2, lease=shelf.lease)
    shelf.store.load(JOB, into=live)
    assert (live["a"] == 1).all()
