"""Layout, manifest and replica policy: what is cut where, what is believed of what was read (C7), and who must agree (C1)."""

from __future__ import annotations

import copy
import json
import random
import time
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.checkpoints import checkpoint
from sublet.core.checkpoints.checkpoint import (
    ALIGN,
    CHUNK_BYTES,
    GROUP_BYTES,
    MAX_STATE_BYTES,
    ByteSpan,
    ChunkEntry,
    Manifest,
    ReplicaPolicy,
    TensorEntry,
    lay_out,
    manifest_bytes,
    missing_for_quorum,
    read_manifest,
)
from sublet.core.errors import BadInput, Damaged, Unsavable
from tests.conftest import MORE_EXAMPLES

# --- layout --------------------------------------------------------------------------------------------------

SIZES = st.lists(
    st.one_of(
        st.integers(0, 200),
        st.integers(GROUP_BYTES - 2, GROUP_BYTES + 2),
        st.integers(0, 3 * CHUNK_BYTES),
        st.sampled_from([0, 1, ALIGN, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1]),
    ),
    max_size=40,
)


@settings(max_examples=100 * MORE_EXAMPLES, deadline=None)
@given(SIZES)
def test_every_byte_lies_in_one_chunk(sizes: list[int]) -> None:
    """No two storages or chunks overlap, everything is aligned, and every storage is covered (C4)."""
    layout = lay_out(sizes)
    assert [s.size for s in layout.storages] == sizes
    end = 0
    for span in sorted((s for s in layout.storages if s.size), key=lambda s: s.offset):
        assert span.offset >= end
        assert span.offset % (ALIGN if span.size >= GROUP_BYTES else 64) == 0
        end = span.end
    end = 0
    for chunk in layout.chunks:
        assert end <= chunk.offset < end + ALIGN
        assert chunk.offset % ALIGN == 0
        assert 0 < chunk.size <= CHUNK_BYTES
        end = chunk.end
    assert layout.size % ALIGN == 0
    assert end <= layout.size < end + ALIGN
    for span in layout.storages:
        inside = (
            [c for c in layout.chunks if c.offset < span.end and span.offset < c.end] if span.size else []
        )
        assert sum(min(c.end, span.end) - max(c.offset, span.offset) for c in inside) == span.size


@settings(max_examples=100 * MORE_EXAMPLES, deadline=None)
@given(SIZES)
def test_a_large_storage_has_its_chunks_for_itself(sizes: list[int]) -> None:
    """A change of one tensor touches its own chunks only: unaligned ones cost 3.5 times the bytes."""
    layout = lay_out(sizes)
    for number, span in enumerate(layout.storages):
        others = [s for i, s in enumerate(layout.storages) if i != number and s.size]
        for chunk in layout.chunks:
            if span.size >= GROUP_BYTES and chunk.offset < span.end and span.offset < chunk.end:
                assert span.offset <= chunk.offset
                assert chunk.end <= span.end
                assert not any(s.offset < chunk.end and chunk.offset < s.end for s in others)
    for chunk in layout.chunks:
        small = [
            s for s in layout.storages if 0 < s.size < GROUP_BYTES and chunk.offset <= s.offset < chunk.end
        ]
        if small:
            assert chunk.size <= GROUP_BYTES + 64, "a group of small storages stays small"


@given(SIZES)
@settings(max_examples=30 * MORE_EXAMPLES, deadline=None)
def test_the_same_sizes_give_the_same_layout(sizes: list[int]) -> None:
    assert lay_out(sizes) == lay_out(tuple(sizes))


