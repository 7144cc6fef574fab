"""Large values between a notebook and its worker: what a cell changed comes back, what it only read is not
touched, whoever tells."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import pytest

import sublet
from sublet.core.cells.names import names_of
from sublet.leases.lease import Lease
from sublet.notebook.cells import inside_cell
from sublet.notebook.cells.keep import KeptState
from sublet.notebook.cells.notebook_lease import CellSource, NotebookLease
from sublet.notebook.options import CellOptions
from sublet.wiring import CLOCK, open_ledger
from tests.homes import Home

LARGE = 4 << 20


class Screen:
    def text(self, stream: str, text: str) -> None:
        pass

    def show(self, what: Mapping[str, Any]) -> None:
        pass


class Notebook:
    """Cells over a namespace, without a front end."""

    def __init__(self, home: Home) -> None:
        def take(wish: CellOptions) -> Lease:
            return sublet.gpu(wish.gpu.vram, wish.gpu.ttl, holder="worker").hold()

        def no_store() -> Any:
            raise AssertionError("nothing is kept here")

        kept = KeptState("nothing", no_store, lambda _: 0)
        self.cells = NotebookLease(take, open_ledger(home.settings).look, CLOCK, kept, inside_cell.run)
        self.space: dict[str, Any] = {}
        self._count = 0

    def run(self, body: str, **wish: Any) -> None:
        self._count += 1
        source = CellSource(
            body=body,
            header="%%gpu",
            count=self._count,
            reads=names_of(body).reads,
            front="terminal",
            name="<cell>",
            texts=lambda names: {},
        )
        ran = self.cells.run(CellOptions(**wish), source, self.space, Screen())
        assert ran.error is None, ran.error
        assert ran.report is not None
        assert ran.report.failure is None, ran.report.failure.trace


@pytest.fixture
def notebook(sqlite_home: Home) -> Iterator[Notebook]:
    made = Notebook(sqlite_home)
    yield made
    made.cells.release()


def test_an_array_changed_in_place_comes_back_each_time_and_one_that_was_only_read_stays_the_notebooks(
    notebook: Notebook,
) -> None:
    space = notebook.space
    space["a"] = mine = numpy.ones(LARGE, dtype=numpy.uint8)
    notebook.run("total = int(a.sum())")
    assert space["total"] == LARGE
    assert space["a"] is mine
    notebook.run("a[5] = 7")
    assert space["a"][5] == 7
    notebook.run("view = a[100:]\nview[0] = 9")
    assert space["a"][100] == 9
    notebook.run("a += 1")
    assert space["a"][5] == 8
    notebook.run("a += 1")
    assert (space["a"][5], space["a"][-1]) == (9, 3)
    space["a"][0] = 99
    notebook.run("first = int(a[0])")
    assert space["first"] == 99


def test_what_holds_large_arrays_is_sent_once_and_comes_back_when_one_byte_of_it_changed(
    notebook: Notebook,
) -> None:
    """A dict is sent only when it changed: what the second cell finds is what the first one left in the
    worker."""
    space = notebook.space
    space["d"] = {"x": numpy.zeros(LARGE, dtype=numpy.uint8), "y": numpy.zeros(LARGE, dtype=numpy.uint8)}
    notebook.run("where = id(d)")
    mine, there = space["d"], space["where"]
    notebook.run("where = id(d); d['x'].sum()")
    assert space["where"] == there
    assert space["d"] is mine
    for number in (1, 2, 3):
        notebook.run(f"d['y'][-1] = {number}; where = id(d)")
        assert space["d"]["y"][-1] == number
        assert space["where"] == there
    mine = space["d"]
    notebook.run("d['y'].sum()")
    assert space["d"] is mine
    space["d"]["x"][0] = 5  # a block of the worker's by now
    notebook.run("found = int(d['x'][0])")
    assert space["found"] == 5
    assert space["d"] is mine
    notebook.run("d['x'] += 1")
    notebook.run("d['x'] += 1")
    assert (space["d"]["x"][0], space["d"]["x"][1]) == (7, 2)


def test_a_change_by_a_cell_with_out_is_not_taken_for_one_of_the_next(notebook: Notebook) -> None:
    space = notebook.space
    space["d"] = mine = {"x": numpy.zeros(LARGE, dtype=numpy.uint8)}
    notebook.run("d['x'].sum()")
    notebook.run("d['x'][0] = 1", gives=("nothing",))
    notebook.run("d['x'].sum()")
    assert space["d"] is mine
    assert space["d"]["x"][0] == 0


def test_random_states_go_on_from_side_to_side_whether_or_not_a_cell_drew(notebook: Notebook) -> None:
    random.seed(5)
    wanted = [random.random() for _ in range(5)]
    random.seed(5)
    notebook.run("import random\nx = random.random()")
    drawn = [notebook.space["x"], random.random()]
    notebook.run("pass")
    assert notebook.cells._random(fresh=False) is None  # neither drew: there is nothing to send
    notebook.run("pass")
    notebook.run("x = random.random()")
    drawn.append(notebook.space["x"])
    notebook.cells.release()
    notebook.run("pass")
    drawn.append(random.random())
    notebook.run("import random\nx = random.random()")
    drawn.append(notebook.space["x"])
    assert drawn == wanted
