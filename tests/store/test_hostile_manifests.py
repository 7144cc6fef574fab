"""Threats 7, 8, 9, 11 and 12: a manifest that is believed by its digest and means harm; names that lead elsewhere; links; other people's digests.

400 manifests here, `SUBLET_MANIFESTS=10000` in `make proof`. What is done to them is in `hostile_manifests.py`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sublet.core.errors import Damaged, NotFound
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.quorum import Replicas
from sublet.store.save.packing import digest
from tests.in_memory import in_memory
from tests.seeds import SEED
from tests.store.hostile_manifests import GROWTH_BYTES, canary_state
from tests.store.rig import JOB, Shelf

COUNT = int(os.environ.get("SUBLET_MANIFESTS", "150"))
NAMES = min(500, COUNT)

pytestmark = pytest.mark.timeout(180 + COUNT // 10)


def watched(what: str, count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.store.hostile_manifests", what, str(count), str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ended with {done.returncode} (seed {SEED}): {done.stderr[-3000:]}"
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(what, count, {k: v for k, v in seen.items() if k != "wrong"})
    return seen


def test_mutated_manifests_that_are_believed() -> None:
    """C7, threats 7 and 8: loaded as they say or refused in our words, in a second, in bounded memory; nothing is run, imported or
    opened that is not the store's."""
    seen = watched("manifests", COUNT)
    assert seen["wrong"] == []
    assert seen["growth"] < GROWTH_BYTES
    assert sum(seen["kinds"].values()) >= COUNT
    assert seen["kinds"]["loaded"] > COUNT // 20, "they must not all be refused at the door"
    assert seen["kinds"]["Damaged"] > COUNT // 3


def test_names_that_lead_elsewhere() -> None:
    """Threat 9: as a job, a parent, a pack, a chunk: no file outside of the replica is opened, whoever believes them."""
    seen = watched("names", NAMES)
    assert seen["wrong"] == []
    assert seen["kinds"]["Damaged"] > 5 * NAMES
    assert seen["kinds"]["BadInput"] > 2.4 * NAMES


def test_the_canary_comes_back_as_it_was(tmp_path: Path) -> None:
    """Threat 7: what other formats would run is data here, bit by bit."""
    shelf = Shelf(tmp_path, replicas=1)
    state = canary_state(str(tmp_path / "canary"))
    shelf.save(state, 0)
    found = shelf.load()
    assert found.keys() == state.keys()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value)
        elif isinstance(value, np.ndarray):
            assert np.array_equal(found[key], value)
        else:
            assert found[key] == value
    assert not (tmp_path / "canary").exists()
    shelf.close()


def test_nothing_in_the_store_unpickles() -> None:
    """Threat 7: not even a way to ask for it."""
    import sublet.core.checkpoints.checkpoint
    import sublet.store

    files = [*Path(sublet.store.__path__[0]).rglob("*.py"), Path(sublet.core.checkpoints.checkpoint.__file__)]
    assert len(files) > 8
    for path in files:
        words = path.read_text()
        for bad in (
            "import pickle",
            "allow_pickle",
            "torch.load(",
            "import yaml",
            "import marshal",
            "import shelve",
            "eval(",
            "exec(",
        ):
            for line in words.splitlines():
                if bad in line and "literal_eval(" not in line and "weights_only=True" not in line:
                    pytest.fail(f"{path.name}: {line.strip()}")


# --- links ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["packs", "manifests"])
@pytest.mark.parametrize("where", ["file", "folder"])
def test_links_in_a_replica_are_not_followed(what: str, where: str) -> None:
    """Threat 9: not even to bytes that would verify. The good copies serve, and a link under a name is set aside and replaced."""
    with in_memory() as folder:
        shelf = Shelf(folder)
        state = {"a": np.arange(5000)}
        shelf.save(state, 0)
        place = shelf.folders[0] / what
        target = place if where == "folder" else next(place.iterdir())
        target.rename(folder / "elsewhere")
        target.symlink_to(folder / "elsewhere")
        store = shelf.open()
        assert np.array_equal(store.load(JOB)["a"], state["a"])
        if where == "file":
            assert not target.is_symlink()
            assert target.read_bytes() == (folder / "elsewhere").read_bytes()
            assert len(store.health.set_aside) == len(store.health.repaired) == 1
        else:
            assert shelf.replicas[0].name in store.health.unreachable
            before = sorted((folder / "elsewhere").iterdir())
            shelf.save({"a": np.arange(6000)}, 1)
            assert sorted((folder / "elsewhere").iterdir()) == before
        for number in (1, 2):
            shelf.lose(number)
        if where == "folder":
            with pytest.raises(Damaged):
                shelf.load()
        shelf.close()


