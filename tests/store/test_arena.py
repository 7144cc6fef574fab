"""Compare and copy: what changed is reported exactly, and the arena holds the state to the byte (C4)."""

from __future__ import annotations

import gc
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.checkpoints.checkpoint import CHUNK_BYTES, GROUP_BYTES, Layout, lay_out
from sublet.store.arena import Arena

SIZES = [0, 1, 63, 100, GROUP_BYTES - 1, GROUP_BYTES, CHUNK_BYTES + 5001, 2 * CHUNK_BYTES, 0, 700_000, 7]


def views(arrays: list[np.ndarray]) -> list[memoryview]:
    return [memoryview(a) for a in arrays]


def holds(arena: Arena, layout: Layout, arrays: list[np.ndarray]) -> bool:
    return all(
        bytes(arena.view[s.offset : s.end]) == a.tobytes()
        for s, a in zip(layout.storages, arrays, strict=True)
    )


def touched(layout: Layout, edits: list[tuple[int, int]]) -> list[bool]:
    places = [layout.storages[n].offset + at for n, at in edits]
    return [any(c.offset <= p < c.end for p in places) for c in layout.chunks]


def test_random_edits_are_reported_exactly() -> None:
    """C4: a chunk is dirty if a byte of it changed and only then, wherever in it the byte lies."""
    rng = random.Random(11)
    arrays = [np.frombuffer(bytearray(rng.randbytes(n)), np.uint8) for n in SIZES]
    layout = lay_out(SIZES)
    arena = Arena(layout.size)
    assert arena.take(views(arrays), layout, all_new=True) == [True] * len(layout.chunks)
    assert arena.take(views(arrays), layout, all_new=False) == [False] * len(layout.chunks)
    filled = [n for n, size in enumerate(SIZES) if size]
    for _ in range(60):
        edits = []
        for _ in range(rng.choice([0, 1, 1, 2, 5])):
            number = rng.choice(filled)
            at = rng.choice([0, SIZES[number] - 1, rng.randrange(SIZES[number])])
            if (number, at) not in edits:
                edits.append((number, at))
                arrays[number][at] ^= 1 << rng.randrange(8)
        assert arena.take(views(arrays), layout, all_new=False) == touched(layout, edits)
        assert holds(arena, layout, arrays)
    arena.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=12), st.randoms(use_true_random=False))
def test_small_storages(sizes: list[int], rng: random.Random) -> None:
    arrays = [np.frombuffer(bytearray(rng.randbytes(n)), np.uint8) for n in sizes]
    layout = lay_out(sizes)
    arena = Arena(layout.size)
    arena.take(views(arrays), layout, all_new=True)
    assert holds(arena, layout, arrays)
    covered = bytearray(layout.size)
    for span in layout.storages:
        covered[span.offset : span.end] = b"\x01" * span.size
    gaps = bytes(b for b, c in zip(bytes(arena.view[: layout.size]), covered, strict=True) if not c)
    assert not any(gaps), "what lies between storages is zeros: the same state is the same chunk"
    arena.close()


def test_a_first_save_of_zeros_is_new() -> None:
    layout = lay_out([100, GROUP_BYTES])
    arena = Arena(layout.size)
    zeros = views([np.zeros(100, np.uint8), np.zeros(GROUP_BYTES, np.uint8)])
    assert arena.take(zeros, layout, all_new=True) == [True, True]
    assert arena.take(zeros, layout, all_new=False) == [False, False]
    arena.close()


@pytest.mark.parametrize("size", [1, 5000, GROUP_BYTES + 3, 2 * CHUNK_BYTES + 1])
def test_memory_that_is_readonly_or_unaligned(size: int) -> None:
    data = random.Random(size).randbytes(size + 3)
    layout = lay_out([size, size, size])
    arena = Arena(layout.size)
    sources = [memoryview(data)[:size], memoryview(bytearray(data))[3:], memoryview(data)[1 : size + 1]]
    arena.take(sources, layout, all_new=True)
    for span, source in zip(layout.storages, sources, strict=True):
        assert arena.view[span.offset : span.end] == source
    gc.collect()
    assert not any(arena.take(sources, layout, all_new=False))
    arena.close()


def test_nothing_at_all() -> None:
    for sizes in ([], [0], [0, 0]):
        layout = lay_out(sizes)
        arena = Arena(layout.size)
        assert arena.take([memoryview(b"")] * len(sizes), layout, all_new=True) == []
        arena.close()


def test_the_same_memory_through_its_descriptor() -> None:
    arena = Arena(5000)
    arena.view[4999] = 7
    other = Arena(5000, os.dup(arena.fd))
    assert other.view[4999] == 7
    other.close()
    arena.close()


def test_closing_gives_the_descriptor_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        Arena(100).close()
        Arena(100, shared=False).close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
