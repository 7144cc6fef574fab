"""Values between two processes: what arrives is what was sent, a kept value is never written over, nothing
piles up.
"""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.processes.channel import blocks
from sublet.processes.channel.blocks import ALIGN, BORROWED_MOST, FREE_KEPT
from sublet.processes.channel.channel import (
    INLINE_BYTES,
    INLINE_PARTS,
    Channel,
    ChannelClosed,
    pair,
    receive_with_fds,
    send_with_fds,
)
from sublet.processes.channel.parallel_copy import WORTH_IT_BYTES

Pair = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Pair]:
    a, b = pair()
    here, there = Channel(a), Channel(b)
    yield here, there
    here.close()
    there.close()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("sublet-block")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def over(ends: Pair, *parts: bytes) -> list[memoryview]:
    """Sent from one end, received at the other."""
    ends[0].send(1, views(*parts))
    return ends[1].receive()[2]


@pytest.mark.parametrize(
    "size", [0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, (1 << 20) - 88, 1 << 20, 5_000_001]
)
def test_every_size_arrives_whole(ends: Pair, size: int) -> None:
    sent = random.Random(size).randbytes(size)
    (got,) = over(ends, sent)
    assert got == sent
    assert not got.readonly
    inline = size <= INLINE_BYTES
    assert mappings() == (0 if inline else 2)  # the lender's and the borrower's


@pytest.mark.parametrize("count", [0, 1, 511, 512, INLINE_PARTS, INLINE_PARTS + 1, 30_000])
def test_many_parts_arrive_whole(ends: Pair, count: int) -> None:
    """More parts than the kernel takes pieces of one message, empty ones among them."""
    sent = [bytes([i % 251]) * (i % 4) for i in range(count)]
    assert [bytes(part) for part in over(ends, *sent)] == sent


def test_parts_in_a_block_do_not_overlap_and_are_aligned(ends: Pair) -> None:
    sent = [os.urandom(n) for n in (1, 0, 63, 64, 65, INLINE_BYTES, 0, 7)]
    got = over(ends, *sent)
    assert [bytes(part) for part in got] == sent
    import numpy as np

    starts = [np.frombuffer(part, np.uint8).ctypes.data for part in got if part.nbytes]
    assert all(start % ALIGN == 0 for start in starts)
    for part in got:
        part[:] = bytes(part.nbytes)
    assert not any(map(any, got))


def test_kind_and_serial_travel(ends: Pair) -> None:
    for kind, serial, size in [(1, 0, 1), (255, 7, INLINE_BYTES + 1), (3, 2**32 - 1, 0)]:
        ends[0].send(kind, views(bytes(size)), serial)
        assert ends[1].receive()[:2] == (kind, serial)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "send", "drop", "write"]),
            st.booleans(),
            st.integers(0, 1000),
            st.sampled_from([10, INLINE_BYTES + 1, 100_000, 1_200_000]),
        ),
        max_size=60,
    ),
    st.integers(1, 6),
)
def test_a_kept_value_is_never_written_over(steps: list[tuple[str, bool, int, int]], most: int) -> None:
    """Both ends send, keep, write to and drop in any order: what is kept reads as its keeper left it. Few
    blocks may be borrowed here, so that copies are part of it."""
    before = blocks.BORROWED_MOST
    blocks.BORROWED_MOST = most
    a, b = pair()
    ends = Channel(a), Channel(b)
    try:
        interleave(ends, steps)
    finally:
        blocks.BORROWED_MOST = before
        for end in ends:
            end.close()
    assert mappings() == 0


