"""Draws docs/architecture.svg: the layers of the import contract, and which package imports which. `make docs`; a test compares.

Arrows to what every package uses (core, ports, errors, machine, settings) are left out. The layers are read from pyproject.toml and the arrows from the import graph, so the picture cannot show a house that is not there.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sublet"
#: What every package uses: arrows to these would hide the others.
USED_BY_ALL = {"core", "ports", "errors", "machine", "settings"}
WIDTH, ROW, BOX_HEIGHT, MARGIN = 1180, 78, 44, 20

STYLE = """
  text { font: 14px ui-sans-serif, system-ui, sans-serif; fill: #1d2733; text-anchor: middle }
  rect { fill: #eef3f8; stroke: #8aa0b4 }
  path { fill: none; stroke: #5b7fa6; stroke-opacity: .35 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4ebf2 } rect { fill: #1f2a36; stroke: #5c7186 } path { stroke: #8fb4dc }
  }
"""


def layers() -> list[list[str]]:
    """The rows of the contract, top first. The packages of one row do not know each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [[name.strip() for name in row.split("|")] for row in contracts[0]["layers"]]


def imports() -> Counter[tuple[str, str]]:
    """(package, package it imports) with the number of modules that do."""
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        used = set()
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module == "sublet":
                names = [f"sublet.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            used |= {name.split(".")[1] for name in names if name.startswith("sublet.")}
        found.update((package, other) for other in used if other != package)
    return found


def drawing() -> str:
    rows = layers()
    place: dict[str, tuple[float, float, float]] = {}
    boxes = []
    for number, row in enumerate(rows):
        room = (WIDTH - 2 * MARGIN) / len(row)
        wide = min(180.0, room - 12)
        for column, name in enumerate(row):
            x, y = MARGIN + room * (column + 0.5), MARGIN + number * ROW + BOX_HEIGHT / 2
            place[name] = (x, y, wide)
            boxes.append(
                f'<rect x="{x - wide / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{wide:.0f}" '
                f'height="{BOX_HEIGHT}" rx="6"/><text x="{x:.0f}" y="{y + 5:.0f}">{escape(name)}</text>'
            )
    arrows = []
    for (package, other), count in sorted(imports().items()):
        if package in place and other in place and other not in USED_BY_ALL:
            (x1, y1, _), (x2, y2, _) = place[package], place[other]
            y1, y2 = y1 + BOX_HEIGHT / 2, y2 - BOX_HEIGHT / 2
            bend = (y2 - y1) / 2
            thick = 1 + min(5.0, count / 8)
            arrows.append(
                f'<path stroke-width="{thick:.1f}" '
                f'd="M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"/>'
            )
    height = 2 * MARGIN + (len(rows) - 1) * ROW + BOX_HEIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    title = "<title>sublet's packages: each row imports only rows below it</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *arrows, *boxes, "</svg>", ""])


if __name__ == "__main__":
    (ROOT / "docs" / "architecture.svg").write_text(drawing())
