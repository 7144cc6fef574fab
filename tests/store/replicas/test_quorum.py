"""Replicas together: who must confirm (C1), where a read goes when a copy is bad (C3), and that one good copy is enough (C4)."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.core.checkpoints import checkpoint
from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.core.errors import BadInput, Damaged, Misconfigured, QuorumNotReached
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.replicas.quorum import Health, Replicas
from sublet.store.save.packing import digest
from tests.conftest import need
from tests.in_memory import in_memory
from tests.seeds import SEED
from tests.store.rig import JOB, Shelf, damage


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
    """C1, C6: a head never refers to chunks that one replica alone has."""
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
    """C1, C6: a save refers to chunks of the one before only if as many domains have them as would have to confirm them now."""
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


DAMAGES = int(os.environ.get("SUBLET_DAMAGES", "600"))


class Copies:
    """Two versions on three replicas, the second sharing a chunk with the first; and what every copy should be."""

    def __init__(self, folder: Path) -> None:
        rng = random.Random(2024)
        self.shelf = Shelf(folder)
        self.states = [
            {"a": np.frombuffer(rng.randbytes(8192), np.uint8), "b": text * 300, "n": n}
            for n, text in enumerate([b"tail", b"head"])
        ]
        self.states[1]["a"] = self.states[0]["a"]
        for version, state in enumerate(self.states):
            self.shelf.save(state, version)
        first = self.shelf.folders[0]
        self.good = {str(p.relative_to(first)): p.read_bytes() for p in first.glob("[pm]a*s/*")}
        newest, oldest = self.shelf.store.history(JOB)
        assert newest.parent
        head = self.shelf.rig.ledger.head(JOB)
        assert head is not None
        self.manifests = [f"manifests/{head.digest}.json", f"manifests/{newest.parent}.json"]
        self.chunks = {m: [(f"packs/{c.pack}.pack", c.at, c.span.size) for c in v.chunks]
                       for m, v in zip(self.manifests, (newest, oldest), strict=True)}  # fmt: skip
        assert len(self.good) == 4
        assert len(set(self.chunks[self.manifests[0]]) & set(self.chunks[self.manifests[1]])) == 1

    def is_good(self, number: int, name: str, at: int = 0, size: int | None = None) -> bool:
        path = self.shelf.folders[number] / name
        wanted = self.good[name][at:] if size is None else self.good[name][at : at + size]
        if not path.exists():
            return False
        data = path.read_bytes()
        return data == wanted if size is None else data[at : at + size] == wanted

    def left(self, *manifests: str) -> bool:
        """Whether a good copy of each manifest and of each of its chunks is somewhere."""
        return all(
            any(self.is_good(n, m) for n in range(3))
            and all(any(self.is_good(n, *chunk) for n in range(3)) for chunk in self.chunks[m])
            for m in manifests
        )

    def damage(self, number: int, rng: random.Random) -> str:
        """Something that happens to a copy. Half of the time it is what would verify as something else."""
        root = self.shelf.folders[number]
        name = rng.choice(sorted(self.good))
        what = rng.choice(["file", "file", "file", "swap", "chunk", "manifest"])
        if what == "swap":
            one, two = (root / n for n in rng.sample(sorted(self.good), 2))
            if one.exists() and two.exists():
                first, second = one.read_bytes(), two.read_bytes()
                one.write_bytes(second), two.write_bytes(first)
                return f"{number} swapped {one.name[:6]} {two.name[:6]}"
        elif what == "chunk":
            (here, at, size), (there, from_at, from_size) = rng.sample(
                [c for cs in self.chunks.values() for c in cs], 2
            )
            if (root / here).exists():
                data = bytearray((root / here).read_bytes())
                data[at : at + size] = (self.good[there][from_at : from_at + from_size] * 9)[:size]
                (root / here).write_bytes(data)
                return f"{number} another's chunk in {here[:12]} at {at}"
        elif what == "manifest":
            one, two = rng.sample(self.manifests, 2)
            (root / one).write_bytes(self.good[two])
            return f"{number} another version's manifest as {one[10:16]}"
        path = root / name
        if not path.exists() or not path.stat().st_size:
            path.write_bytes(b"x")
        return f"{number} {name[:12]} {damage(path, rng)}"

    def restore(self) -> None:
        for root in self.shelf.folders:
            shutil.rmtree(root / "aside")
            (root / "aside").mkdir()
            for name, data in self.good.items():
                if not (root / name).exists() or (root / name).read_bytes() != data:
                    (root / name).unlink(missing_ok=True)
                    (root / name).write_bytes(data)


def test_damages_over_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3, C4: flips, cuts, swaps, and parts of other files that verify as something else. Each is seen; after each the load is exact
    if one good copy of everything is left, and an error that names it otherwise; what was bad is made good again, never copied from."""
    monkeypatch.setattr(checkpoint, "GROUP_BYTES", 4096)  # two chunks in a small pack
    rng = random.Random(SEED)
    counts: Counter[str] = Counter()
    with in_memory() as folder:
        copies = Copies(folder)
        shelf = copies.shelf
        newest, oldest = copies.manifests
        store = shelf.open()
        while counts["damages"] < DAMAGES:
            hit = [copies.damage(n, rng) for n in rng.choices(range(3), k=rng.choice([1, 2, 4, 7, 10]))]
            where = f"damage {counts['damages']} of seed {SEED}: {hit}"
            counts["damages"] += len(hit)
            if copies.left(newest, oldest):
                check_seen(copies, store, where)
            if copies.left(newest):
                counts["whole"] += 1
                check_loaded(store.load(JOB), copies.states[1], where)
                assert copies.is_good(0, newest), f"it was bad where a read begins, and still is: {where}"
                assert all(copies.is_good(0, *c) for c in copies.chunks[newest]), where
            else:
                counts["lost"] += 1
                with pytest.raises(Damaged) as caught:
                    store.load(JOB)
                assert all(r.name in caught.value.message for r in shelf.replicas), where
                assert any(len(word) == 64 for word in caught.value.message.split()), where
            if copies.left(newest, oldest):
                counts["repaired"] += 1
                store.repair(JOB)
                for number in range(3):
                    assert all(copies.is_good(number, m) for m in copies.manifests), where
                    assert all(copies.is_good(number, *c) for cs in copies.chunks.values() for c in cs), where
                check_loaded(store.load(JOB, version=1), copies.states[0], where)
            copies.restore()
        shelf.close()
    print(dict(counts))
    assert min(counts["lost"], counts["whole"], counts["repaired"]) > DAMAGES // 40, counts


