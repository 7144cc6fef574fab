"""States saved to folders and buckets together: quorum, repair, lies, lost connections. Nothing is lost, and a head moves only over what is stored."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.core.checkpoints import checkpoint
from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.core.errors import Damaged, NotDurable, QuorumNotReached
from sublet.ports.store import Replica
from sublet.store.buckets.connection import BucketTimeouts
from sublet.store.replicas import bucket as bucket_module
from sublet.store.replicas import bucket_pack
from sublet.store.replicas.bucket import BucketReplica
from sublet.store.replicas.directory import DirectoryReplica
from tests.homes import wait_until
from tests.store.rig import JOB, Shelf
from tests.store.servers import Proxy, Seen, Servers

SHORT = BucketTimeouts(request_seconds=3.0, patience_seconds=0.6, connect_seconds=3.0)
#: Saves in the storm; more of them in `make proof`.
STORM = int(os.environ.get("SUBLET_BUCKET_STORM", "6"))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_pack, "PART_BYTES", 512 << 10)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 256 << 10)
    monkeypatch.setattr(checkpoint, "GROUP_BYTES", 32 << 10)
    monkeypatch.setattr(bucket_module, "CHECK_SECONDS", 0.5)


class Mixed:
    """A folder, moto and another server, each bucket behind a proxy of its own."""

    def __init__(self, folder: Path, stores: Servers, other: str, limits: BucketTimeouts = SHORT) -> None:
        self._stack = ExitStack()
        self.proxies = [self._stack.enter_context(Proxy(stores[kind])) for kind in ("moto", other)]
        self.shelf = Shelf(folder)
        self.buckets = [proxy.open(domain=f"cloud{n}", limits=limits) for n, proxy in enumerate(self.proxies)]
        self.folder = DirectoryReplica(folder / "here", "here")
        replicas: list[Replica] = [self.buckets[0], self.folder, self.buckets[1]]
        for replica in replicas:
            replica.check()
        self.shelf.replicas = replicas  # type: ignore[assignment]
        # Buckets are asked too: a near replica would answer for all of them.
        self.shelf.policy = ReplicaPolicy(replicas=3, placement="listed")
        self.shelf.store = self.shelf.open()

    def down(self, number: int, fault: str) -> None:
        self.proxies[number].faults = lambda _: fault

    def up(self) -> None:
        for proxy in self.proxies:
            proxy.faults = lambda _: None
        time.sleep(SHORT.patience_seconds + 0.1)

    def close(self) -> None:
        self.shelf.close()
        self._stack.close()


@pytest.fixture(params=["seaweed", "azurite", "gcs"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path, object_stores: Servers) -> Iterator[Mixed]:
    made = Mixed(tmp_path, object_stores, request.param)
    yield made
    made.close()


@pytest.fixture
def one_mix(tmp_path: Path, object_stores: Servers) -> Iterator[Mixed]:
    made = Mixed(tmp_path, object_stores, "gcs")
    yield made
    made.close()


def a_state(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.integers(0, 256, 900_000, np.uint8),
        "m": rng.integers(0, 256, 70_000, np.uint8),
        "n": seed,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        np.array_equal(one["w"], other["w"])
        and np.array_equal(one["m"], other["m"])
        and one["n"] == other["n"]
    )


def test_saved_loaded_and_shared(mixed: Mixed) -> None:
    shelf = mixed.shelf
    state = a_state(1)
    first = shelf.save(state, 0)
    state["w"][:10] = 0
    state["n"] = 2
    second = shelf.save(state, 1)
    assert second.bytes_written < first.bytes_written // 2
    assert second.bytes_shared > 700_000
    assert same(shelf.load(), state)
    assert same(shelf.load(version=1), a_state(1))
    assert {what for _, _, what in shelf.open().verify(JOB)} == {"good"}
    for lost in mixed.shelf.replicas:  # each alone would do
        shelf.replicas = [lost]
        shelf.policy = ReplicaPolicy(replicas=1)
        assert same(shelf.load(), state)


@pytest.mark.parametrize(("other", "fault"), [("seaweed", "503"), ("azurite", "slow"), ("gcs", "reset")])
def test_losing_a_bucket_keeps_saving_and_it_catches_up(
    tmp_path: Path, object_stores: Servers, other: str, fault: str
) -> None:
    """C1, C6: a minority may be down; repair gives it what it missed."""
    mixed = Mixed(tmp_path, object_stores, other)
    shelf = mixed.shelf
    shelf.save(a_state(1), 0)
    mixed.down(1, fault)
    begun = time.monotonic()
    shelf.save(a_state(2), 1)
    assert same(shelf.load(), a_state(2))
    assert time.monotonic() - begun < 25 * SHORT.request_seconds, "it is waited for once, not at every object"
    mixed.up()
    health = shelf.open().repair(JOB)
    by_itself = not shelf.store.behind()  # a store that is open catches it up; a repair does what is left
    assert by_itself or any(mixed.buckets[1].name in what for what in health.repaired)
    while health.unreachable:  # a crowded server's answer may come too late to count
        health = shelf.open().repair(JOB)
    assert health.lost == []
    wait_until(lambda: {what for _, _, what in shelf.open().verify(JOB)} == {"good"})
    shelf.replicas = [mixed.buckets[1]]  # type: ignore[list-item]
    shelf.policy = ReplicaPolicy(replicas=1)
    assert same(shelf.load(), a_state(2))
    assert same(shelf.load(version=1), a_state(1))
    mixed.close()


def test_losing_the_quorum_is_named_and_the_head_stays(one_mix: Mixed) -> None:
    """C1, C6."""
    shelf = one_mix.shelf
    shelf.save(a_state(1), 0)
    head = shelf.rig.ledger.head(JOB)
    one_mix.down(0, "500")
    one_mix.down(1, "503")
    with pytest.raises(QuorumNotReached) as caught:
        shelf.save(a_state(2), 1)
    assert all(b.name in caught.value.message for b in one_mix.buckets)
    assert "500" in caught.value.message
    assert "503" in caught.value.message
    assert "bad copy" not in caught.value.message
    assert shelf.rig.ledger.head(JOB) == head
    assert same(shelf.load(), a_state(1)), "the folder alone has it"
    one_mix.up()
    assert shelf.save(a_state(2), 1).version == 2
    assert same(shelf.load(), a_state(2))


def test_a_bucket_that_lies(one_mix: Mixed) -> None:
    """C3: other bytes of the right length. Never returned; and what was set aside for it is made good from the others."""
    shelf = one_mix.shelf
    shelf.save(a_state(1), 0)
    one_mix.proxies[0].faults = lambda seen: (
        "lies" if seen.method == "GET" and "/probe/" not in seen.object else None
    )
    store = shelf.open()
    assert same(store.load(JOB), a_state(1))
    assert store.health.set_aside
    one_mix.up()
    shelf.open().repair(JOB)
    assert {what for _, _, what in shelf.open().verify(JOB)} == {"good"}
    for bucket in one_mix.buckets:
        shelf.replicas, shelf.policy = [bucket], ReplicaPolicy(replicas=1)  # type: ignore[list-item]
        assert same(shelf.load(), a_state(1))


def damage_pack(bucket: BucketReplica, what: str) -> None:
    client = bucket._client
    [pack] = [o.path.removeprefix("packs/").removesuffix(".pack") for o in client.list("packs")]
    layout = bucket._reader.layout(pack)
    assert layout is not None
    path = bucket_pack.pack_path(pack)
    if what.startswith("part"):
        path = bucket_pack.part_path(layout.draft, layout.parts[0].offset)
    data = client.whole(path, 1 << 30) or b""
    client.delete(path)
    if what.endswith("flipped"):
        client.create(path, data[:50] + bytes([data[50] ^ 1]) + data[51:])
    elif what.endswith("truncated"):
        client.create(path, data[: len(data) // 2])
    elif what.endswith("emptied"):
        client.create(path, b"")


def test_a_damaged_pack_is_repaired(one_mix: Mixed) -> None:
    """C3, C4: every object a pack is made of, damaged in every way, on two replicas of three."""
    shelf = one_mix.shelf
    shelf.save(a_state(1), 0)
    for what in ("gone", "flipped", "truncated", "emptied"):
        damage_pack(one_mix.buckets[0], f"part {what}")
        damage_pack(one_mix.buckets[1], f"index {what}")
        assert [said for _, _, said in shelf.open().verify(JOB)].count("good") == 1, what
        assert same(shelf.load(), a_state(1)), what
        shelf.open().repair(JOB)
        assert {said for _, _, said in shelf.open().verify(JOB)} == {"good"}, what
    for pack in one_mix.folder.path.glob("packs/*"):
        pack.unlink()
    assert same(shelf.load(), a_state(1)), "from the buckets alone"


def test_with_no_good_copy_left(one_mix: Mixed) -> None:
    """C4: an error that names every replica, never a part of a state."""
    shelf = one_mix.shelf
    shelf.save(a_state(1), 0)
    for bucket in one_mix.buckets:
        damage_pack(bucket, "part gone")
    for pack in one_mix.folder.path.glob("packs/*"):
        pack.unlink()
    with pytest.raises(Damaged) as caught:
        shelf.load()
    assert all(r.name in caught.value.message for r in shelf.replicas)


def random_faults(seed: int, share: float) -> Callable[[Seen], str | None]:
    rng = random.Random(seed)

    def decide(_: Seen) -> str | None:
        kinds = ["500", "503", "reset", "lost", "truncated"]
        return rng.choice(kinds) if rng.random() < share else None

    return decide


def test_a_storm_of_faults(tmp_path: Path, object_stores: Servers) -> None:
    """C1, C6: a save either counts and loads, or raises and the head stays. Whatever was lost on the way."""
    patient = BucketTimeouts(request_seconds=2.0, patience_seconds=4.0, connect_seconds=1.0)
    one_mix = Mixed(tmp_path, object_stores, "gcs", patient)
    shelf = one_mix.shelf
    saved = 0
    state = a_state(0)
    for number in range(STORM):
        for n, proxy in enumerate(one_mix.proxies):
            proxy.faults = random_faults(100 * number + n, (0.0, 0.1, 0.25)[number % 3])
        before = shelf.version
        state = a_state(number) if number % 2 else {**state, "n": number}
        try:
            assert shelf.save(state, before).version == before + 1
            saved += 1
            wanted = state
        except QuorumNotReached:
            assert shelf.version == before
        for proxy in one_mix.proxies:
            proxy.faults = lambda _: None
        assert same(shelf.load(), wanted)
    assert saved >= STORM * 2 // 3
    shelf.open().repair(JOB)
    assert {what for _, _, what in shelf.open().verify(JOB)} == {"good"}
    one_mix.close()


def test_saved_behind_by_the_writer(
    tmp_path: Path, object_stores: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process opens the same buckets by their addresses, with what its environment says."""
    shelf = Shelf(tmp_path)
    stores = [object_stores["moto"], object_stores["azurite"]]
    for store in stores:
        for key, value in store.environment.items():
            monkeypatch.setenv(key, value)
    buckets = [store.open() for store in stores]
    shelf.replicas = [DirectoryReplica(tmp_path / "here", "here"), *buckets]  # type: ignore[list-item]
    for replica in shelf.replicas:
        replica.check()
    shelf.store = shelf.open()
    try:
        state = a_state(3)
        saving = shelf.store.save_behind(JOB, state, expected_version=0, lease=shelf.lease)
        state["w"] += 1
        assert saving.result(60).version == 1
        assert same(shelf.load(), a_state(3))
        assert {(name, what) for name, _, what in shelf.open().verify(JOB)} == {
            (r.name, "good") for r in shelf.replicas
        }
    finally:
        shelf.close()


def test_a_writer_that_cannot_open_a_bucket_says_why(
    tmp_path: Path, object_stores: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path)
    shelf.replicas = [
        DirectoryReplica(tmp_path / "a"),
        DirectoryReplica(tmp_path / "b"),
        object_stores["gcs"].open(),
    ]  # type: ignore[list-item]
    for replica in shelf.replicas:
        replica.check()
    shelf.store = shelf.open()
    try:
        monkeypatch.setattr("sublet.store.checkpoints.WORTH_A_PROCESS", 0)
        monkeypatch.setenv("SUBLET_BUCKET_PATIENCE", "soon")
        saving = shelf.store.save_behind(JOB, a_state(4), expected_version=0, lease=shelf.lease)
        with pytest.raises(NotDurable, match="SUBLET_BUCKET_PATIENCE"):
            saving.result(60)
        assert shelf.version == 0
        with pytest.raises(NotDurable):
            shelf.store.settle()
    finally:
        shelf.close()
