"""A bucket that is asked to prove itself, one that fails, and one that loses answers: bounded in time, create-only, nothing told twice."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import pytest

from sublet.core.checkpoints.checkpoint import ByteSpan, ReplicaPolicy
from sublet.core.errors import Misconfigured, MissingExtra, NotDurable, SubletError
from sublet.store.buckets.connection import BucketTimeouts
from sublet.store.buckets.failure import BucketFailed
from sublet.store.replicas import bucket as bucket_module
from sublet.store.replicas import bucket_pack
from sublet.store.replicas.bucket import BucketReplica, open_bucket
from sublet.store.replicas.bucket_pack import HEADER, PARTS, WHOLE, PackLayout, read_layout
from sublet.store.replicas.opening import open_replica
from sublet.store.replicas.quorum import Replicas
from tests.store.servers import QUICK, SECRET, FakeGcs, Proxy, Seen, Servers
from tests.store.test_bucket_contract import A, B, get_pack, put_pack

PART = 64 << 10
#: Everything a bounded operation may take: its patience, one more attempt, and some for a busy machine.
BOUND_SECONDS = QUICK.patience_seconds + QUICK.request_seconds + 3


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_pack, "PART_BYTES", PART)
    monkeypatch.setattr(bucket_module, "CHECK_SECONDS", 0.5)


def data_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def on(what: str, fault: str, *, times: int = 1 << 30, method: str = "PUT") -> Callable[[Seen], str | None]:
    """The fault, for requests of that method whose path has `what` in it, that many times."""
    left = [times]
    lock = threading.Lock()

    def decide(seen: Seen) -> str | None:
        with lock:
            if seen.method == method and what in seen.object and left[0] > 0:
                left[0] -= 1
                return fault
        return None

    return decide


# --- proof ---------------------------------------------------------------------------------------------------


def test_a_server_that_ignores_preconditions_is_refused(object_stores: Servers) -> None:
    """C2: it says 200 to a second create. When it is opened, and again before anything is written."""
    with Proxy(object_stores["moto"], lambda _: "unconditional") as proxy:
        replica = proxy.open()
        for attempt in (
            replica.check,
            lambda: replica.begin_pack(10),
            lambda: replica.put_manifest(A, b"{}"),
        ):
            with pytest.raises(Misconfigured) as caught:
                attempt()
            said = caught.value.message
            assert replica.name in said
            assert "ignores the condition" in said
            assert "lost" in said
            assert "If-None-Match" in caught.value.remedy
        assert [s for s in proxy.seen if s.method == "PUT" and "/probe/" not in s.object] == []
    honest = object_stores["moto"].open(replica.name)
    assert list(honest._client.list("probe")) == [], "the probe is taken away"


def test_gcs_is_asked_for_generation_0_and_refused_if_it_ignores_it() -> None:
    """C2, by Google's documented header."""
    obeying, ignoring = FakeGcs(), FakeGcs(obeys=False)
    try:
        replica = obeying.server.open()
        replica.check()
        put_pack(replica, A, data_of(1, 3 * PART))
        replica.put_manifest(A, b"{}")
        assert len(obeying.conditions) >= 6
        assert set(obeying.conditions) == {"0"}
        with pytest.raises(NotDurable, match="exists"):
            replica.put_manifest(A, b"[]")
        with pytest.raises(Misconfigured, match="ignores the condition"):
            ignoring.server.open().check()
    finally:
        obeying.close()
        ignoring.close()


def test_a_server_that_does_not_return_what_was_written(object_stores: Servers) -> None:
    with (
        Proxy(object_stores["moto"], on("/probe/", "lies", method="GET")) as proxy,
        pytest.raises(Misconfigured, match="does not return"),
    ):
        proxy.open().check()


def test_the_proof_is_made_once_a_process(object_stores: Servers) -> None:
    with Proxy(object_stores["moto"]) as proxy:
        replica = proxy.open()
        replica.check()
        asked = len(proxy.seen)
        assert 4 <= asked <= 6
        replica.check()
        proxy.open(replica.name).check()
        assert len(proxy.seen) == asked
        put_pack(replica, A, b"x" * 100)
        assert [s.method for s in proxy.seen[asked:]] == ["PUT"], "one request for a small pack"


