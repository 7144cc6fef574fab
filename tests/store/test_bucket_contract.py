"""What every replica must do (ports/store.py), asked of folders and of each kind of bucket."""

from __future__ import annotations

import random
import secrets
import threading
import time
from pathlib import Path

import pytest

from sublet.core.checkpoints.checkpoint import ALIGN, MAX_MANIFEST_BYTES, ByteSpan
from sublet.core.errors import NotDurable
from sublet.ports.store import Replica
from sublet.store.buckets.connection import BucketTimeouts
from sublet.store.replicas import bucket_pack
from sublet.store.replicas.bucket import BucketReplica
from sublet.store.replicas.directory import DirectoryReplica
from tests.store.replicas.test_directory import blocks
from tests.store.servers import Servers

A, B = "a" * 64, "b" * 64
KINDS = ("dir", "moto", "seaweed", "azurite", "gcs")


@pytest.fixture(params=KINDS)
def replica(request: pytest.FixtureRequest, object_stores: Servers, tmp_path: Path) -> Replica:
    folder = request.param == "dir"
    # Nothing is wrong with these servers: on a crowded machine an answer takes as long as it takes.
    patient = BucketTimeouts(request_seconds=30.0, patience_seconds=60.0, connect_seconds=10.0)
    made: Replica = (
        DirectoryReplica(tmp_path / "r") if folder else object_stores[request.param].open(limits=patient)
    )
    made.check()
    return made


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(bucket_pack, "PART_BYTES", 64 << 10)
    return 64 << 10


def put_pack(replica: Replica, name: str, data: bytes, piece: int = 32 << 10) -> None:
    """As a save does: piece by piece, whole blocks."""
    draft = replica.begin_pack(len(data))
    try:
        for at in range(0, len(data), piece):
            draft.write(at, blocks(data[at : at + piece]))
        draft.publish(name, [ByteSpan(at, min(piece, len(data) - at)) for at in range(0, len(data), piece)])
    finally:
        draft.discard()


def get_pack(replica: Replica, name: str, size: int, at: int = 0) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if replica.read_pack(name, at, memoryview(into)) else None


def test_what_was_put_is_there(replica: Replica) -> None:
    data = random.Random(1).randbytes(10_001)
    put_pack(replica, A, data)
    assert get_pack(replica, A, 10_001) == data
    assert get_pack(replica, A, 100, at=4096) == data[4096:4196]
    assert get_pack(replica, A, 10_002) is None, "a part that is not there"
    assert get_pack(replica, A, 1, at=10_001) is None
    assert get_pack(replica, B, 1) is None
    assert (replica.has_pack(A), replica.has_pack(B)) == (True, False)
    replica.put_manifest(B, b"{}")
    assert replica.get_manifest(B) == b"{}"
    assert replica.get_manifest(A) is None
    assert [(name, size) for name, _, size in replica.packs()] == [(A, 10_001)]
    assert [name for name, _ in replica.manifests()] == [B]
    assert all(-5 < age < 60 for _, age, _ in replica.packs())
    assert all(-5 < age < 60 for _, age in replica.manifests())


def test_an_empty_pack_and_an_empty_manifest(replica: Replica) -> None:
    put_pack(replica, A, b"")
    replica.put_manifest(A, b"")
    assert (replica.has_pack(A), get_pack(replica, A, 0), get_pack(replica, A, 1)) == (True, b"", None)
    assert replica.get_manifest(A) == b""
    assert [(name, size) for name, _, size in replica.packs()] == [(A, 0)]


def test_bytes_under_a_name_never_change(replica: Replica) -> None:
    """C2: the same again is fine; something else is refused, longer and shorter too."""
    put_pack(replica, A, b"x" * 5000)
    replica.put_manifest(A, b"first")
    put_pack(replica, A, b"x" * 5000)
    replica.put_manifest(A, b"first")
    for data in (b"y" * 5000, b"x" * 4999, b"x" * 5001, b""):
        with pytest.raises(NotDurable, match="exists"):
            put_pack(replica, A, data)
    for data in (b"secon", b"fir", b"first ", b""):
        with pytest.raises(NotDurable, match="exists"):
            replica.put_manifest(A, data)
    assert get_pack(replica, A, 5000) == b"x" * 5000
    assert replica.get_manifest(A) == b"first"
    assert [(name, size) for name, _, size in replica.packs()] == [(A, 5000)]


