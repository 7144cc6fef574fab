"""Replicas together: who must confirm (C1), where a read goes when a copy is bad (C3), and that one good copy is enough (C4)."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.core import checkpoint
from sublet.core.checkpoint import ReplicaPolicy
from sublet.core.errors import Damaged, Misconfigured, QuorumNotReached
from sublet.store.directory import DirectoryReplica
from sublet.store.packing import digest
from sublet.store.replicas import Health, Replicas
from tests.conftest import need

from .rig import JOB, Shelf, damage, in_memory


def a_state(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.integers(0, 256, 1_100_000, np.uint8),
        "b": rng.integers(0, 256, 2_000_000, np.uint8),
        "c": [b"small", seed],
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        np.array_equal(one["a"], other["a"])
        and np.array_equal(one["b"], other["b"])
        and one["c"] == other["c"]
    )


# --- quorum --------------------------------------------------------------------------------------------------


def test_a_minority_may_be_lost(shelf: Shelf) -> None:
    shelf.save(a_state(1), 0)
    shelf.lose(0)
    shelf.save(a_state(2), 1)
    assert same(shelf.load(), a_state(2))
    assert same(shelf.load(version=1), a_state(1))
    for number in (1, 2):
        assert len(list(shelf.folders[number].glob("manifests/*"))) == 2


def test_a_lost_quorum_is_named_and_the_head_stays(shelf: Shelf) -> None:
    """C1, C6."""
    shelf.save(a_state(1), 0)
    head = shelf.rig.ledger.head(JOB)
    for number in (0, 2):
        shutil.move(shelf.folders[number], f"{shelf.folders[number]}-away")
    with pytest.raises(QuorumNotReached) as caught:
        shelf.save(a_state(2), 1)
    assert "1 of 3" in caught.value.message
    assert [r.name in caught.value.message for r in shelf.replicas] == [True, False, True]
    assert shelf.rig.ledger.head(JOB) == head
    assert same(shelf.load(), a_state(1))
    for number in (0, 2):
        shutil.move(f"{shelf.folders[number]}-away", shelf.folders[number])
    assert shelf.save(a_state(2), 1).version == 2
    assert same(shelf.load(), a_state(2))


def test_chunks_of_a_save_without_quorum_are_written_again(shelf: Shelf) -> None:
    """C6: what only a minority took is not known to be stored."""
    shelf.save(a_state(1), 0)
    for number in (0, 1):
        shutil.move(shelf.folders[number], f"{shelf.folders[number]}-away")
    for _ in range(2):
        with pytest.raises(QuorumNotReached):
            shelf.save(a_state(2), 1)
    for number in (0, 1):
        shutil.move(f"{shelf.folders[number]}-away", shelf.folders[number])
    saved = shelf.save(a_state(2), 1)
    assert saved.bytes_written > 3_000_000
    shelf.lose(2)
    assert same(shelf.load(), a_state(2))


def test_a_quorum_for_the_chunks_but_not_for_the_manifest(shelf: Shelf) -> None:
    """C1: both, or the head stays."""
    for number in (0, 1):
        shutil.rmtree(shelf.folders[number] / "manifests")
    with pytest.raises(QuorumNotReached, match="the manifest"):
        shelf.save(a_state(1), 0)
    assert shelf.version == 0
    for replica in shelf.replicas:
        replica.check()
    assert shelf.save(a_state(1), 0).version == 1
    assert same(shelf.load(), a_state(1))


def test_a_quorum_for_the_manifest_but_not_for_the_chunks(shelf: Shelf) -> None:
    """C1: a head never refers to chunks that one replica alone has."""
    for number in (0, 1):
        shutil.rmtree(shelf.folders[number] / "packs")
    with pytest.raises(QuorumNotReached, match="the state"):
        shelf.save(a_state(1), 0)
    assert shelf.version == 0
    assert shelf.files("manifests") == []


@pytest.mark.parametrize("by_policy", [True, False])
def test_the_quorum_is_of_domains(tmp_path: Path, by_policy: bool) -> None:
    """C1: two copies in one rack are one, whoever said so: the policy or the replicas."""
    racks = ("rack1", "rack1", "rack2")
    shelf = Shelf(tmp_path, domains=racks if by_policy else ())
    if not by_policy:
        for replica, rack in zip(shelf.replicas, racks, strict=True):
            replica.domain = rack
        shelf.store = shelf.open()
    shutil.move(shelf.folders[2], tmp_path / "away")
    with pytest.raises(QuorumNotReached, match="replica2"):
        shelf.save(a_state(1), 0)
    assert shelf.version == 0
    shutil.move(tmp_path / "away", shelf.folders[2])
    shelf.lose(0)
    assert shelf.save(a_state(1), 0).version == 1
    shelf.close()


def test_replicas_that_do_not_fit_the_policy(tmp_path: Path) -> None:
    """C1: three names for one folder are one copy."""
    a, b, c = (DirectoryReplica(tmp_path / n) for n in "abc")
    three = ReplicaPolicy(replicas=3)
    Replicas([a, b, c], three)
    for wrong in ([a, b], [a, b, b], [a, b, c, DirectoryReplica(tmp_path / "d")]):
        with pytest.raises(Misconfigured, match="3 replicas"):
            Replicas(wrong, three)
    for replica in (a, b, c):
        replica.domain = "one rack"
    with pytest.raises(Misconfigured, match="1 failure domains"):
        Replicas([a, b, c], three)
    Replicas([a, b, c], ReplicaPolicy(replicas=3, single_node=True))


def test_shared_chunks_must_still_be_on_a_quorum(shelf: Shelf) -> None:
    """C1: a save refers to chunks of the one before only if as many domains have them as would have to confirm them now."""
    state = a_state(1)
    shutil.move(shelf.folders[2], f"{shelf.folders[2]}-away")
    shelf.save(state, 0)
    shutil.move(f"{shelf.folders[2]}-away", shelf.folders[2])
    shelf.lose(0)
    shelf.replicas[0].check()  # a new, empty disk
    for store in (
        shelf.store,
        shelf.open(),
    ):  # what this process remembers, and what a new one finds in the parent
        state["c"] = [b"small", shelf.version]
        store.save(JOB, state, expected_version=shelf.version, lease=shelf.lease)
        shutil.move(shelf.folders[1], f"{shelf.folders[1]}-away")
        assert same(shelf.load(), state), "the loss of one domain of three lost a save that was confirmed"
        shutil.move(f"{shelf.folders[1]}-away", shelf.folders[1])


# --- reading -------------------------------------------------------------------------------------------------


def every_chunk_left(shelf: Shelf, good: dict[str, bytes]) -> bool:
    """Whether a good copy of the manifest and of each chunk is somewhere."""
    for name, data in good.items():
        copies = [(r / name).read_bytes() if (r / name).exists() else b"" for r in shelf.folders]
        if name.startswith("manifests"):
            if data not in copies:
                return False
        elif not any(c[:CUT] == data[:CUT] for c in copies) or not any(
            c[CUT : len(data)] == data[CUT:] for c in copies
        ):
            return False
    return True


CUT = 8192  # where the second chunk begins


def test_2000_damages_over_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3, C4: after each, the load is exact if one good copy of everything is left, and an error that names it otherwise; what was
    bad is set aside and made good again, never copied from."""
    monkeypatch.setattr(checkpoint, "GROUP_BYTES", 4096)  # two chunks in a small pack
    rng = random.Random(2024)
    done = lost = 0
    with in_memory() as folder:
        shelf = Shelf(folder)
        state = {"a": np.frombuffer(rng.randbytes(CUT), np.uint8), "b": b"tail" * 300, "n": 1}
        shelf.save(state, 0)
        good = {
            str(p.relative_to(shelf.folders[0])): p.read_bytes()
            for p in shelf.published()
            if p.is_relative_to(shelf.folders[0])
        }
        assert len(good) == 2
        store = shelf.open()
        while done < 2000:
            hit: list[str] = []
            for number in rng.sample(range(3), rng.choice([1, 2, 2, 2, 3])):
                for name in rng.sample(sorted(good), rng.choice([1, 2])):
                    path = shelf.folders[number] / name
                    hit.append(f"{number}/{name[:12]} {damage(path, rng)}")
                    done += 1
            # A swap: what belongs to another name.
            if rng.random() < 0.1:
                pack, manifest = (shelf.folders[rng.randrange(3)] / n for n in sorted(good, reverse=True))
                if pack.exists() and manifest.exists():
                    one, two = pack.read_bytes(), manifest.read_bytes()
                    pack.unlink(), manifest.unlink()
                    pack.write_bytes(two), manifest.write_bytes(one)
            if every_chunk_left(shelf, good):
                found = store.load(JOB)
                assert found["a"].tobytes() == state["a"].tobytes(), hit
                assert (found["b"], found["n"]) == (state["b"], 1)
                for name, data in good.items():
                    assert (shelf.folders[0] / name).read_bytes() == data, (
                        "it was bad where a read begins, and still is"
                    )
            else:
                lost += 1
                with pytest.raises(Damaged) as caught:
                    store.load(JOB)
                assert all(r.name in caught.value.message for r in shelf.replicas)
                assert any(len(word) == 64 for word in caught.value.message.split())
            for root in shelf.folders:
                shutil.rmtree(root / "aside")
                (root / "aside").mkdir()
                for name, data in good.items():
                    if not (root / name).exists() or (root / name).read_bytes() != data:
                        (root / name).unlink(missing_ok=True)
                        (root / name).write_bytes(data)
        shelf.close()
    assert lost > 50, "some of them must have been past saving"