def test_a_bucket_that_is_not_there(object_stores: Servers) -> None:
    for kind in ("moto", "seaweed", "azurite"):
        server = object_stores[kind]
        replica = server.open(f"{server.scheme}://no-such-bucket-here/x")
        with pytest.raises(Misconfigured, match="cannot be a replica"):
            replica.check()
        with pytest.raises(NotDurable):
            replica.put_manifest(A, b"{}")
        assert replica.get_manifest(A) is None


def test_one_that_is_down_does_not_keep_a_store_from_opening(object_stores: Servers) -> None:
    """It may be the minority. It is proven before it is written to, though."""
    down = [True]
    with Proxy(object_stores["moto"], lambda _: "503" if down[0] else "unconditional") as proxy:
        replica = proxy.open(
            limits=BucketTimeouts(request_seconds=1.0, patience_seconds=1.0, connect_seconds=1.0)
        )
        replica.check()
        with pytest.raises(NotDurable, match="503"):
            replica.put_manifest(A, b"{}")
        down[0] = False
        time.sleep(1.1)
        with pytest.raises(Misconfigured, match="ignores the condition"):
            replica.put_manifest(A, b"{}")
        proxy.faults = lambda _: None
        replica.put_manifest(A, b"{}")


# --- failing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500", "503", "reset", "slow"])
def test_a_bucket_that_fails_is_given_up_in_bounded_time(object_stores: Servers, fault: str) -> None:
    """Writes are `NotDurable`, reads `OSError`; the next ones do not wait again; and it is used again when it is back."""
    with Proxy(object_stores["moto"]) as proxy:
        replica = proxy.open(
            limits=BucketTimeouts(request_seconds=0.8, patience_seconds=1.0, connect_seconds=1.0)
        )
        replica.check()
        put_pack(replica, A, data_of(1, 3 * PART))
        proxy.faults = lambda _: fault
        begun = time.monotonic()
        with pytest.raises(NotDurable) as caught:
            put_pack(replica, B, data_of(2, 20 * PART))
        assert replica.name in caught.value.message
        assert time.monotonic() - begun < 30
        begun = time.monotonic()
        for _ in range(50):
            with pytest.raises(OSError, match=r".") as failed:
                replica.get_manifest(A)
            assert failed.value.strerror
            with pytest.raises(NotDurable):
                replica.put_manifest(B, b"{}")
        assert time.monotonic() - begun < 30, (
            "100 requests to a bucket that is down wait for it once, not each"
        )
        proxy.faults = lambda _: None
        time.sleep(1.1)
        assert get_pack(replica, A, 3 * PART) == data_of(1, 3 * PART)
        put_pack(replica, B, data_of(2, 20 * PART))
        assert get_pack(replica, B, 20 * PART) == data_of(2, 20 * PART)


def test_one_that_was_away_for_long_is_asked_as_soon_as_somebody_waits_for_it(object_stores: Servers) -> None:
    """It is left alone longer each time; that is no reason to let a caller wait who wants to know now."""
    with Proxy(object_stores["moto"]) as proxy:
        replica = proxy.open()
        assert replica.get_manifest("a" * 64) is None
        for _ in range(12):
            replica._client._went_down("the server answered 503")
        with pytest.raises(OSError, match="a moment ago"):
            replica.get_manifest("a" * 64)
        replica.ask_again()
        assert replica.get_manifest("a" * 64) is None


def test_nobody_there() -> None:
    from tests.store.servers import Server, free_port

    replica = Server("s3", f"http://127.0.0.1:{free_port()}").open()
    begun = time.monotonic()
    replica.check()
    with pytest.raises(NotDurable, match="no connection"):
        replica.put_manifest(A, b"{}")
    with pytest.raises(OSError, match="no connection"):
        replica.has_pack(A)
    assert time.monotonic() - begun < bucket_module.CHECK_SECONDS + BOUND_SECONDS


@pytest.mark.parametrize("fault", ["500", "503", "reset", "lost"])
def test_a_request_that_failed_is_made_again(object_stores: Servers, fault: str) -> None:
    """C1, C2: 'lost' did happen, so the second create finds its name taken: by our own bytes, which is success."""
    faults = [on(what, fault, times=2) for what in ("/parts/", "/packs/", "/manifests/")]
    with Proxy(
        object_stores["moto"], lambda seen: next(filter(None, (f(seen) for f in faults)), None)
    ) as proxy:
        replica = proxy.open()
        data = data_of(3, 5 * PART + 7)
        put_pack(replica, A, data)
        put_pack(replica, B, data[:100])
        replica.put_manifest(A, data[:1000])
        direct = object_stores["moto"].open(replica.name)
        assert get_pack(direct, A, len(data)) == data
        assert get_pack(direct, B, 100) == data[:100]
        assert direct.get_manifest(A) == data[:1000]
        assert sorted((n, s) for n, _, s in direct.packs()) == [(A, len(data)), (B, 100)]