# --- other people's digests ------------------------------------------------------------------------------------


def test_a_digest_tells_nobody_what_is_stored() -> None:
    """Threat 11: who saves the bytes somebody else has saved writes as much as if nobody had, and a digest alone reads nothing."""
    with in_memory() as folder:
        shelf = Shelf(folder)
        state = {"a": np.frombuffer(random.Random(1).randbytes(3_000_000), np.uint8)}
        first = shelf.store.save("ada/model", state, expected_version=0, lease=shelf.lease)
        other = shelf.open()
        second = other.save("bob/model", state, expected_version=0, lease=shelf.lease)
        assert (second.bytes_written, second.bytes_shared) == (first.bytes_written, 0)
        assert not {c.pack for c in other.manifest("bob/model").chunks} & {
            c.pack for c in shelf.store.manifest("ada/model").chunks
        }
        for name in (first.digest, f"ada/{first.digest}", shelf.store.manifest("ada/model").chunks[0].digest):
            with pytest.raises(NotFound):
                other.load(name)
        shelf.close()


@pytest.mark.parametrize("rewritten", [1, 2])
def test_replicas_that_agree_with_each_other_are_not_believed(rewritten: int) -> None:
    """Threat 12: chunk and manifest altered together, also on most replicas. The ledger holds the digest."""
    with in_memory() as folder:
        shelf = Shelf(folder)
        (folder / "forged").mkdir()
        forger = Shelf(folder / "forged")
        state, forged = {"a": np.arange(9000)}, {"a": np.arange(9000) + 1}
        shelf.save(state, 0)
        forger.save(forged, 0)
        good = {p.name: p.read_bytes() for p in shelf.published()}
        for number in range(rewritten):
            for kind in ("packs", "manifests"):
                for path in (shelf.folders[number] / kind).iterdir():
                    path.write_bytes(next((forger.folders[number] / kind).iterdir()).read_bytes())
                for path in (forger.folders[number] / kind).iterdir():
                    (shelf.folders[number] / kind / path.name).write_bytes(path.read_bytes())
        store = shelf.open()
        assert np.array_equal(store.load(JOB)["a"], state["a"])
        assert len(store.health.set_aside) == 2 * rewritten
        for root in shelf.folders:
            for kind in ("packs", "manifests"):
                assert all(p.read_bytes() == good[p.name] for p in (root / kind).iterdir() if p.name in good)
        shelf.close(), forger.close()


def test_a_manifest_written_otherwise_is_spread_as_it_is() -> None:
    """A repair copies the bytes the digest is of, whoever wrote them; not what it would have written itself."""
    with in_memory() as folder:
        shelf = Shelf(folder)
        shelf.save({"a": b"x" * 100}, 0)
        head = shelf.rig.ledger.head(JOB)
        assert head is not None
        data = json.dumps(json.loads(shelf.replicas[0].get_manifest(head.digest) or b""), indent=1).encode()
        shelf.replicas[1].put_manifest(digest(data), data)
        shelf.rig.sql("UPDATE head SET digest = ?", digest(data))
        ledger = shelf.rig.open()
        store = CheckpointStore(Replicas(shelf.replicas, shelf.policy), lambda: ledger)
        store.repair(JOB)
        assert [r.get_manifest(digest(data)) for r in shelf.replicas] == [data] * 3
        assert len(shelf.files("manifests")) == 6
        store.close(), shelf.close()
