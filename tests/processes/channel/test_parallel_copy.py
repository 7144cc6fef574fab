"""Two threads over pieces: each piece once, and nobody leaves early."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from sublet.processes.channel.parallel_copy import PIECE_BYTES, in_two_threads, pieces_of


@pytest.mark.parametrize("size", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES + 7])
def test_pieces_cover_everything_once(size: int) -> None:
    pieces = list(pieces_of(size))
    assert pieces[0][0] == 0
    assert pieces[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))


def test_each_piece_is_worked_on_once_and_by_two_threads() -> None:
    done: list[tuple[int, int]] = []

    def work(piece: int) -> None:
        time.sleep(0.002)
        done.append((piece, threading.get_ident()))

    in_two_threads(range(40), work)
    assert sorted(piece for piece, _ in done) == list(range(40))
    assert len({thread for _, thread in done}) == 2


def test_nobody_returns_while_the_other_is_at_work() -> None:
    done: list[int] = []

    def work(piece: int) -> None:
        time.sleep(0.05 if threading.current_thread() is not threading.main_thread() else 0.001)
        done.append(piece)

    in_two_threads(range(20), work)
    assert sorted(done) == list(range(20))


def test_an_interrupt_is_passed_on_when_the_other_has_stopped() -> None:
    at_work = threading.Event()
    running = done = 0

    def work(piece: int) -> None:
        nonlocal running, done
        if threading.current_thread() is threading.main_thread():
            at_work.wait(5)
            raise KeyboardInterrupt
        running += 1
        at_work.set()
        time.sleep(0.05)
        running -= 1
        done += 1

    with pytest.raises(KeyboardInterrupt):
        in_two_threads(range(100), work)
    assert at_work.is_set()
    assert running == 0
    assert done < 50