@pytest.mark.parametrize("kind", ["seaweed", "azurite", "gcs"])
def test_lost_answers_of_the_other_servers(object_stores: Servers, kind: str) -> None:
    with Proxy(object_stores[kind], on("", "lost", times=3)) as proxy:
        replica = proxy.open()
        data = data_of(4, 3 * PART)
        put_pack(replica, A, data)
        assert get_pack(object_stores[kind].open(replica.name), A, len(data)) == data


def test_a_lost_answer_is_not_believed_when_somebody_elses_bytes_are_there(object_stores: Servers) -> None:
    """C1: the connection breaks, and the name turns out to be taken by other bytes."""
    server = object_stores["moto"]
    url = server.url()
    put_pack(server.open(url), A, b"theirs" * 100)
    server.open(url).put_manifest(A, b"theirs")
    with Proxy(server, on("", "lost", times=0)) as proxy:
        replica = proxy.open(url)
        replica.check()
        for what, write in (
            ("/packs/", lambda: put_pack(replica, A, b"ours!!" * 100)),
            ("/manifests/", lambda: replica.put_manifest(A, b"ours!!")),
        ):
            proxy.faults = on(what, "lost", times=1)
            with pytest.raises(NotDurable, match="exists already with other bytes"):
                write()
    assert get_pack(server.open(url), A, 600) == b"theirs" * 100
    assert server.open(url).get_manifest(A) == b"theirs"


def test_parts_of_a_pack_whose_publication_is_unknown_stay(object_stores: Servers) -> None:
    """C4: the last request was done, its answer lost, and the next ones refused. It is not reported as saved; whoever finds it, finds it whole."""
    server = object_stores["moto"]
    data = data_of(5, 4 * PART)
    with Proxy(server) as proxy:
        replica = proxy.open(limits=BucketTimeouts(request_seconds=1, patience_seconds=1, connect_seconds=1))
        replica.check()
        done = on("/packs/", "lost", times=1)
        proxy.faults = lambda seen: done(seen) or ("403" if "/packs/" in seen.object else None)
        with pytest.raises(NotDurable):
            put_pack(replica, A, data)
    direct = server.open(replica.name)
    assert get_pack(direct, A, len(data)) == data
    put_pack(direct, A, data)


def test_truncated_answers(object_stores: Servers) -> None:
    with Proxy(object_stores["moto"]) as proxy:
        replica = proxy.open(limits=BucketTimeouts(request_seconds=1, patience_seconds=1, connect_seconds=1))
        replica.check()
        data = data_of(6, 3 * PART)
        put_pack(replica, A, data)
        replica.put_manifest(A, data[:1000])
        for what in ("/packs/", "/parts/", "/manifests/"):
            fresh = proxy.open(replica.name, limits=replica._client.limits)
            proxy.faults = on(what, "truncated", times=2, method="GET")
            assert get_pack(fresh, A, len(data)) == data
            assert fresh.get_manifest(A) == data[:1000]
        proxy.faults = lambda seen: "truncated" if seen.method == "GET" else None
        with pytest.raises(OSError, match="connection broke"):
            proxy.open(replica.name, limits=replica._client.limits).get_manifest(A)
        with pytest.raises(OSError, match="connection broke"):
            get_pack(proxy.open(replica.name, limits=replica._client.limits), A, len(data))


def test_a_slow_part_fails_the_pack_and_takes_the_others_away(object_stores: Servers) -> None:
    server = object_stores["moto"]
    with Proxy(server) as proxy:
        replica = proxy.open(
            limits=BucketTimeouts(request_seconds=0.7, patience_seconds=0.7, connect_seconds=1)
        )
        replica.check()
        proxy.faults = on(f"{3 * PART:020d}", "slow")
        with pytest.raises(NotDurable, match="no answer in time"):
            put_pack(replica, A, data_of(7, 12 * PART), piece=PART)
        proxy.faults = lambda _: None
    direct = server.open(replica.name)
    assert not direct.has_pack(A)
    left = {n: s for n, _, s in direct.packs()}
    assert A not in left
    for draft in left:  # what could not be deleted while it was down is a sweep's to find
        direct.remove("pack", draft)
    assert list(direct.packs()) == []
    assert list(direct._client.list("parts")) == []