def interleave(ends: Pair, steps: list[tuple[str, bool, int, int]]) -> None:
    kept: list[list[list[tuple[memoryview, bytes]]]] = [[], []]  # each side's messages, each with its parts
    for n, (what, side, pick, size) in enumerate(steps):
        mine = kept[side]
        if what == "send":
            sent = [bytes([n % 256]) * size, n.to_bytes(4, "big")]
            ends[1 - side].send(1, views(*sent))
            mine.append(list(zip(ends[side].receive()[2], sent, strict=True)))
        elif mine and what == "drop":
            message = mine[pick % len(mine)]
            if pick % 3 == 0 and len(message) == 2:
                del message[pick % 2]
            else:
                mine.remove(message)
            del message
        elif mine:
            message = mine[pick % len(mine)]
            view, content = message[0]
            view[:] = content = bytes([255 - n % 256]) * len(content)
            message[0] = view, content
            del message, view
        for view, content in (part for side in kept for message in side for part in message):
            assert view[:8] == content[:8]
            assert view[-8:] == content[-8:]
            del view
    for view, content in (part for side in kept for message in side for part in message):
        assert view == content


def test_a_block_is_used_again_once_it_is_let_go_of(ends: Pair) -> None:
    first = over(ends, bytes(100_000))
    second = over(ends, bytes(100_000))
    assert mappings() == 4
    del first, second
    over(ends[::-1], b"")  # takes the news along
    for _ in range(10):
        over(ends, bytes(100_000))
        over(ends[::-1], b"")
    assert mappings() == 4


def in_a_child(check: Callable[[], bool]) -> bool:
    if not (child := os.fork()):
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("closed", [False, True])
def test_what_a_forked_child_writes_is_its_own(ends: Pair, closed: bool) -> None:
    (view,) = over(ends, b"a" * 100_000)
    if closed:  # the worker is long gone, and the array still here
        ends[1].close()
        gc.collect()

    def writes() -> bool:
        view[0] = view[99_999] = ord("b")
        return bytes(view) == b"b" + b"a" * 99_998 + b"b"

    assert in_a_child(writes)
    assert bytes(view) == b"a" * 100_000
    view[0] = ord("c")
    assert bytes(view[:2]) == b"ca"