def test_small_storages_share_a_chunk() -> None:
    layout = lay_out([100] * 1000)
    assert len(layout.chunks) == 1
    layout = lay_out([GROUP_BYTES // 2] * 6)
    assert len(layout.chunks) == 3


# --- manifest ------------------------------------------------------------------------------------------------


def hexed(number: int) -> str:
    return f"{number:064x}"


def a_manifest(**over: Any) -> Manifest:
    sizes = [100, 3 * GROUP_BYTES, 0, CHUNK_BYTES + 5000, 64]
    layout = lay_out(sizes)
    values: dict[str, Any] = {
        "name": "team/job",
        "version": 3,
        "step": 7,
        "schema": "v1",
        "policy": hexed(5),
        "parent": hexed(6),
        "epoch": 9,
        "attempt": "a1",
        "tree": {"a": {"$tensor": 0}, "b": [{"$tensor": 1}, {"$bytes": 4}], "c": {"$dict": [[1, None]]}},
        "tensors": (
            TensorEntry(
                framework="torch",
                dtype="float32",
                shape=(5, 5),
                stride=(5, 1),
                offset=0,
                storage=0,
                grad=True,
            ),
            TensorEntry(framework="numpy", dtype="<f8", shape=(3 << 17,), stride=None, offset=0, storage=1),
        ),
        "storages": layout.storages,
        "chunks": tuple(
            ChunkEntry(s, hexed(100 + i), hexed(50 + i % 2), 4096 * i) for i, s in enumerate(layout.chunks)
        ),
        "size": layout.size,
    }
    return Manifest(**{**values, **over})


def test_a_manifest_reads_back_equal() -> None:
    manifest = a_manifest()
    assert read_manifest(manifest.to_bytes()) == manifest
    assert manifest.packs == (hexed(50), hexed(51))
    empty = a_manifest(tensors=(), storages=(), chunks=(), size=0, tree=None, parent="")
    assert read_manifest(manifest_bytes(empty)) == empty


EVIL: list[Any] = [
    -1, -(2**63), 2**31, 2**63, 2**64, 2**1000, 1.5, 1e308, True, False, None, "", "x", "0" * 64, "f" * 65, [], {},
    [[]], [-1], [1] * 70, {"$tensor": -1}, [None] * 7, "../../etc/passwd", MAX_STATE_BYTES, MAX_STATE_BYTES + 1,
]  # fmt: skip


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += spots(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(len(value)):
            found += spots(value[i], (*path, i))
    return found


def mutate(body: Any, rng: random.Random) -> Any:
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(spots(body))
        holder = body
        for part in path[:-1]:
            holder = holder[part]
        last = path[-1]
        match rng.randrange(5):
            case 0 | 1:
                holder[last] = copy.deepcopy(rng.choice(EVIL))
            case 2:
                del holder[last]
            case 3 if isinstance(holder, list):
                holder.insert(last, copy.deepcopy(rng.choice(holder)))
            case _:
                if type(holder[last]) is int:
                    holder[last] += rng.choice([-1, 1, 64, -64, ALIGN, CHUNK_BYTES])
    return body


def check_sane(manifest: Manifest) -> None:
    """Whatever is believed lies inside what it claims to lie in, and claims no more than its chunks hold."""
    assert (
        0 <= manifest.size <= sum(c.span.size for c in manifest.chunks) + ALIGN * (len(manifest.chunks) + 1)
    )
    covered = [(c.span.offset, c.span.end) for c in manifest.chunks]
    assert covered == sorted(covered)
    assert all(a[1] <= b[0] for a, b in pairwise(covered))
    for chunk in manifest.chunks:
        assert chunk.span.end <= manifest.size
        assert len(chunk.pack) == len(chunk.digest) == 64
        int(chunk.pack, 16), int(chunk.digest, 16)
    end = 0
    for span in sorted((s for s in manifest.storages if s.size), key=lambda s: s.offset):
        assert span.offset >= end, "storages overlap"
        end = span.end
        held = sum(max(0, min(b, span.end) - max(a, span.offset)) for a, b in covered)
        assert held == span.size, "a storage no chunk holds"
    for tensor in manifest.tensors:
        assert 0 <= tensor.storage < len(manifest.storages)
        assert all(n >= 0 for n in (*tensor.shape, tensor.offset, *(tensor.stride or ())))
    assert read_manifest(manifest.to_bytes()) == manifest


def read_or_damaged(data: bytes) -> bool:
    began = time.perf_counter()
    try:
        manifest = read_manifest(data)
    except Damaged:
        return False
    finally:
        assert time.perf_counter() - began < 1
    check_sane(manifest)
    return True


def test_3000_mutated_manifests_are_refused_or_sane() -> None:
    """C7: of whatever was done to a manifest, only `Damaged` comes out, or one whose every number is in range."""
    rng = random.Random(7)
    good = a_manifest().to_bytes()
    body = json.loads(good)
    believed = 0
    for number in range(3000):
        if number % 3 == 0:
            data = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            believed += read_or_damaged(bytes(data))
        elif number % 30 == 1:
            assert not read_or_damaged(good[: rng.randrange(len(good))])
        else:
            believed += read_or_damaged(json.dumps(mutate(body, rng)).encode())
    assert 50 < believed < 2000, "the mutations neither all break it nor all leave it"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 100_000, b"9" * 10_000, b'"' + b"x" * 1000,
        b'{"format":2}', b'{"format":1}',
    ],
)  # fmt: skip
def test_not_a_manifest(data: bytes) -> None:
    with pytest.raises(Damaged):
        read_manifest(data)


def changed(**over: Any) -> bytes:
    return json.dumps({**json.loads(a_manifest().to_bytes()), **over}).encode()


def test_claims_larger_than_the_chunks_are_refused() -> None:
    """C7: what is allocated is what the chunks hold, not what a number says."""
    first = [0, 10, hexed(1), 0, 0]
    few = {"packs": [hexed(2)], "tensors": [], "storages": []}
    read_manifest(changed(**few, chunks=[first], size=4096))
    for over in (
        {"chunks": [first], "size": MAX_STATE_BYTES},
        {"chunks": [first], "size": 10 + ALIGN},
        {"chunks": [first, [1 << 40, 10, hexed(1), 0, 0]], "size": (1 << 40) + 4096},
        {"chunks": [[ALIGN, 10, hexed(1), 0, 0]], "size": 2 * ALIGN},
        {"chunks": [[0, CHUNK_BYTES + 1, hexed(1), 0, 0]], "size": CHUNK_BYTES + 1},
        {"chunks": [[0, 0, hexed(1), 0, 0]], "size": 10},
        {"chunks": [first, [5, 10, hexed(1), 0, 0]], "size": 4096},
        {"chunks": [[0, 10, hexed(1), 1, 0]], "size": 10},
        {"chunks": [[0, 10, hexed(1), -1, 0]], "size": 10},
        {"chunks": [[0, 10, hexed(1), 0, -1]], "size": 10},
        {"chunks": [[0, 10, "../" + hexed(1)[3:], 0, 0]], "size": 10},
        {"chunks": [[0, 10, hexed(1), 0]], "size": 10},
    ):
        with pytest.raises(Damaged):
            read_manifest(changed(**{**few, **over}))


def test_storages_that_overlap_or_that_no_chunk_holds_are_refused() -> None:
    """C7, C4: what is not read would be somebody else's memory."""
    base = {
        "packs": [hexed(2)],
        "tensors": [],
        "size": 8192,
        "chunks": [[0, 4000, hexed(1), 0, 0], [4096, 4096, hexed(1), 0, 0]],
    }
    for storages in ([[0, 4000], [4096, 4096]], [[0, 10], [10, 20], [5, 0]], [[5000, 10], [0, 1]]):
        read_manifest(changed(**base, storages=storages))
    for storages in (
        [[0, 4001]],
        [[4000, 96]],
        [[3990, 200]],
        [[0, 10], [9, 10]],
        [[0, 8193]],
        [[8192, 1]],
        [[-1, 2]],
    ):
        with pytest.raises(Damaged):
            read_manifest(changed(**base, storages=storages))


def test_what_could_not_be_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: a save that returned must be one that loads."""
    for over in ({"schema": "x" * 5000}, {"version": -1}, {"storages": (ByteSpan(0, 1 << 50),)}):
        with pytest.raises(Unsavable):
            manifest_bytes(a_manifest(**over))
    monkeypatch.setattr(checkpoint, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(Unsavable, match="larger"):
        manifest_bytes(a_manifest(tree=list(range(1000))))


def test_a_manifest_beyond_the_limit_is_not_parsed() -> None:
    """C7."""
    began = time.perf_counter()
    with pytest.raises(Damaged, match="larger"):
        read_manifest(bytes(checkpoint.MAX_MANIFEST_BYTES + 1))
    assert time.perf_counter() - began < 1


def filled(part: str, count: int) -> bytes:
    """A manifest whose tree is this, again and again. '#' becomes a number of its own."""
    parts = (part.replace("#", f"{n:x}") for n in range(count)) if "#" in part else [part] * count
    return a_manifest(tree="here").to_bytes().replace(b'"here"', f"[{','.join(parts)}]".encode())


SWOLLEN = [
    "[]", "{}", "[[]]", "[0]", '{"":0}', '{"":{}}', '{"a":0,"b":0}', '{"a":{},"b":[],"c":{},"d":[],"e":[]}', '{"#":0}', '"#"', '"\\u4e00#"',
    "1.5", "1e9", "999", "99999999999", "0", "[" * 50 + "]" * 50, '{"a":' * 30 + "0" + "}" * 30, '"' + "x" * 3000 + '"',
    '"' + "x" * 3000 + '\\ud83d\\ude00"', '"' + "\\n" * 3000 + '"', "true", '{"$tensor":0}', '{"$dict":[[1,2]]}', "[[[],[]],[[],[]]]",
]  # fmt: skip


@pytest.mark.parametrize("part", SWOLLEN, ids=lambda p: p[:20])
def test_reading_takes_no_more_memory_than_was_foretold(part: str) -> None:
    """C7: the bound is a bound, for whatever swells most in memory."""
    data = filled(part, max(20, 60_000 // len(part)))
    tracemalloc.start()
    try:
        read_manifest(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= checkpoint.memory_to_read(data)


def test_the_tables_too_take_no_more_memory_than_was_foretold() -> None:
    layout = lay_out([CHUNK_BYTES] * 3000 + [10] * 3000)
    rows = tuple(
        TensorEntry(
            framework="torch", dtype="float32", shape=(300, 300), stride=(300, 1), offset=n, storage=n
        )
        for n in range(6000)
    )
    chunks = tuple(
        ChunkEntry(s, hexed(n), hexed(n % 9), CHUNK_BYTES * n) for n, s in enumerate(layout.chunks)
    )
    data = a_manifest(tensors=rows, storages=layout.storages, chunks=chunks, size=layout.size).to_bytes()
    tracemalloc.start()
    try:
        read_manifest(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= checkpoint.memory_to_read(data)


@pytest.mark.parametrize("part", ["[]", "{}", "[[]]", '{"":{}}', "0", "1.5", '""', "[" * 50 + "]" * 50])
def test_a_manifest_that_would_fill_the_memory_is_not_parsed(part: str) -> None:
    """C7: within the limit of bytes, and a gigabyte once it is parsed."""
    data = filled(part, (checkpoint.MAX_MANIFEST_BYTES - 5000) // (len(part) + 1))
    assert len(data) < checkpoint.MAX_MANIFEST_BYTES
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="so many parts"):
            read_manifest(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 1


def test_a_terabyte_has_a_manifest() -> None:
    """The bounds leave room for what they are for: chunks of a terabyte, and a hundred thousand tensors."""
    layout = lay_out([CHUNK_BYTES] * (1 << 17))
    chunks = [[s.offset, s.size, hexed(n), 0, CHUNK_BYTES * n] for n, s in enumerate(layout.chunks)]
    assert layout.size == 1 << 40
    data = changed(
        packs=[hexed(1)],
        chunks=chunks,
        storages=[[s.offset, s.size] for s in layout.storages],
        tensors=[],
        size=1 << 40,
    )
    assert len(data) < checkpoint.MAX_MANIFEST_BYTES
    assert checkpoint.memory_to_read(data) < checkpoint.MAX_MANIFEST_MEMORY
    rows = [["torch", "float32", [4, 4], [4, 1], 0, 0, 1]] * 100_000
    data = changed(tensors=rows, tree={f"model.layers.{n}.weight": {"$tensor": n} for n in range(100_000)})
    assert checkpoint.memory_to_read(data) < checkpoint.MAX_MANIFEST_MEMORY


@pytest.mark.parametrize(
    "parent", ["../" * 21 + "x", "a" * 63, "A" * 64, "a" * 64 + "\n", "\x00", ".", 0, None, []]
)
def test_a_parent_is_a_digest_or_none(parent: Any) -> None:
    """Threat 9: it becomes the name of a file."""
    with pytest.raises(Damaged):
        read_manifest(changed(parent=parent))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_only_ascii(encoding: str) -> None:
    """C7: what is counted is what is parsed."""
    with pytest.raises(Damaged):
        read_manifest(a_manifest().to_bytes().decode().encode(encoding))
    with pytest.raises(Damaged):
        read_manifest(a_manifest(tree="here").to_bytes().replace(b"here", "é".encode()))


# --- policy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "quorums"),
    [
        ({}, (1, 1)),
        ({"replicas": 2}, (2, 1)),
        ({"replicas": 3}, (2, 2)),
        ({"replicas": 5}, (3, 3)),
        ({"replicas": 3, "write_quorum": 3}, (3, 1)),
        ({"replicas": 3, "write_quorum": 2, "read_quorum": 3}, (2, 3)),
        ({"replicas": 2, "write_quorum": 1, "single_node": True}, (1, 2)),
        ({"replicas": 3, "domains": ("a", "a", "b")}, (2, 2)),
        ({"replicas": 3, "domains": ("a", "a", "a"), "single_node": True}, (2, 2)),
        ({"replicas": 16}, (9, 8)),
    ],
)
def test_policies_that_are_taken(over: dict[str, Any], quorums: tuple[int, int]) -> None:
    policy = ReplicaPolicy(**over)
    assert (policy.write_quorum, policy.read_quorum) == quorums


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ({"replicas": 0}, "1 to 16"),
        ({"replicas": -1}, "1 to 16"),
        ({"replicas": 17}, "1 to 16"),
        ({"replicas": 2, "write_quorum": 1}, "no majority"),
        ({"replicas": 4, "write_quorum": 2}, "no majority"),
        ({"replicas": 3, "write_quorum": 4}, "do not fit"),
        ({"replicas": 3, "write_quorum": -1}, "do not fit"),
        ({"replicas": 3, "read_quorum": 4}, "do not fit"),
        ({"replicas": 3, "read_quorum": -1}, "do not fit"),
        ({"replicas": 3, "write_quorum": 2, "read_quorum": 1}, "need not meet"),
        ({"replicas": 3, "domains": ("a", "b")}, "2 domains are named for 3"),
        ({"replicas": 3, "domains": ("a", "a", "a")}, "1 failure domains"),
        ({"replicas": 3, "write_quorum": 3, "domains": ("a", "a", "b")}, "2 failure domains"),
        ({"replicas": 2, "write_quorum": 3, "single_node": True}, "do not fit"),
    ],
)
def test_policies_that_are_refused(over: dict[str, Any], why: str) -> None:
    """C1: a quorum that could lose a confirmed save."""
    with pytest.raises(BadInput, match=why):
        ReplicaPolicy(**over)


def test_the_quorum_counts_domains() -> None:
    """C1: two copies that fail together are one."""
    policy = ReplicaPolicy(replicas=3)
    apart = {"a": "1", "b": "2", "c": "3"}
    together = {"a": "1", "b": "1", "c": "3"}
    assert missing_for_quorum(policy, ["a", "b"], apart) == 0
    assert missing_for_quorum(policy, ["a", "b"], together) == 1
    assert missing_for_quorum(policy, ["a", "c"], together) == 0
    assert missing_for_quorum(policy, [], apart) == 2
    assert missing_for_quorum(policy, ["a", "a"], apart) == 1
    alone = ReplicaPolicy(replicas=3, single_node=True)
    assert missing_for_quorum(alone, ["a", "b"], together) == 0
    assert missing_for_quorum(alone, ["a", "a"], together) == 1


def test_the_policy_s_text_tells_policies_apart() -> None:
    some = ReplicaPolicy(replicas=3)
    texts = {
        p.to_text() for p in (some, replace(some, write_quorum=3), replace(some, domains=("a", "b", "c")))
    }
    assert len(texts) == 3
    assert some.to_text() == ReplicaPolicy(replicas=3, write_quorum=2, read_quorum=2).to_text()
