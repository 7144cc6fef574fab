"""Replicas in several regions: reads go to the nearest, a save counts when enough have it, the far one catches up (C1, C3, C4).

Three buckets on a real server, each behind a proxy of its own that makes it near or far. What must not be waited for is held back until
the test lets it go, so that nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.core.errors import Damaged, Unreached
from sublet.store.buckets.connection import BucketTimeouts
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.quorum import Replicas
from tests.store.rig import JOB, Shelf
from tests.store.servers import Proxy, Seen, Servers

PATIENT = BucketTimeouts(request_seconds=30.0, patience_seconds=30.0, connect_seconds=1.0)
NEAR, MIDDLE, FAR = 0, 1, 2
DOMAINS = ("us-east1", "us-west1", "eu-west4")


class Regions:
    def __init__(self, folder: Path, stores: Servers, **policy: Any) -> None:
        self._stack = ExitStack()
        self.proxies = [self._stack.enter_context(Proxy(stores["moto"])) for _ in DOMAINS]
        self.shelf = Shelf(folder)
        self.replicas = [p.open(domain=d, limits=PATIENT) for p, d in zip(self.proxies, DOMAINS, strict=True)]
        for replica in self.replicas:
            replica.check()
        self.policy = ReplicaPolicy(replicas=3, domains=DOMAINS, **policy)
        for number, seconds in ((MIDDLE, 0.15), (FAR, 0.4)):
            self.proxies[number].faults = lambda _, s=seconds: time.sleep(s)
        self.store = self.open()

    def open(self, here: str = "", only: int | None = None) -> CheckpointStore:
        """As another process would: nothing is measured yet."""
        replicas = self.replicas if only is None else [self.replicas[only]]
        policy = self.policy if only is None else ReplicaPolicy(replicas=1)
        ledger = self.shelf.rig.open()
        store = CheckpointStore(Replicas(replicas, policy, here=here), lambda: ledger)
        self._stack.callback(store.close)
        return store

    def save(self, seed: int, version: int, *, behind: bool = False) -> Any:
        return self.store.save(JOB, a_state(seed), expected_version=version, lease=self.shelf.lease)

    def reads(self, number: int) -> int:
        return sum(s.method == "GET" and "/packs/" in s.object for s in self.proxies[number].seen)

    def forget_requests(self) -> None:
        for proxy in self.proxies:
            proxy.seen.clear()

    def empty(self, number: int) -> None:
        client = self.replicas[number]._client
        for folder in ("packs", "parts", "manifests"):
            for found in list(client.list(folder)):
                client.delete(found.path)

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.faults = lambda _: None
        self.store.give_up()
        self._stack.close()
        self.shelf.close()


@pytest.fixture
def regions(tmp_path: Path, object_stores: Servers) -> Iterator[Regions]:
    made = Regions(tmp_path, object_stores)
    yield made
    made.close()


def a_state(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.integers(0, 256, 3 << 20, np.uint8),
        "v": rng.integers(0, 256, 2 << 20, np.uint8),
        "n": seed,
    }


def same(found: dict[str, Any], seed: int) -> bool:
    wanted = a_state(seed)
    return found["n"] == seed and all(np.array_equal(found[key], wanted[key]) for key in "wv")


def test_reads_go_to_the_nearest(regions: Regions) -> None:
    regions.save(1, 0)
    assert regions.store.catch_up()
    reader = regions.open()
    regions.forget_requests()
    assert same(reader.load(JOB), 1)
    assert regions.reads(NEAR) > 0
    assert (regions.reads(MIDDLE), regions.reads(FAR)) == (0, 0)
    order = reader._replicas.reading_order(1 << 20)
    assert order[0].name == regions.replicas[NEAR].name
    assert order[0].reason.startswith("measured")


def test_what_the_operator_says_comes_first(regions: Regions) -> None:
    regions.save(1, 0)
    assert regions.store.catch_up()
    regions.forget_requests()
    assert same(regions.open(here=DOMAINS[FAR]).load(JOB), 1)
    assert regions.reads(FAR) > 0
    assert regions.reads(NEAR) == 0


def test_a_save_returns_with_its_quorum_and_the_far_one_catches_up(regions: Regions) -> None:
    """C1, C6: while the far one is held back nothing waits for it; then it has everything, byte for byte."""
    gate = threading.Event()
    let_through: list[Seen] = []

    def held(seen: Seen) -> None:
        if seen.method == "PUT":
            gate.wait(25)
            let_through.append(seen)

    regions.proxies[FAR].faults = held
    far = regions.replicas[FAR].name
    first = regions.save(1, 0)
    assert not let_through, "it came back while the far one had nothing"
    second = regions.save(2, 1)
    assert first.account.late == second.account.late == (far,)
    assert set(second.account.seconds) == {regions.replicas[n].name for n in (NEAR, MIDDLE)}
    assert second.account.slowest is None
    assert 0 < max(second.account.seconds.values()) <= second.quorum_seconds + 0.001
    assert [b.replica for b in regions.store.behind()] == [far]
    gate.set()
    assert regions.store.catch_up(60), regions.store.behind()
    slowest = second.account.slowest
    assert slowest is not None
    assert slowest[0] == far
    assert slowest[1] > second.quorum_seconds
    assert same(regions.open(only=FAR).load(JOB), 2)
    assert {what for _, _, what in regions.open().verify(JOB)} == {"good"}, "older versions too"


def test_a_straggler_never_publishes_what_another_save_wrote_over(regions: Regions) -> None:
    """C2, C3: saves follow each other in the same memory while the far one still uploads the first of them."""

    def slowly(seen: Seen) -> None:
        time.sleep(seen.size / (4 << 20))

    regions.proxies[FAR].faults = slowly
    for version in range(4):
        regions.save(version, version)
    assert regions.store.catch_up(60), regions.store.behind()
    assert {what for _, _, what in regions.open().verify(JOB)} == {"good"}
    for version in range(1, 5):
        assert same(regions.open(only=FAR).load(JOB, version=version), version - 1)


@pytest.mark.parametrize("fault", ["503", "slow"])
def test_the_near_one_dies_and_comes_back_empty(regions: Regions, fault: str) -> None:
    """C4: reads fall over to the next; what comes back without its bytes is given them again."""
    regions.save(1, 0)
    assert regions.store.catch_up()
    reader = regions.open()
    assert same(reader.load(JOB), 1)  # so it is known to be the nearest
    regions.proxies[NEAR].faults = lambda _: fault
    regions.forget_requests()
    assert same(reader.load(JOB, version=1), 1)
    assert regions.reads(MIDDLE) + regions.reads(FAR) > 0
    regions.proxies[NEAR].faults = lambda _: None
    regions.empty(NEAR)
    again = regions.open()
    assert same(again.load(JOB), 1)
    again.repair(JOB)
    assert {what for _, _, what in regions.open().verify(JOB)} == {"good"}
    assert same(regions.open(only=NEAR).load(JOB), 1)


def test_unreached_is_not_lost(regions: Regions) -> None:
    """C4: an error that says what is known, and no more."""
    regions.save(1, 0)
    for proxy in regions.proxies:
        proxy.faults = lambda _: "403"
    with pytest.raises(Unreached, match="not reached") as told:
        regions.open().load(JOB)
    assert all(r.name in told.value.message for r in regions.replicas)
    for proxy in regions.proxies:
        proxy.faults = lambda _: None
    for number in range(3):
        regions.empty(number)
    with pytest.raises(Damaged, match="in good order") as lost:
        regions.open().load(JOB)
    assert not isinstance(lost.value, Unreached)
