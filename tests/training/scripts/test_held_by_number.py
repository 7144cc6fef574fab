"""A number that a program keeps of what it opened is of something else in the next process: it is named."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.training.scripts.file_history import FileHistory


@pytest.fixture
def history(tmp_path: Path) -> Iterator[FileHistory]:
    (tmp_path / "cwd").mkdir()
    made = FileHistory(tmp_path / "history", cwd=tmp_path / "cwd")
    made.watch()
    yield made
    made.close()


def held(history: FileHistory) -> list[str]:
    return [words.rpartition(":")[0] for words in history.held_by_number]


def test_what_has_no_path_is_named_until_it_is_closed(history: FileHistory) -> None:
    reads, writes = os.pipe()
    memory = os.memfd_create("mine")
    same = os.dup(1)
    here = "at test_held_by_number.py"
    assert held(history) == [
        f"descriptor {reads}, made with os.pipe {here}",
        f"descriptor {writes}, made with os.pipe {here}",
        f"descriptor {memory}, made with os.memfd_create {here}",
        f"descriptor {same}, made with os.dup {here}",
    ]
    for fd in (reads, writes, memory, same):
        os.close(fd)
    assert held(history) == []
    with open(os.devnull), open(os.devnull), open(os.devnull), open(os.devnull):  # who has the numbers now
        assert held(history) == []


def test_what_an_object_has_is_not_named(history: FileHistory) -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb"), os.fdopen(writes, "wb"):
        assert held(history) == []


def test_what_a_library_made_is_the_librarys(history: FileHistory) -> None:
    one, other = multiprocessing.Pipe(duplex=False)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with contextlib.closing(one), contextlib.closing(other), child:
        assert held(history) == []