@pytest.mark.parametrize("which", [0, 3, 11])
def test_a_part_that_is_refused_fails_the_pack(object_stores: Servers, which: int) -> None:
    """C1: alone among the others, and with the bucket answering well before and after."""
    with Proxy(object_stores["moto"]) as proxy:
        replica = proxy.open()
        replica.check()
        proxy.faults = on(f"{which * PART:020d}", "403")
        with pytest.raises(NotDurable, match="403"):
            put_pack(replica, A, data_of(7, 12 * PART), piece=PART)
        assert not replica.has_pack(A)
        proxy.faults = lambda _: None
        put_pack(replica, A, data_of(7, 12 * PART), piece=PART)
        assert get_pack(replica, A, 12 * PART) == data_of(7, 12 * PART)


# --- packs in parts ------------------------------------------------------------------------------------------


def test_memory_is_bounded_in_any_order(object_stores: Servers) -> None:
    rng = random.Random(8)
    places = list(range(0, 200 * 16384, 16384))
    for order in (rng.sample(places, len(places)), places[::-1]):
        replica = object_stores["moto"].open()
        replica.check()
        piece = memoryview(bytes(16384))
        draft = replica.begin_pack(len(places) * 16384)
        tracemalloc.start()
        try:
            for at in order:
                draft.write(at, piece)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        draft.publish(A, [ByteSpan(at, 16384) for at in places])
        # Open runs, one on its way, uploads under way: each joined from its pieces, and what the interpreter keeps of it all.
        assert peak < (2 + 1 + 2 * bucket_pack.UPLOADS) * PART + (1 << 20), peak
        assert get_pack(replica, A, len(places) * 16384) == bytes(len(places) * 16384)