def test_one_good_copy_of_each_chunk_is_enough() -> None:
    """C4: a pack that is bad on every replica, each time elsewhere, loads; and repairing it does not throw the good parts away."""
    with in_memory() as folder:
        shelf = Shelf(folder)
        shelf.save(a_state(5), 0)
        packs = shelf.files("packs")
        whole = packs[0].read_bytes()
        for path, at in zip(packs, (0, 1_200_000, len(whole) - 1), strict=True):  # another chunk on each
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(data)
        for _ in range(2):
            assert same(shelf.load(), a_state(5))
        assert [p.read_bytes() for p in packs] == [whole] * 3
        assert len(shelf.files("aside")) == 3
        shelf.close()


def test_repairing_for_the_head_keeps_what_older_versions_want() -> None:
    """C4: versions share packs. A repair for one must not leave out another's chunks."""
    with in_memory() as folder:
        shelf = Shelf(folder)
        first = a_state(1)
        shelf.save(first, 0)
        second = {**first, "b": a_state(2)["b"]}  # shares the chunk of "a" in the first pack
        shelf.save(second, 1)
        packs = shelf.files("packs")
        manifest = shelf.store.manifest(JOB, 1)
        shared = {c.pack for c in manifest.chunks}.pop()
        whole = (shelf.folders[0] / f"packs/{shared}.pack").read_bytes()
        assert len(packs) == 6
        where = next(c for c in manifest.chunks if c.span.size == 1_100_000 or c.span.offset == 0)
        target = shelf.folders[0] / f"packs/{shared}.pack"
        target.write_bytes(whole[: where.at] + bytes([whole[where.at] ^ 1]) + whole[where.at + 1 :])
        assert same(shelf.load(), second)
        assert target.read_bytes() == whole
        shelf.lose(1), shelf.lose(2)
        assert same(shelf.load(version=1), first)
        shelf.close()


