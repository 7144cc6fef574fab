"""Stamps of borrowed memory: the same while nothing is written there, another after one byte, and none where
nobody can tell.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from sublet.notebook.cells.content_digest import mark
from sublet.processes.channel import dirty_pages
from sublet.processes.channel.blocks import Borrower, Lender
from sublet.processes.channel.pickling import pack, unpack

MB = 1 << 20


class Pair:
    """A lender and a borrower of one process, and the little that passes between them."""

    def __init__(self) -> None:
        self.lender, self.borrower = Lender(), Borrower()

    def ship(self, value: Any) -> Any:
        block, fresh = self.lender.lend(pack(value))
        if fresh:
            self.borrower.receive(block.number, os.dup(block.fd), block.size)
        return unpack(self.borrower.borrow(block.number))

    def give_back(self) -> None:
        unused, self.borrower.unused = self.borrower.unused, []
        self.lender.returned(unused)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.borrower.close()
    made.lender.close()


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    try:
        dirty_pages._PageTracker().close()
    except OSError as e:
        pytest.skip(f"this kernel does not tell which pages were written: {e}")


def stamp(array: Any) -> int | None:
    return dirty_pages.stamps([memoryview(array).cast("B")])[0]


def ones(megabytes: int = 4) -> Any:
    return numpy.ones(megabytes * MB, dtype=numpy.uint8)


def test_a_stamp_stays_while_nothing_is_written_and_changes_with_one_byte(pair: Pair) -> None:
    array = pair.ship(ones())
    first = stamp(array)
    assert first is not None
    assert int(array.sum()) == 4 * MB
    assert stamp(array) == first
    array[3 * MB + 5] = 7
    second = stamp(array)
    assert second not in (None, first)
    assert stamp(array) == second


def test_a_look_at_one_stretch_does_not_hide_a_write_from_another_that_overlaps_it(pair: Pair) -> None:
    array = pair.ship(ones(8))
    whole, view = stamp(array), stamp(array[2 * MB :])
    array[3 * MB] = 7
    assert stamp(array) != whole
    assert stamp(array[2 * MB :]) != view


def test_a_write_beside_a_stretch_leaves_its_stamp(pair: Pair) -> None:
    array = pair.ship(ones(16))
    beside = stamp(array[8 * MB :])
    array[:MB] = 3
    assert stamp(array[8 * MB :]) == beside


def test_a_block_that_is_lent_again_has_other_stamps(pair: Pair) -> None:
    array = pair.ship(ones())
    first = stamp(array)
    address = array.ctypes.data
    del array
    assert not dirty_pages._loans
    pair.give_back()
    again = pair.ship(ones() * 2)
    assert again.ctypes.data == address  # else this proves nothing
    assert stamp(again) not in (None, first)
    assert int(again[0]) == 2


def test_writes_of_the_kernel_are_seen(pair: Pair) -> None:
    array = pair.ship(ones())
    first = stamp(array)
    with open("/dev/zero", "rb", buffering=0) as zeros:
        zeros.readinto(memoryview(array)[MB : 2 * MB])
    assert int(array[MB]) == 0
    assert stamp(array) != first


def test_a_block_written_all_over_is_read_from_then_on(pair: Pair) -> None:
    array = pair.ship(ones())
    before = mark(pack(array))
    array += 1
    after = mark(pack(array))
    assert after != before
    assert stamp(array) is None
    assert mark(pack(array)) == after
    array[0] = 0
    assert mark(pack(array)) != after


def test_a_block_that_was_let_go_costs_no_more_faults(pair: Pair) -> None:
    array = pair.ship(ones(16))
    assert stamp(array) is not None
    array += 1
    assert stamp(array) is None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array += 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 16 * MB // 4096 // 2


def test_memory_that_is_no_blocks_has_no_stamp(pair: Pair) -> None:
    kept = pair.ship(ones())
    assert stamp(ones()) is None
    assert dirty_pages.stamps([memoryview(b"x" * MB)]) == [None]
    assert stamp(kept) is not None


def test_a_look_left_by_an_exception_never_vouches_for_the_block_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = pair.ship(ones())
    assert stamp(array) is not None
    array[0] = 5
    look = dirty_pages._PageTracker.written

    def interrupted(self: Any, start: int, end: int, *, protect: bool) -> Any:
        found = look(self, start, end, protect=protect)
        if protect:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(dirty_pages._PageTracker, "written", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stamp(array)
    monkeypatch.undo()
    assert stamp(array) is None


def test_a_forked_child_asks_nothing_of_its_parents_memory(pair: Pair) -> None:
    array = pair.ship(ones())
    first = stamp(array)
    if not (child := os.fork()):
        os._exit(0 if stamp(array) is None and dirty_pages._kernel is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stamp(array) == first
    array[0] = 9
    assert stamp(array) != first


def test_a_kernel_that_refuses_leaves_everything_to_reading(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> Any:
        raise PermissionError(1, "userfaultfd")

    monkeypatch.setattr(dirty_pages, "_kernel", None)
    monkeypatch.setattr(dirty_pages, "_refused", False)
    monkeypatch.setattr(dirty_pages, "_PageTracker", refuses)
    array = pair.ship(ones())
    before = mark(pack(array))
    assert stamp(array) is None
    array[7] = 3
    assert mark(pack(array)) != before
