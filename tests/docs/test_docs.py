"""The documentation is true: its examples run, its reference matches the code, its links lead somewhere."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.errors import error_tree
from sublet.studio.holder import finding
from tests import forked
from tests.client.conftest import House
from tests.conftest import ONLY_FOR_3_11, needed, repository
from tests.homes import Home

ROOT = repository("docs").parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = [p for p in PAGES if re.search(r"^```(python|console)$", p.read_text(), re.M)]


@pytest.fixture
def studio_environment(sqlite_home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A studio of the page's own, and a token for it."""
    house = House(sqlite_home)
    monkeypatch.setattr(finding, "spawn_detached", forked.spawn_detached)
    sqlite_home.settings.home.mkdir(parents=True, exist_ok=True)
    house.start()
    yield {"SUBLET_URL": house.url, "SUBLET_TOKEN": house.token("ann")}
    house.kill()
    house.kill_session_host()


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(
    page: Path,
    sqlite_home: Home,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    environment = sqlite_home.environment | {
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    if "sublet.connect()" in page.read_text():
        environment |= request.getfixturevalue("studio_environment")
    for module in set(re.findall(r"^(?:import|from) (\w+)", page.read_text(), re.M)) & ONLY_FOR_3_11:
        needed(module)
    ran = 0
    for kind, body in re.findall(r"^```(python|console)\n(.*?)^```", page.read_text(), re.M | re.S):
        lines = [line[2:] for line in body.splitlines() if line.startswith("$ ")]
        for text in [body] if kind == "python" else lines:
            words = [sys.executable, "-c", text] if kind == "python" else _without_a_shell(text)
            if words:
                done = forked.run(words, env=environment, cwd=tmp_path, children_too=True)
            else:
                command = ["/bin/sh", "-c", text]
                done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            ran += 1
    assert ran


def _without_a_shell(line: str) -> list[str]:
    """The command of Python that it is, when there is nothing in it for a shell to do."""
    words = [] if re.search(r"[|><&;$`*?]", line.partition("'")[0]) else shlex.split(line)
    if words[:1] == ["sublet"]:
        return [sys.executable, "-m", *words]
    return [sys.executable, *words[1:]] if re.match(r"python (-m |\S+\.py)", line) else []


def test_the_reference_is_what_the_code_says() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
    for name, page in pages.items():
        assert (ROOT / "docs" / "reference" / name).read_text() == page(), f"run 'make docs' for {name}"


def test_the_help_on_the_page_is_the_help_on_the_screen() -> None:
    """Every command with every option it has, `-h` too; whether or not somebody in this process has used the command before."""
    said = subprocess.run(
        [sys.executable, "-m", "sublet", "-h"], capture_output=True, text=True, check=True
    ).stdout
    options = re.search(r"^Options:\n(.*?)\n\n", said, re.M | re.S)
    assert options is not None
    assert "-h, --help" in options[1]
    assert options[1] in (ROOT / "docs" / "reference" / "cli.md").read_text()


def test_every_error_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    ours = [cls for cls in error_tree() if cls.__module__ == "sublet.core.errors"]
    missing = [cls.code for cls in ours[1:] if f"`{cls.code}`" not in text]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_decision_is_listed() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    for page in (ROOT / "docs" / "decisions").glob("0*.md"):
        assert page.name in index


def test_every_dependency_has_its_reason() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reasons = (ROOT / "docs" / "decisions" / "0001-dependencies.md").read_text()
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["postgres"],
    ]
    for requirement in wanted:
        name = re.split(r"[\[<>=; ]", requirement)[0]
        assert name in ("sublet",) or name.split("-")[0] in reasons, f"{name} has no line in decisions/0001"
