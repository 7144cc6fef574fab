"""docs/architecture.md is true: its picture is the import graph, and each walk passes its files in the order it lists them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.conftest import House
from tests.conftest import needed, repository
from tests.homes import Home, wait_until

ROOT = Path(__file__).parents[2]
PAGE = repository("docs/architecture.md")
TRACER = Path(__file__).parent / "tracer"
#: What a reader can keep in mind.
MOST_FILES = 12


def walks() -> dict[str, tuple[str, list[str]]]:
    """The program and the files of each walk, by its heading."""
    found = {}
    for part in re.split(r"^### ", PAGE.read_text(), flags=re.M)[1:]:
        heading, _, rest = part.partition("\n")
        program = re.search(r"^```py\n(.*?)^```", rest, re.M | re.S)
        if program is not None:
            found[heading] = (program[1], re.findall(r"^\d+\. `([\w/]+\.py)`", rest, re.M))
    return found


def test_the_picture_is_the_import_graph() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "draw_architecture.py"))["drawing"]
    assert (ROOT / "docs" / "architecture.svg").read_text() == drawing(), "run 'make docs'"


def test_the_page_has_five_walks_that_a_reader_can_follow() -> None:
    assert list(walks()) == ["A lease", "A step", "A cell", "An item", "A call to a studio"]
    for heading, (_, files) in walks().items():
        assert 5 <= len(files) <= MOST_FILES, heading
        assert all((ROOT / "src" / "sublet" / name).exists() for name in files), heading


@pytest.fixture
def traced(sqlite_home: Home, tmp_path: Path) -> dict[str, str]:
    path = f"{TRACER}{os.pathsep}{ROOT}"
    return sqlite_home.environment | {"PYTHONPATH": path, "WALK_FILE": str(tmp_path / "walk")}


@pytest.fixture
def traced_studio(sqlite_home: Home, traced: dict[str, str]) -> Iterator[dict[str, str]]:
    """`sublet serve` as a process of its own: what the tests fork elsewhere has no tracer in it."""
    house = House(sqlite_home)
    sqlite_home.settings.home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sublet", "serve", "--port", str(house.port)]
    with subprocess.Popen(
        command, env=traced, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as service:
        house.service = service
        wait_until(house.answers)
        yield traced | {"SUBLET_URL": house.url, "SUBLET_TOKEN": house.token("ann")}
        service.kill()
    house.kill_session_host()


@pytest.mark.parametrize("heading", ["A lease", "A step", "A cell", "An item", "A call to a studio"])
def test_a_walk_passes_its_files_in_this_order(
    heading: str, traced: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if heading == "A cell":
        needed("IPython")
    environment = traced
    if heading == "A call to a studio":
        environment = request.getfixturevalue("traced_studio")
        Path(traced["WALK_FILE"]).write_text("")  # its start is not the call's
    program, listed = walks()[heading]
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = (line.split() for line in Path(traced["WALK_FILE"]).read_text().splitlines())
    passed = [name for _, name in sorted((int(at), name) for at, name in lines)]
    left = iter(passed)
    for name in listed:
        assert name in left, (
            f"{name} is not passed after those before it; passed were {list(dict.fromkeys(passed))}"
        )
