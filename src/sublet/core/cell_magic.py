"""What the magics and shell lines of a cell say about names.

Rules of this file:
- A cell arrives transformed: a magic is a call of a method of `get_ipython()` with texts. Only constant texts are read.
- Text that is Python is followed as Python. Of any other text every identifier may be a name of the notebook.
- The shell sees names only in `{...}` and after `$`; doubled, they are the shell's own.
- The body of a cell magic is not transformed: its own magics are, here, when it is not Python as it stands.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

#: Run their Python in the notebook itself: what it binds stays.
_KEEPING = frozenset(["time", "prun", "capture"])
#: Run their Python and keep none of its names.
_TIMING = frozenset(["timeit", "memit"])
_SHELL = frozenset(["system", "getoutput"])

_WORD = re.compile(r"[^\W\d]\w*")
_OPTIONS = re.compile(r"(?:\s*--?[A-Za-z][\w-]*(?:\s*=?\s*\d+)?(?=\s|$))+")
_IN_SHELL = re.compile(r"\{\{|\$\$|\$\{?([^\W\d]\w*)|\{([^{}]*)\}")
_NESTED = re.compile(r"(\s*(?:[\w.,\s\[\]*]+=)?\s*)([%!]+)\s*(\S*)\s*(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one magic reads, runs and binds."""

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    body: tuple[ast.stmt, ...] = ()
    keeps: bool = False  # what the body binds stays in the notebook


def asked(call: ast.Call) -> Asked | None:
    """None for a call that is no magic, or one whose texts are not known before it runs."""
    method = call.func
    if not (
        isinstance(method, ast.Attribute)
        and isinstance(method.value, ast.Call)
        and isinstance(method.value.func, ast.Name)
        and method.value.func.id == "get_ipython"
    ):
        return None
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if len(texts) != len(call.args):
        return None
    match method.attr, texts:
        case name, [text] if name in _SHELL:
            return Asked(reads=frozenset(_read_by_the_shell(text)))
        case "run_line_magic", [name, text, *_]:
            return _line_magic(name, text)
        case "run_cell_magic", [name, line, text, *_]:
            return _cell_magic(name, line, text)
        case _:
            return None


def identifiers(text: str) -> frozenset[str]:
    return frozenset(word for word in _WORD.findall(text) if not keyword.iskeyword(word))


def _line_magic(name: str, text: str) -> Asked:
    body = _python(text) if name in _KEEPING | _TIMING else None
    if body is None:
        return Asked(reads=identifiers(text))
    return Asked(body=tuple(body), keeps=name in _KEEPING)


def _cell_magic(name: str, line: str, text: str) -> Asked:
    reads, writes, before = identifiers(line), frozenset[str](), list[ast.stmt]()
    if name == "capture":  # its line is where the output goes
        writes, reads = frozenset(_WORD.findall(_OPTIONS.sub("", line))[:1]), frozenset()
    elif name in _KEEPING | _TIMING:  # the line of timeit is code that runs first
        before = _python(line) or []
        reads = frozenset() if before or not _OPTIONS.sub("", line).strip() else reads
    body = _python(text)
    if body is None:
        return Asked(reads=reads | identifiers(text), writes=writes)
    return Asked(reads=reads, writes=writes, body=(*before, *body), keeps=name in _KEEPING)


def _python(text: str) -> list[ast.stmt] | None:
    """The text as Python, without the options before it if need be; None when it is something else."""
    for attempt in (_plain, _transformed, _without_options):
        try:
            return ast.parse(attempt(text)).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _plain(text: str) -> str:
    return dedent(text).strip()


def _without_options(text: str) -> str:
    return _OPTIONS.sub("", _plain(text), count=1).strip()


def _transformed(text: str) -> str:
    """Its own magics as calls, the way the text around it was transformed."""
    lines = _plain(text).split("\n")
    if lines[0].startswith("%%"):
        name, _, rest = lines[0][2:].partition(" ")
        return f"get_ipython().run_cell_magic({name!r}, {rest!r}, {chr(10).join(lines[1:])!r})"
    return "\n".join(_transformed_line(line) for line in lines)


def _transformed_line(line: str) -> str:
    found = _NESTED.fullmatch(line)
    if found is None:
        return line
    before, sign, first, rest = found.groups()
    if sign.startswith("!"):
        method = "getoutput" if "=" in before or sign == "!!" else "system"
        return f"{before}get_ipython().{method}({f'{first} {rest}'!r})"
    return f"{before}get_ipython().run_line_magic({first!r}, {rest!r})"


def _read_by_the_shell(text: str) -> Iterator[str]:
    for name, expression in _IN_SHELL.findall(text):
        if name:
            yield name
        elif expression:
            yield from identifiers(expression)
