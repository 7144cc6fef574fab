"""The notebook cells on the pages of the documentation run, in their order, as one notebook each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import repository
from tests.notebook.conftest import ROOT, Lab

CELLS = re.compile(r"^```ipython\n(.*?)^```", re.M | re.S)
PAGES = [
    p
    for p in sorted([repository("README.md"), *repository("docs").rglob("*.md")])
    if CELLS.search(p.read_text())
]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_cells_run(page: Path, shared_lab: Lab) -> None:
    kernel = shared_lab.kernel(page.stem, load=False)
    for cell in CELLS.findall(page.read_text()):
        kernel.fine(cell)
    kernel.close()


def test_there_are_pages() -> None:
    assert len(PAGES) >= 2
