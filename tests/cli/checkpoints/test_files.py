"""`sublet checkpoint restore|export|import` as people use them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.torch
import torch

import sublet as library
from tests.cli.test_commands import as_json, home, sublet  # noqa: F401
from tests.homes import Home


def test_there_and_back(home: Home, tmp_path: Path) -> None:  # noqa: F811
    weights = {
        "layer.weight": torch.arange(12.0).reshape(3, 4),
        "layer.bias": torch.ones(3, dtype=torch.bfloat16),
    }
    state = {"model": weights, "optim": {"state": {0: {"m": torch.zeros(4)}}, "lr": 0.1}, "step": 7}
    with library.checkpoints() as store, library.gpu(vram="1GiB", ttl="1m") as lease:
        store.save("m", state, expected_version=0, lease=lease)
    out = tmp_path / "out.safetensors"
    told = as_json(home, "checkpoint", "export", "m", str(out), "--weights", "model")
    assert (told["tensors"], told["left_out"]) == (2, 0)
    found = safetensors.torch.load_file(out)
    assert all(torch.equal(found[k], v) for k, v in weights.items())
    refused = sublet(home, "checkpoint", "export", "m", str(out))
    assert (refused.returncode, "--force" in refused.stderr) == (2, True)
    done = sublet(home, "checkpoint", "export", "m", str(out), "--force")
    assert "3 tensors" in done.stdout
    assert "2 values that are no tensors were left out" in done.stdout
    assert "optim.state.0.m" in safetensors.torch.load_file(out)

    whole = tmp_path / "state.pt"
    assert as_json(home, "checkpoint", "restore", "m", str(whole))["version"] == 1
    loaded = torch.load(whole, weights_only=True)
    assert loaded["step"] == 7
    assert torch.equal(loaded["model"]["layer.weight"], weights["layer.weight"])
    assert loaded["optim"]["state"][0]["m"].tolist() == [0, 0, 0, 0]
    part = tmp_path / "part.pt"
    assert sublet(home, "checkpoint", "restore", "m", str(part), "--keys", "step, optim.lr").returncode == 0
    assert torch.load(part, weights_only=True) == {"step": 7, "optim": {"lr": 0.1}}

    safetensors.torch.save_file(weights, tmp_path / "base.safetensors")
    imported = as_json(
        home, "checkpoint", "import", "fine", str(tmp_path / "base.safetensors"), "--under", "model"
    )
    assert imported["version"] == 1
    with library.checkpoints() as store:
        assert torch.equal(store.load("fine")["model"]["layer.bias"], weights["layer.bias"])
        with library.gpu(vram="1GiB", ttl="1m") as lease:  # and training goes on from there
            assert store.save("fine", store.load("fine"), expected_version=1, lease=lease).bytes_written == 0
    assert "version 1" in sublet(home, "checkpoint", "import", "again", str(whole)).stdout
    assert as_json(home, "checkpoint", "show", "again")["tensors"][0]["path"].startswith("model.")
    events = [e["kind"] for e in as_json(home, "journal", "tail")]
    assert events.count("head.adopted") == 2, "an import is written down"
    assert sublet(home, "journal", "verify").returncode == 0


def test_arrays_become_tensors(home: Home, tmp_path: Path) -> None:  # noqa: F811
    """What torch's weights-only reader takes, without being told whom to trust."""
    state = {
        "a": np.arange(3, dtype=">i4"),
        "s": np.float32(2.5),
        "l": [np.ones((2, 0)), (np.array(True),)],
        "t": b"x",
    }
    with library.checkpoints() as store, library.gpu(vram="1GiB", ttl="1m") as lease:
        store.save("n", state, expected_version=0, lease=lease)
    assert sublet(home, "checkpoint", "restore", "n", str(tmp_path / "n.pt")).returncode == 0
    loaded = torch.load(tmp_path / "n.pt", weights_only=True)
    assert (loaded["a"].tolist(), float(loaded["s"]), loaded["t"]) == ([0, 1, 2], 2.5, b"x")
    assert (loaded["l"][0].shape, bool(loaded["l"][1][0])) == ((2, 0), True)


def test_wrong_words(home: Home, tmp_path: Path) -> None:  # noqa: F811
    with library.checkpoints() as store, library.gpu(vram="1GiB", ttl="1m") as lease:
        store.save("m", {"w": torch.ones(3), "n": 1}, expected_version=0, lease=lease)
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"nonsense")
    for words, said in (
        (("export", "m", str(tmp_path / "x.bin")), ".safetensors"),
        (("export", "m", str(tmp_path / "no" / "x.safetensors")), "there is no folder"),
        (
            ("export", "m", str(tmp_path / "x.safetensors"), "--weights", "modell"),
            "has nothing called 'modell'",
        ),
        (("export", "m", str(tmp_path / "x.safetensors"), "--weights", "n"), "no tensors"),
        (("export", "nobody", str(tmp_path / "x.safetensors")), "nothing was saved as nobody"),
        (("restore", "m", str(tmp_path / "x.pt"), "--version", "9"), "no version 9"),
        (("restore", "m", str(tmp_path / "x.safetensors")), ".pt"),
        (("import", "m", str(bad)), "there is a job m already"),
        (("import", "new", str(bad)), "is not a .safetensors file"),
        (("import", "new", str(tmp_path / "missing.pt")), "is not a file"),
        (("import", "../up", str(bad)), "sublet:"),
    ):
        done = sublet(home, "checkpoint", *words)
        assert done.returncode not in (0, 1), words
        assert said in done.stderr, (words, done.stderr)
        assert "Traceback" not in done.stderr
    assert not [p for p in tmp_path.iterdir() if "x." in p.name], "nothing half is left"
    assert [j["name"] for j in as_json(home, "checkpoint", "ls")] == ["m"]