def test_a_bad_copy_is_never_a_source(quick: Shelf) -> None:
    """C3: with every copy bad the bad ones are not spread, and nothing is returned."""
    quick.save(a_state(1), 0)
    packs = quick.files("packs")
    for number, path in enumerate(packs):
        data = bytearray(path.read_bytes())
        data[5] ^= 1 << number
        path.write_bytes(data)
    before = [p.read_bytes() for p in packs]
    for _ in range(2):
        with pytest.raises(Damaged) as caught:
            quick.load()
        chunk = quick.store.manifest(JOB).chunks[0]
        assert chunk.digest in caught.value.message
        assert chunk.pack in caught.value.message
        assert all(r.name in caught.value.message for r in quick.replicas)
    assert [p.read_bytes() for p in packs] == before, "what is left stays where it is"
    target = {"a": np.zeros(1_100_000, np.uint8), "b": np.zeros(2_000_000, np.uint8), "c": None}
    with pytest.raises(Damaged):
        quick.open().load(JOB, into=target)
    assert not target["a"].any()


def test_a_lost_chunk_of_an_old_version_does_not_keep_the_head_from_repair(quick: Shelf) -> None:
    first = a_state(1)
    quick.save(first, 0)
    quick.save({**first, "b": a_state(2)["b"]}, 1)
    old = quick.store.manifest(JOB, 1)
    shared = {c.pack for c in old.chunks}.pop()
    lost = next(c for c in old.chunks if c.digest not in {h.digest for h in quick.store.manifest(JOB).chunks})
    kept = next(c for c in old.chunks if c.digest in {h.digest for h in quick.store.manifest(JOB).chunks})
    for number, root in enumerate(quick.folders):
        path = root / f"packs/{shared}.pack"
        data = bytearray(path.read_bytes())
        data[lost.at] ^= 1
        if number == 0:
            data[kept.at] ^= 1
        path.write_bytes(data)
    store = quick.open()
    assert same(store.load(JOB), {**first, "b": a_state(2)["b"]})
    assert any(lost.digest in text for text in store.health.lost)
    assert len(quick.files("aside")) == 1
    quick.lose(1), quick.lose(2)
    assert same(quick.load(), {**first, "b": a_state(2)["b"]}), "made good on the first replica"
    with pytest.raises(Damaged):
        quick.load(version=1)