def test_uploads_begin_while_writes_come_in(object_stores: Servers) -> None:
    with Proxy(object_stores["moto"]) as proxy:
        replica = proxy.open()
        draft = replica.begin_pack(10 * PART)
        for at in range(0, 8 * PART, PART // 2):
            draft.write(at, memoryview(bytes(PART // 2)))
        give_up = time.monotonic() + 10
        while sum("/parts/" in s.object for s in proxy.seen) < 6 and time.monotonic() < give_up:
            time.sleep(0.02)
        assert sum("/parts/" in s.object for s in proxy.seen) >= 6
        assert all(s.size <= PART for s in proxy.seen)
        assert not any("/packs/" in s.object for s in proxy.seen)
        draft.discard()


def test_a_pack_with_a_hole_or_written_twice_is_not_published(object_stores: Servers) -> None:
    replica = object_stores["moto"].open()
    whole = [n * PART for n in range(4)]
    for places in (whole[:1] + whole[2:], whole[:3], [*whole, PART], [*whole, PART + 4096], [4096, *whole]):
        draft = replica.begin_pack(4 * PART)
        for number, at in enumerate(places):
            with suppress(NotDurable):  # said early, or at the end
                draft.write(at, memoryview(bytes([number]) * PART))
        with pytest.raises(
            NotDurable, match=r"not written whole, or written twice|exists already with other bytes"
        ):
            draft.publish(A, [ByteSpan(at, PART) for at in range(0, 4 * PART, PART)])
    assert not replica.has_pack(A)


def test_what_a_killed_saver_left_is_listed_and_removed(object_stores: Servers) -> None:
    """C5: under the name of its draft, with the age of its youngest part, and never what a pack refers to."""
    replica = object_stores["moto"].open()
    put_pack(replica, A, data_of(9, 3 * PART))
    draft = replica.begin_pack(10 * PART)
    for at in range(0, 6 * PART, PART):
        draft.write(at, memoryview(bytes(PART)))
    give_up = time.monotonic() + 10
    while len(draft._there) < 3 and time.monotonic() < give_up:
        time.sleep(0.02)
    draft._keep = True  # as if killed: nobody takes the parts back
    draft.discard()
    time.sleep(0.3)
    found = {name: (age, size) for name, age, size in replica.packs()}
    assert set(found) == {A, draft._id}
    assert found[A][1] == 3 * PART
    assert -2 < found[draft._id][0] < 30
    assert found[draft._id][1] >= 3 * PART
    assert not replica.has_pack(draft._id)
    replica.remove("pack", draft._id)
    assert [n for n, _, _ in replica.packs()] == [A]
    assert get_pack(replica, A, 3 * PART) == data_of(9, 3 * PART)
    replica.remove("pack", A)
    assert list(replica._client.list("parts")) == []


def test_ages_are_by_the_servers_clock() -> None:
    gcs = FakeGcs(ahead_seconds=7200)
    try:
        replica = gcs.server.open()
        put_pack(replica, A, b"x")
        replica.put_manifest(A, b"x")
        assert all(-5 < age < 60 for _, age, _ in replica.packs())
        assert all(-5 < age < 60 for _, age in replica.manifests())
    finally:
        gcs.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        PARTS,
        PARTS + b"{}",
        PARTS + b"[" * 100_000,
        PARTS + b'{"draft":"../../x","parts":[],"size":0}',
        PARTS + b'{"draft":"%s","parts":[[0,5],[3,5]],"size":8}' % (b"a" * 64),
        PARTS + b'{"draft":"%s","parts":[[0,-5]],"size":8}' % (b"a" * 64),
        PARTS + b'{"draft":"%s","parts":[[0,1e3]],"size":8}' % (b"a" * 64),
        PARTS + b'{"draft":"%s","parts":[[0,9]],"size":99999999999999999999}' % (b"a" * 64),
        PARTS + b'{"draft":"%s","parts":5,"size":9}' % (b"a" * 64),
    ],
)
def test_an_index_that_is_not_ours(object_stores: Servers, data: bytes) -> None:
    """C7: it is there, nothing can be read of it, and it can be set aside."""
    assert read_layout(data, len(data)) is None
    replica = object_stores["moto"].open()
    assert replica._client.create(bucket_pack.pack_path(A), data)
    assert replica.has_pack(A)
    assert get_pack(replica, A, 1) is None
    with pytest.raises(NotDurable, match="exists"):
        put_pack(replica, A, b"good" * 2000)
    replica.set_aside("pack", A)
    put_pack(replica, A, b"good" * 2000)
    assert get_pack(replica, A, 8000) == b"good" * 2000
    assert [o.size for o in replica._client.list("aside")] == [len(data)]


def test_where_bytes_lie() -> None:
    assert PackLayout(10).where(2, 5) == [("", HEADER + 2, 5)]
    assert PackLayout(10).where(6, 5) is None
    layout = PackLayout(30, "d" * 64, (ByteSpan(0, 10), ByteSpan(10, 10), ByteSpan(24, 16)))
    assert read_layout(layout.index(), 0) == layout
    assert [p[1:] for p in layout.where(5, 10) or []] == [(5, 5), (0, 5)]
    assert layout.where(15, 6) is None, "a hole"
    assert layout.where(25, 6) is None, "beyond its size, though the part goes on"
    assert [p[1:] for p in layout.where(25, 5) or []] == [(1, 5)]
    assert read_layout(WHOLE + b"abc", HEADER + 3) == PackLayout(3)


# --- what is said --------------------------------------------------------------------------------------------


def test_no_secret_is_ever_said(object_stores: Servers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    sas = "sv=2021-08-06&ss=b&sig=CANARYSIGNATURE&se=2030-01-01"
    said = []
    with (
        Proxy(object_stores["moto"], lambda _: "500") as proxy,
        Proxy(object_stores["moto"], lambda _: "403") as no,
    ):
        azure = Proxy(object_stores["azurite"], lambda _: "500")
        with azure, pytest.MonkeyPatch.context() as patch:
            patch.setenv("AZURE_STORAGE_SAS_KEY", sas)
            limits = BucketTimeouts(request_seconds=1, patience_seconds=0.3, connect_seconds=1)
            for replica in (proxy.open(limits=limits), no.open(limits=limits), azure.open(limits=limits)):
                for call in (
                    replica.check,
                    lambda r=replica: r.put_manifest(A, b"{}"),
                    lambda r=replica: r.get_manifest(A),
                    lambda r=replica: list(r.packs()),
                    lambda r=replica: r.set_aside("pack", A),
                ):
                    try:
                        call()
                    except (SubletError, OSError) as e:
                        said += [*traceback.format_exception(e), repr(e), getattr(e, "remedy", "")]
                said += [replica.name, replica.domain, repr(replica)]
    assert len(said) > 30
    text = "\n".join([*said, caplog.text])
    for secret in (SECRET, "AKIATEST", "CANARYSIGNATURE", "Signature", "http://", "sig="):
        assert secret not in text


@pytest.mark.parametrize(
    "address",
    ["s3://AKIA:CANARY@bucket/x", "s3://AKIA:CANARY", "s3://bucket/x?secret=CANARY", "s3:CANARY", "s3://", "s3:///x",
     "az://CANARY key/x", "gs://bucket/../CANARY", "s3://bucket/a//CANARY", "s3://bucket/CANARY\n"],
)  # fmt: skip
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        open_bucket(address, "")
    assert "CANARY" not in caught.value.message + caught.value.remedy


def test_names_and_domains(object_stores: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in object_stores["moto"].environment.items():
        monkeypatch.setenv(key, value)
    host = object_stores["moto"].address.removeprefix("http://")
    replica = open_replica("s3://checkpoints/team/a/")
    assert isinstance(replica, BucketReplica)
    assert (replica.name, replica.domain) == ("s3://checkpoints/team/a", f"s3 bucket checkpoints at {host}")
    assert open_replica("s3://checkpoints/team/a@rack7").domain == "rack7"
    assert open_replica(f"{replica.name}@writer").name == replica.name
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:CANARY@{host}")
    assert "CANARY" not in open_replica("s3://checkpoints").domain
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert open_replica("s3://checkpoints").domain == "s3 bucket checkpoints"
    with pytest.raises(Misconfigured, match="1 failure domains"):
        Replicas(
            [open_replica("s3://checkpoints/a"), open_replica("s3://checkpoints/b")],
            ReplicaPolicy(replicas=2),
        )


def test_limits_from_the_environment(object_stores: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in object_stores["moto"].environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("SUBLET_BUCKET_TIMEOUT", "7")
    monkeypatch.setenv("SUBLET_BUCKET_PATIENCE", "11.5")
    found = open_bucket("s3://checkpoints", "")._client.limits
    assert (found.request_seconds, found.patience_seconds) == (7, 11.5)
    for wrong in ("soon", "0", "-1", "nan", "1e9"):
        monkeypatch.setenv("SUBLET_BUCKET_PATIENCE", wrong)
        with pytest.raises(Misconfigured, match="SUBLET_BUCKET_PATIENCE"):
            open_bucket("s3://checkpoints", "")


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra) as caught:
        open_bucket("s3://checkpoints/x", "")
    assert "pip install 'sublet[bucket]'" in caught.value.remedy


def test_http_has_to_be_allowed(object_stores: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in object_stores["moto"].environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "false")
    with pytest.raises(Misconfigured, match="ALLOW_HTTP"):
        open_bucket("s3://checkpoints/x", "", QUICK).check()


def test_a_forked_process_is_told_and_does_not_hang(object_stores: Servers) -> None:
    """The client's threads stay in the parent. A process started anew is another matter: see the writer's tests."""
    replica = object_stores["moto"].open()
    replica.put_manifest(A, b"{}")
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"?"
        try:
            replica.get_manifest(A)
            said = b"read"
        except BucketFailed as e:
            said = str(e).encode()
        finally:
            os.write(theirs, said)
            os._exit(0)
    os.close(theirs)
    try:
        begun = time.monotonic()
        with os.fdopen(ours, "rb") as pipe:
            said = pipe.read()
        assert b"forked" in said
        assert time.monotonic() - begun < 30
    finally:
        os.waitpid(child, 0)
    assert replica.get_manifest(A) == b"{}"


def test_packs_are_asked_for_side_by_side(object_stores: Servers) -> None:
    """C1: a state may lie in many packs; each is a round trip."""

    def slowly(seen: Seen) -> None:
        if seen.method == "HEAD":
            time.sleep(0.5)

    with Proxy(object_stores["moto"], slowly) as proxy:
        buckets = [proxy.open(domain=f"d{n}") for n in range(2)]
        names = [f"{n:064x}" for n in range(40)]
        for n in names[:8]:
            put_pack(buckets[0], n, b"x")
            put_pack(buckets[1], n, b"x")
        put_pack(buckets[0], names[9], b"x")
        replicas = Replicas(buckets, ReplicaPolicy(replicas=2))
        begun = time.monotonic()
        assert replicas.kept(names) == set(names[:8])
        assert time.monotonic() - begun < 0.5 * 80 * 0.5
