"""Large memory, copied or read in pieces by two threads, because one core gets about half of the memory
bandwidth.

Rules of this file:
- The work on a piece releases the interpreter lock for most of its time, else two threads are no faster than
  one.
- Pieces are taken one by one, so that a second core that is busy, or not there, delays nothing.
- Neither thread returns while the other is at work on a piece.
"""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

Piece = TypeVar("Piece")

PIECE_BYTES = 4 << 20
#: Below this size a thread costs more than it saves.
WORTH_IT_BYTES = 8 << 20


def pieces_of(size: int) -> Iterable[tuple[int, int]]:
    """Return where each piece begins and ends."""
    return ((at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES))


def in_two_threads(pieces: Iterable[Piece], work: Callable[[Piece], None]) -> None:
    """Call `work` for each piece, in any order. It must not raise."""
    left = deque(pieces)
    gate, finished = _thread.allocate_lock(), _thread.allocate_lock()
    state = {"begun": False, "over": False}

    def take_pieces() -> None:
        while True:
            try:
                piece = left.popleft()
            except IndexError:
                return
            work(piece)

    def other() -> None:
        with gate:
            if state["over"]:
                return
            state["begun"] = True
        try:
            take_pieces()
        finally:
            finished.release()

    finished.acquire()
    _thread.start_new_thread(other, ())
    try:
        take_pieces()
    finally:
        left.clear()
        with gate:
            state["over"] = True
        if state["begun"]:
            finished.acquire()