@pytest.mark.parametrize("what", ["packs", "manifests"])
def test_a_tampered_replica_is_seen_and_repaired(quick: Shelf, what: str) -> None:
    """Threat 12: the digest of the manifest is in the ledger; a replica that agrees with itself is not believed."""
    quick.save(a_state(1), 0)
    folder = quick.folders[0].parent / "other"
    folder.mkdir()
    other = Shelf(folder, replicas=1)
    other.save(a_state(2), 0)
    mine, theirs = next(quick.folders[0].glob(f"{what}/*")), next(other.folders[0].glob(f"{what}/*"))
    good = mine.read_bytes()
    mine.write_bytes(theirs.read_bytes())
    store = quick.open()
    assert same(store.load(JOB), a_state(1))
    assert mine.read_bytes() == good
    assert len(store.health.set_aside) == len(store.health.repaired) == 1
    assert [p.read_bytes() for p in quick.files("aside")] == [theirs.read_bytes()]
    other.close()


def test_missing_copies_come_back_on_a_read(quick: Shelf) -> None:
    quick.save(a_state(1), 0)
    good = [p.read_bytes() for p in quick.published()]
    for path in quick.folders[0].glob("*/*"):
        path.unlink()
    assert same(quick.load(), a_state(1))
    assert [p.read_bytes() for p in quick.published()] == good
    assert quick.files("aside") == []


def test_a_replica_that_may_not_be_written_to_does_not_stop_a_load(shelf: Shelf) -> None:
    """A bad copy that cannot be set aside is passed over."""
    shelf.save(a_state(1), 0)
    for path in shelf.folders[0].glob("*/*"):
        path.write_bytes(b"bad" * 1000)
    done = subprocess.run(
        ["mount", "--bind", "-o", "ro", str(shelf.folders[0]), str(shelf.folders[0])],
        capture_output=True,
        check=False,
    )
    need(done.returncode == 0, "root, to mount")
    try:
        if not os.statvfs(shelf.folders[0]).f_flag & os.ST_RDONLY:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(shelf.folders[0])], check=True)
        store = shelf.open()
        assert same(store.load(JOB), a_state(1))
        assert shelf.replicas[0].name in store.health.unreachable
        state = a_state(2)
        assert store.save(JOB, state, expected_version=1, lease=shelf.lease).version == 2
    finally:
        subprocess.run(["umount", "-l", str(shelf.folders[0])], check=False)
    assert same(shelf.load(), state)


def test_a_bad_manifest_under_the_name_does_not_pass_for_the_good_one(quick: Shelf) -> None:
    """C1: put again over a bad copy, the good one is what lies there afterwards."""
    replicas = Replicas(quick.replicas, quick.policy)
    data = b'{"some":"manifest"}'
    name, _ = replicas.put_manifest(data)
    for root in quick.folders[:2]:
        (root / f"manifests/{name}.json").write_bytes(b"bad")
    assert replicas.put_manifest(data) == (name, [r.name for r in quick.replicas])
    assert [p.read_bytes() for p in quick.files("manifests")] == [data] * 3
    assert len(quick.files("aside")) == 2


def test_repair_fills_a_new_replica(quick: Shelf) -> None:
    quick.save(a_state(1), 0)
    quick.save(a_state(2), 1)
    before = [p.read_bytes() for p in quick.files("packs")]
    quick.lose(1)
    quick.replicas[1].check()
    health = Health()
    Replicas(quick.replicas, quick.policy).repair(list(quick.store.history(JOB)), health)
    assert [p.read_bytes() for p in quick.files("packs")] == before
    assert len(health.repaired) == 2
    assert (health.set_aside, health.unreachable, health.lost) == ([], [], [])


def test_digests_are_blake3() -> None:
    assert digest(b"abc") == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
