"""The house rules that a linter does not know. Run by `make lint`.

Each rule has its reason. A file that must break one is named in the rule, with why.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from importlib.metadata import requires
from pathlib import Path

from tests.conftest import ONLY_FOR_3_11, repository

ROOT = Path(__file__).parents[1]
SOURCE = repository("src/sublet")
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / "start").glob("*.md"),
    *(ROOT / "docs" / "how-to").glob("*.md"),
]
#: What a page or an example may import. Everything else may move without a word.
PUBLIC = re.compile(r"sublet(\.(errors|testing|hf|lightning)(\.\w+)*)?$")
#: Public, though they begin so.
NAMEDTUPLE = {"_replace", "_asdict", "_fields"}
#: Pages about writing a part of sublet: they import the port they implement.
ABOUT_PORTS = {"hear-the-warning.md", "send-results-to-your-database.md"}


@cache
def modules() -> dict[str, ast.Module]:
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in paths}


def test_one_class_name_has_one_meaning() -> None:
    """A reader who searches for a name finds one class. The callbacks of the two trainers are one idea, used by name."""
    homes = defaultdict(list)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    twice = {cls: found for cls, found in homes.items() if len(found) > 1 and cls != "SubletCallback"}
    assert not twice


def test_files_and_functions_are_short_enough_to_read() -> None:
    """A file is one noun, and a function fits on a screen."""
    long = [name for name in modules() if (SOURCE / name).read_text().count("\n") > 600]
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 70:
                    long.append(f"{name}:{node.lineno} {node.name} has {lines} lines")
    assert not long


def test_lines_fit_beside_each_other() -> None:
    """Two files side by side on one screen; ruff looks at code only, this also at words."""
    long = []
    for name in modules():
        lines = (SOURCE / name).read_text().splitlines()
        long += [f"{name}:{number}" for number, line in enumerate(lines, 1) if len(line) > 110]
    assert not long, f"{len(long)} lines: {long[:20]}"


def test_what_is_private_stays_in_its_file() -> None:
    """`other._x` makes two files one. Internals of the standard library and of others' packages are not ours to count."""
    defined: dict[str, set[str]] = defaultdict(set)
    used: list[tuple[str, int, str]] = []
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined[node.name].add(name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined[node.id].add(name)
            elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if own and isinstance(node.ctx, ast.Store):
                    defined[node.attr].add(name)
                elif not own and not _is_super(node.value) and node.attr not in NAMEDTUPLE:
                    used.append((name, node.lineno, node.attr))
    of_others = [
        f"{name}:{line} {attr}" for name, line, attr in used if defined[attr] and name not in defined[attr]
    ]
    assert not of_others


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def test_our_variables_are_read_in_one_place() -> None:
    """`settings.py` reads SUBLET_*; what a lease told its process is read in `machine/`. Variables of others are their adapters' own."""
    reads = re.compile(r"environ(?:\.get\(|\.pop\(|\[)f?\"SUBLET_|getenv\(f?\"SUBLET_")
    found = [name for name in modules() if reads.search((SOURCE / name).read_text())]
    allowed = ("settings.py", "machine/", "testing/")
    assert not [name for name in found if not name.startswith(allowed)]


def test_a_folder_can_be_read_at_a_glance() -> None:
    """More than 15 modules in one folder are a drawer."""
    folders = defaultdict(list)
    for name in modules():
        if not name.endswith("__init__.py"):
            folders[Path(name).parent.as_posix()].append(name)
    assert not {folder: len(found) for folder, found in folders.items() if len(found) > 15}


def test_the_pages_use_what_is_public() -> None:
    """What a page imports is a promise."""
    wrong = []
    examples = [*(ROOT / "examples").glob("*.py")]
    for page in [*PAGES, *examples]:
        for imported in re.findall(r"^\s*(?:from|import) (sublet[\w.]*)", page.read_text(), re.M):
            if not PUBLIC.match(imported) and page.name not in ABOUT_PORTS:
                wrong.append(f"{page.name}: {imported}")
    assert not wrong


def test_what_asks_for_torch_is_for_python_3_11_only() -> None:
    """Elsewhere it would bring the newest torch, with gigabytes of CUDA. The build backend drops the marker of an extra of our own."""
    dev = [one for one in requires("sublet") or () if "extra == 'dev'" in one]
    asking = [one for one in dev if re.match(r"[\w.-]+", one)[0] in ONLY_FOR_3_11]  # type: ignore[index]
    assert len(asking) == len(ONLY_FOR_3_11)
    assert not [one for one in asking if "python_version < '3.12'" not in one]
