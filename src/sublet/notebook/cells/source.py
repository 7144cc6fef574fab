"""The texts of cells by the file names they were compiled under, so that tracebacks show their lines.

Rules of this file:
- A cell has one name, given by the notebook's compiler. A function keeps it wherever it travels, and both
  sides can show it.
- The magic's own line is line 1. It is compiled as a comment and shown as it was written.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping
from typing import Any

#: Execution count and text, by file name.
Texts = Mapping[str, tuple[int, str]]


def _counts(compiler: Any) -> dict[str, int]:
    """IPython's own table of its cells' file names, from which tracebacks print `In[3]`; it has no public
    interface."""
    counts: dict[str, int] = compiler._filename_map
    return counts


def commented(header: str) -> str:
    return f"#{header}"


def show_header(name: str, header: str) -> None:
    """Shows line 1 as it was written."""
    entry = linecache.cache.get(name)
    if header and entry is not None and len(entry) == 4 and entry[2][:1] == [f"{commented(header)}\n"]:
        linecache.cache[name] = (entry[0], entry[1], [f"{header}\n", *entry[2][1:]], name)


def enter(compiler: Any, python: str, raw: str, header: str, count: int) -> str:
    """Makes a cell known to a compiler and its tracebacks; returns its name."""
    name = str(compiler.cache(python, count, raw))
    show_header(name, header)
    return name


def texts_of(compiler: Any, names: Iterable[str]) -> Texts:
    """The texts of those names that are cells of this notebook."""
    known = _counts(compiler)
    return {name: (known[name], "".join(linecache.getlines(name))) for name in names if name in known}


def take_texts(compiler: Any, texts: Texts) -> None:
    for name, (count, text) in texts.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        _counts(compiler)[name] = count
