"""What a script prints is printed once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from sublet.training.scripts.output import PrintedOnce, is_printed_once


def printed_by(file: Path, work: Callable[[PrintedOnce], None], *, anew: str = "") -> str:
    """By a process whose standard output is a pipe, and which is killed at the end."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(writes, 1)
            sys.stdout = os.fdopen(1, "w")
            work(PrintedOnce(file, anew=anew))
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads) as back:
        said = back.read()
    os.waitpid(pid, 0)
    return said


def lines(first: int, last: int) -> Callable[[PrintedOnce], None]:
    def work(output: PrintedOnce) -> None:
        for number in range(first, last + 1):
            print(number, flush=True)

    return work


def test_lines_that_were_printed_before_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "job.printed"
    assert printed_by(file, lines(1, 3)) == "1\n2\n3\n"
    assert printed_by(file, lines(1, 5)) == "4\n5\n"
    assert printed_by(file, lines(1, 5)) == ""


def test_a_resume_counts_from_where_it_was_saved(tmp_path: Path) -> None:
    file = tmp_path / "job.printed"

    def first(output: PrintedOnce) -> None:
        lines(1, 2)(output)
        (tmp_path / "count").write_text(str(output.count()))
        lines(3, 4)(output)

    def resumed(output: PrintedOnce) -> None:
        print("the beginning again", flush=True)
        output.go_on_at(int((tmp_path / "count").read_text()))
        lines(3, 6)(output)

    assert printed_by(file, first) == "1\n2\n3\n4\n"
    assert printed_by(file, resumed) == "5\n6\n"


def test_anew_all_of_it_is_printed_again(tmp_path: Path) -> None:
    file = tmp_path / "job.printed"
    printed_by(file, lines(1, 3))
    assert printed_by(file, lines(1, 2), anew="another") == "1\n2\n"


def test_anew_lines_are_left_out_as_long_as_they_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "job.printed"

    def other(output: PrintedOnce) -> None:
        sys.stdout.write("1\n2\n3 is another\nand 4")
        output.is_over(forget=True)

    assert printed_by(file, lines(1, 4), anew="one") == "1\n2\n3\n4\n"
    assert printed_by(file, lines(1, 6), anew="one") == "5\n6\n"
    assert printed_by(file, other, anew="one") == "3 is another\nand 4"
    # It failed, or it is another script: whoever starts it sees all of it.
    assert printed_by(file, lines(1, 2), anew="one") == "1\n2\n"
    assert printed_by(file, lines(1, 2), anew="two") == "1\n2\n"


def test_several_lines_at_once_and_lines_in_pieces(tmp_path: Path) -> None:
    file = tmp_path / "job.printed"

    def pieces(output: PrintedOnce) -> None:
        sys.stdout.write("a")
        sys.stdout.write("b\nc\nd")
        sys.stdout.write("e\n")
        sys.stdout.flush()

    assert printed_by(file, lines(1, 2)) == "1\n2\n"
    assert printed_by(file, pieces) == "de\n"


def test_it_is_known_by_its_stream(tmp_path: Path) -> None:
    def work(output: PrintedOnce) -> None:
        print(
            is_printed_once(sys.stdout),
            is_printed_once(sys.stdout.buffer),
            is_printed_once(sys.stderr),
            sys.stdout.fileno(),
        )
        sys.stdout.flush()

    assert printed_by(tmp_path / "job.printed", work) == "True True False 1\n"