def test_what_a_forked_child_reads_is_not_used_for_another_message(ends: Pair) -> None:
    views = over(ends, b"a" * 100_000)
    asks, answers = os.pipe()
    if not (child := os.fork()):
        os.read(asks, 1)
        os._exit(0 if bytes(views[0]) == b"a" * 100_000 else 1)
    views.clear()
    for _ in range(3):
        over(ends[::-1], b"")
        over(ends, b"z" * 100_000)
    assert mappings() <= 4  # and it is not kept for ever
    os.write(answers, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(asks)
    os.close(answers)


def test_an_array_that_outlived_its_channel_leaves_no_descriptor_behind() -> None:
    fds = descriptors()
    here, there = map(Channel, pair())
    kept = over((here, there), b"a" * 100_000)
    here.close()
    there.close()
    del here, there
    gc.collect()
    assert bytes(kept[0][:2]) == b"aa"
    kept.clear()
    gc.collect()
    assert descriptors() == fds


def test_free_blocks_are_few_and_unmapped_by_both(ends: Pair) -> None:
    kept = [over(ends, bytes(100_000)) for _ in range(FREE_KEPT + 5)]
    assert mappings() == 2 * (FREE_KEPT + 5)
    kept.clear()
    over(ends[::-1], b"")
    assert mappings() == FREE_KEPT + 5 + FREE_KEPT  # the lender's are gone
    over(ends, b"")
    assert mappings() == 2 * FREE_KEPT
    # Those that are left work.
    assert bytes(over(ends, b"x" * 100_000)[0]) == b"x" * 100_000


def test_who_keeps_much_gets_copies(ends: Pair) -> None:
    """A block costs four descriptors and a mebibyte: a list of a few thousand results must not use up the
    process's."""
    fds = descriptors()
    kept = [over(ends, n.to_bytes(2, "big") * 20_000) for n in range(2 * BORROWED_MOST)]
    for _ in range(3):
        over(ends[::-1], b"")
        kept.append(over(ends, b"zz" * 20_000))
    assert descriptors() - fds <= 4 * (BORROWED_MOST + FREE_KEPT + 60)
    assert mappings() <= 2 * (2 * BORROWED_MOST)
    held = mappings()
    for n in range(500):
        kept.append(over(ends, n.to_bytes(2, "big") * 20_000))
        over(ends[::-1], b"")
    assert mappings() <= held
    for n in range(2 * BORROWED_MOST):
        (view,) = kept[n]
        assert view == n.to_bytes(2, "big") * 20_000
        assert not view.readonly
    assert kept[-1][0] == (499).to_bytes(2, "big") * 20_000


def test_nothing_grows_over_many_messages(ends: Pair) -> None:
    sizes = [10, 50_000, 200_000, 1_500_000, 3_000_000]
    rng = random.Random(1)
    fds = held = 0
    for n in range(500):
        a, b = ends if n % 2 else ends[::-1]
        over((a, b), bytes(rng.choice(sizes)))
        if n == 100:
            gc.collect()
            fds, held = descriptors(), mappings()
    gc.collect()
    # How many blocks are free at a moment varies; that there are a few on each side does not.
    most = 2 * (FREE_KEPT + 2) * 2
    assert held <= most
    assert mappings() <= most
    assert abs(descriptors() - fds) <= 2 * most


def test_a_view_outlives_its_channel() -> None:
    a, b = pair()
    here, there = Channel(a), Channel(b)
    kept = over((here, there), b"k" * 100_000)
    dropped = over((here, there), b"d" * 100_000)
    del dropped
    here.close()
    there.close()
    assert mappings() == 1
    assert kept[0] == b"k" * 100_000
    del kept
    assert mappings() == 0


@pytest.mark.parametrize("unread", [False, True])
def test_a_peer_that_is_gone_is_said(ends: Pair, unread: bool) -> None:
    """Also when it left a message of ours unread, which the kernel tells differently."""
    if unread:
        ends[0].send(1, views(b"x"))
    ends[1].close()
    with pytest.raises(ChannelClosed):
        ends[0].receive()
    with pytest.raises(ChannelClosed):
        ends[0].send(1, views(b"x"))


def test_what_a_peer_said_before_it_died_arrives(ends: Pair) -> None:
    ends[0].send(5, views(b"last", bytes(100_000)))
    ends[0].close()
    kind, _, parts = ends[1].receive()
    assert (kind, bytes(parts[0]), bytes(parts[1])) == (5, b"last", bytes(100_000))
    with pytest.raises(ChannelClosed):
        ends[1].receive()


def test_a_send_that_failed_loses_no_block(ends: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no memory for it; the news of blocks that it would have carried goes with the next."""
    kept = over(ends, bytes(100_000))
    del kept

    def no_memory(*_: object) -> int:
        raise OSError(12, "no memory")

    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", no_memory)
        with pytest.raises(OSError, match="no memory"):
            ends[1].send(1, views(bytes(100_000)))
    over(ends[::-1], b"")
    over(ends, bytes(100_000))
    assert mappings() == 2


def test_received_descriptors_are_not_inherited() -> None:
    a, b = pair()
    with a, b:
        fd = os.memfd_create("x")
        send_with_fds(a, b"m", [fd, fd])
        os.close(fd)
        message, fds = receive_with_fds(b)
        assert message == b"m"
        assert [os.get_inheritable(fd) for fd in fds] == [False, False]
        for fd in fds:
            os.close(fd)


def test_a_message_too_long_or_with_too_many_descriptors_is_refused_and_leaks_none() -> None:
    a, b = pair()
    with a, b:
        before = descriptors()
        send_with_fds(a, b"x" * 5000, [a.fileno()])
        assert receive_with_fds(b) == (b"", [])
        send_with_fds(a, b"x", [a.fileno()] * 40)
        assert receive_with_fds(b) == (b"", [])
        assert descriptors() == before
        a.shutdown(socket.SHUT_RDWR)
        assert receive_with_fds(b) == (b"", [])


def test_parts_so_large_that_two_threads_copy_them_arrive_as_they_were(ends: Pair) -> None:
    here, there = ends
    whole = random.Random(1).randbytes(WORTH_IT_BYTES + 1001)
    parts = [memoryview(bytearray(whole)), memoryview(whole), memoryview(bytearray(b"small"))]
    here.send(1, parts)
    assert [bytes(part) for part in there.receive()[2]] == [whole, whole, b"small"]