def check_loaded(found: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    assert found["a"].tobytes() == wanted["a"].tobytes(), where
    assert (found["b"], found["n"]) == (wanted["b"], wanted["n"]), where


def check_seen(copies: Copies, store: CheckpointStore, where: str) -> None:
    """A look at every copy says of each exactly what is true. Looking needs the manifests, and mends those."""
    wanted = {c for cs in copies.chunks.values() for c in cs}
    for name, pack, how in store.verify(JOB):
        number = [r.name for r in copies.shelf.replicas].index(name)
        good = all(copies.is_good(number, *c) for c in wanted if pack in c[0])
        assert (how == "good") is good, f"{pack[:6]} on {number} is said to be {how}: {where}"


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
    whole = (quick.folders[0] / f"packs/{shared}.pack").read_bytes()
    assert not any(whole[lost.at : lost.at + lost.span.size]), "a bad chunk was copied from (C3)"
    quick.lose(1), quick.lose(2)
    assert same(quick.load(), {**first, "b": a_state(2)["b"]}), "made good on the first replica"
    with pytest.raises(Damaged):
        quick.load(version=1)


@pytest.mark.parametrize("what", ["packs", "manifests"])
def test_a_tampered_replica_is_seen_and_repaired(quick: Shelf, what: str) -> None:
    """C3, threat 12: the digest of the manifest is in the ledger; a replica that agrees with itself is not believed."""
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


def test_what_nobody_has_any_more_is_said_of_whoever_lacks_it(quick: Shelf) -> None:
    """C4: a replica that is given what it missed is told that it is lost; in the thread that catches it up nobody else would say so."""
    quick.save(a_state(1), 0)
    chunks = quick.store.manifest(JOB).chunks
    [pack] = {c.pack for c in chunks}
    for folder in quick.folders:
        (folder / f"packs/{pack}.pack").unlink()
    replicas = Replicas(quick.replicas, quick.policy)
    with pytest.raises(Damaged, match="in good order"):
        replicas.give_pack(quick.replicas[0].name, pack, chunks, Health())


@pytest.mark.parametrize(("placement", "first"), [("near", 2), ("listed", 0)])
def test_placement_says_who_is_read_first(quick: Shelf, placement: str, first: int) -> None:
    class Far(DirectoryReplica):
        near = False

    quick.save({"x": np.arange(10)}, 0)
    asked: list[str] = []
    replicas = [Far(p) for p in quick.folders[:2]] + [DirectoryReplica(quick.folders[2])]

    def spied(real: Any, name: str) -> Any:
        return lambda *args: (asked.append(name), real(*args))[1]

    for replica in replicas:
        for verb in ("read_pack", "get_manifest"):
            setattr(replica, verb, spied(getattr(replica, verb), replica.name))
    policy = ReplicaPolicy(replicas=3, placement=placement)
    ledger = quick.rig.open()
    with CheckpointStore(Replicas(replicas, policy), lambda: ledger) as store:
        assert store.load(JOB)["x"].tolist() == list(range(10))
    assert set(asked) == {replicas[first].name}
    with pytest.raises(BadInput, match="placement"):
        ReplicaPolicy(placement="random")