def test_large_packs_are_create_only_too(replica: Replica, small_parts: int) -> None:
    """C2, C1: a pack in many parts. One byte that differs is other content; so is what is only longer."""
    rng = random.Random(2)
    data = rng.randbytes(5 * small_parts + 1234)
    put_pack(replica, A, data)
    for at, size in [
        (0, len(data)),
        (small_parts - 10, 20),
        (small_parts // 2, 3 * small_parts),
        (len(data) - 1, 1),
    ]:
        assert get_pack(replica, A, size, at) == data[at : at + size]
    assert get_pack(replica, A, 1, len(data)) is None
    assert get_pack(replica, A, 2, len(data) - 1) is None
    put_pack(replica, A, data)
    put_pack(replica, A, data, piece=len(data))  # as a repair writes it: in one piece
    for at in (0, 3 * small_parts, len(data) - 1):
        other = bytearray(data)
        other[at] ^= 1
        with pytest.raises(NotDurable, match="exists"):
            put_pack(replica, A, bytes(other))
    with pytest.raises(NotDurable, match="exists"):
        put_pack(replica, A, data + b"!")
    with pytest.raises(NotDurable, match="exists"):
        put_pack(replica, A, data[:small_parts])
    assert get_pack(replica, A, len(data)) == data
    assert [(name, size) for name, _, size in replica.packs()] == [(A, len(data))], (
        "nothing is left of the others"
    )


def test_writes_in_any_order_from_several_threads(replica: Replica, small_parts: int) -> None:
    rng = random.Random(3)
    data = rng.randbytes(40 * 8192 - 77)
    places = list(range(0, len(data), 8192))
    rng.shuffle(places)
    draft = replica.begin_pack(len(data))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        buffer = (
            memoryview(bytearray(8192)) if not isinstance(replica, DirectoryReplica) else blocks(bytes(8192))
        )
        try:
            for at in places[number::4]:
                piece = data[at : at + 8192]
                buffer[: len(piece)] = piece
                draft.write(at, buffer)  # and reused at once: whoever needs it later has to copy it
                buffer[:] = b"\xee" * 8192
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    draft.publish(A, [ByteSpan(at, min(8192, len(data) - at)) for at in sorted(places)])
    assert get_pack(replica, A, len(data)) == data


def test_readers_and_writers_share_a_replica(replica: Replica, small_parts: int) -> None:
    contents = {secrets.token_hex(32): random.Random(n).randbytes(n * 40_000 + 1) for n in range(6)}
    wrong: list[str] = []

    def work(name: str, data: bytes) -> None:
        try:
            put_pack(replica, name, data)
            replica.put_manifest(name, data[:100])
            for other, wanted in contents.items():
                got = get_pack(replica, other, len(wanted))
                if got is not None and got != wanted:
                    wrong.append(other)
            if get_pack(replica, name, len(data)) != data or replica.get_manifest(name) != data[:100]:
                wrong.append(name)
        except BaseException as e:
            wrong.append(repr(e))

    threads = [threading.Thread(target=work, args=item) for item in contents.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert {(n, s) for n, _, s in replica.packs()} == {(n, len(d)) for n, d in contents.items()}


def test_racing_for_one_name(replica: Replica, small_parts: int) -> None:
    """C2: different content under one name is the first one's, whole, and the others are told."""
    for size in (9000, 3 * small_parts):
        name = secrets.token_hex(32)
        told: list[str] = []

        def work(fill: int, name: str = name, size: int = size, told: list[str] = told) -> None:
            try:
                put_pack(replica, name, bytes([fill]) * size)
                told.append(f"{fill} done")
            except NotDurable:
                told.append("refused")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [t for t in told if t != "refused"]
        assert len(won) == 1, told
        assert get_pack(replica, name, size) == bytes([int(won[0].split()[0])]) * size


def test_set_aside_and_removed(replica: Replica, small_parts: int) -> None:
    for size in (5000, 3 * small_parts):
        name = secrets.token_hex(32)
        put_pack(replica, name, b"x" * size)
        assert get_pack(replica, name, size) == b"x" * size
        replica.set_aside("pack", name)
        assert (get_pack(replica, name, 10), replica.has_pack(name)) == (None, False)
        put_pack(replica, name, b"y" * size)
        assert get_pack(replica, name, size) == b"y" * size, (
            "the name is free again, and nothing old is remembered"
        )
        replica.remove("pack", name)
        assert (get_pack(replica, name, 10), replica.has_pack(name)) == (None, False)
        replica.remove("pack", name)
        replica.set_aside("pack", name)
    replica.put_manifest(A, b"one")
    replica.set_aside("manifest", A)
    assert replica.get_manifest(A) is None
    replica.put_manifest(A, b"two")
    replica.remove("manifest", A)
    assert replica.get_manifest(A) is None
    replica.remove("manifest", A)
    replica.set_aside("manifest", A)


def test_a_manifest_is_never_read_beyond_its_limit(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7."""
    assert MAX_MANIFEST_BYTES > 5000
    for module in ("sublet.store.replicas.bucket", "sublet.store.replicas.directory"):
        monkeypatch.setattr(f"{module}.MAX_MANIFEST_BYTES", 5000)
    replica.put_manifest(A, b"x" * 5000)
    replica.put_manifest(B, b"x" * 50_000)
    assert len(replica.get_manifest(A) or b"") == 5000
    assert len(replica.get_manifest(B) or b"") == 5001


def test_a_discarded_pack_is_nothing(replica: Replica, small_parts: int) -> None:
    """What of it has arrived by then is taken away, and what arrives later too."""
    for pause in (0.0, 0.5):
        draft = replica.begin_pack(5 * small_parts)
        for n in range(8):
            draft.write(n * 32768, blocks(b"z" * 32768))
        time.sleep(pause)
        draft.discard()
        draft.discard()
        give_up = time.monotonic() + 10
        while (left := list(replica.packs())) and time.monotonic() < give_up:
            time.sleep(0.05)
        assert left == []


def test_another_opening_sees_the_same(object_stores: Servers, small_parts: int) -> None:
    server = object_stores["moto"]
    url = server.url()
    one, other = server.open(url), server.open(url)
    assert isinstance(one, BucketReplica)
    data = random.Random(5).randbytes(4 * small_parts)
    put_pack(one, A, data)
    assert get_pack(other, A, len(data)) == get_pack(one, A, len(data)) == data
    other.remove("pack", A)
    put_pack(other, A, data[: 2 * small_parts + ALIGN])
    assert get_pack(one, A, 2 * small_parts) == data[: 2 * small_parts], (
        "parts that are gone are looked for anew"
    )
    assert get_pack(one, A, 3 * small_parts) is None
