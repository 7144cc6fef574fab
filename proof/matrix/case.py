"""What a program of the matrix is: where it lies, how it is started, how far it has come, and what of its output varies.

Rules of this file:
- A program is only known from outside: its command line, what it prints and the files it leaves.
- `progress` finds the lines that say how far it is; its groups are numbers that never occur twice with different meanings.
- What is masked varies between two runs of plain Python too (times, names with dates); nothing else is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    model_of: str  # the published script it is built as
    source: Path  # a file, or a folder that is copied into the folder of the run
    script: str
    arguments: tuple[str, ...] = ()
    progress: str
    #: Of the folder, as globs: what must be the same to the last bit.
    model: tuple[str, ...] = ("model.*",)
    #: Regular expressions in lines and texts, replaced before they are compared.
    masks: tuple[str, ...] = ()
    #: Of keys in JSON, checkpoints and TensorBoard's tags that measure time.
    volatile: tuple[str, ...] = ()
    #: Files that are not compared, as globs.
    skip: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    pythonpath: tuple[str, ...] = ()
    every: str = "5"  # so often it is saved, in steps
    needs: tuple[str, ...] = ("torch",)
    loop_of: str = "script"  # whose loop it is: the script's, a module's beside it, or a library's

    def position(self, line: str) -> tuple[int, ...] | None:
        found = re.search(self.progress, line)
        return tuple(int(g) for g in found.groups() if g is not None) if found else None

    def masked(self, text: str, folder: str = "") -> str:
        if folder:
            text = text.replace(folder, "<folder>")
        for mask in self.masks:
            text = re.sub(mask, "~", text)
        return text

    def as_json(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def from_json(record: dict[str, Any]) -> Case:
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
    return Case(**{"model_of": record["name"], **given, "source": Path(record["source"])})


def read(path: Path) -> list[Case]:
    """Cases of a file of one's own: any scripts can be put into the same matrix."""
    return [from_json(record) for record in json.loads(path.read_text())["cases"]]


def chosen(cases: Iterable[Case], names: Iterable[str]) -> list[Case]:
    wanted = [name for given in names for name in given.replace(",", " ").split()]
    known = {case.name: case for case in cases}
    if unknown := sorted(set(wanted) - set(known)):
        raise KeyError(f"there is no program {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in wanted] if wanted else list(known.values())
