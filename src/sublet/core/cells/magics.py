"""What texts in a cell say about names: magics, shell lines, and code in strings.

Rules of this file:
- A cell arrives transformed: a magic is a call of a method of `get_ipython()` with texts. Only constant texts
  are read.
- Text that is Python is followed as Python. Of any other text every identifier may be a name that is read,
  bound or deleted.
- The shell sees names only between braces and after `$`. Programs in another language see none.
- Text that is made up while the cell runs cannot be known here: that is what `--in` is for.
"""

from __future__ import annotations

import ast
import keyword
import re
from dataclasses import dataclass
from textwrap import dedent

#: Run their text as Python, in the notebook or in a function of their own.
_PYTHON = frozenset(["capture", "prun", "time", "timeit"])
#: The body of these is a program, or a document, of its own.
_NOT_PYTHON = frozenset(
    [
        "!",
        "bash",
        "cmd",
        "file",
        "html",
        "HTML",
        "javascript",
        "js",
        "latex",
        "markdown",
        "perl",
        "ruby",
        "script",
        "sh",
        "svg",
        "system",
        "sx",
        "writefile",
    ]
)
_SHELL = frozenset(["system", "getoutput"])
#: Functions and methods that are given expressions as text: Python's own, and those of pandas.
_GIVEN_EXPRESSIONS = frozenset(["eval", "query"])

_WORD = re.compile(r"[^\W\d]\w*")
_OPTIONS = re.compile(r"(?:\s*--?[A-Za-z][\w-]*(?:\s*=?\s*\d+)?(?=\s|$))+")
_BRACES = re.compile(r"\{.*\}", re.DOTALL)
_AFTER_DOLLAR = re.compile(r"\$\{?([^\W\d]\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MagicCall:
    """What one call with texts reads, runs and changes."""

    reads: frozenset[str] = frozenset()
    body: tuple[ast.stmt, ...] = ()
    to_the_end: bool = False  # when the call is over, so is the body: what raises inside goes on outside
    changes: frozenset[str] = frozenset()  # read, bound or deleted, perhaps


def magic_call_of(call: ast.Call) -> MagicCall | None:
    """None for a call that has nothing to do with names."""
    method = getattr(call.func, "attr", getattr(call.func, "id", ""))
    texts = [
        part.value
        for argument in call.args
        for part in ast.walk(argument)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    if not _is_of_the_shell(call.func):
        if method in _GIVEN_EXPRESSIONS:
            return MagicCall(reads=identifiers(*texts))
        return _anything(*texts) if method == "exec" else None
    match method, texts:
        case name, [text] if name in _SHELL:
            return MagicCall(reads=_seen_by_the_shell(text))
        case "run_line_magic", [name, text] if name in _PYTHON:
            return _python(text) or _anything(text)
        case "run_cell_magic", [name, line, text] if name in _PYTHON:
            return _cell_of_python(name, line, text)
        case "run_cell_magic", [name, line, text] if name in _NOT_PYTHON:
            seen = _seen_by_the_shell(text) if name in ("!", "sx", "system") else frozenset()
            return MagicCall(reads=seen, changes=identifiers(line))
        case _:
            return _anything(*texts)


def identifiers(*texts: str) -> frozenset[str]:
    words = (word for text in texts for word in _WORD.findall(text))
    return frozenset(w for w in words if w.isidentifier() and not keyword.iskeyword(w) and w != "__debug__")


def _is_of_the_shell(method: ast.expr) -> bool:
    match method:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython"))):
            return True
        case _:
            return False


def _anything(*texts: str) -> MagicCall:
    return MagicCall(changes=identifiers(*texts))


def _cell_of_python(name: str, line: str, text: str) -> MagicCall:
    run = _python(text) or _anything(text)
    said = identifiers(_OPTIONS.sub("", line))
    if name != "capture":  # what stands in the line is code that runs first
        return MagicCall(body=run.body, changes=run.changes | said)
    # It is where the output goes; or went, when the cell ends with a semicolon.
    after = "del {0}" if text.rstrip().endswith(";") else "{0} = None"
    kept = [ast.parse(after.format(word)).body[0] for word in sorted(said)]
    return MagicCall(body=(*run.body, *kept), changes=run.changes)


def _python(text: str) -> MagicCall | None:
    """The text as Python, without the options before it if need be; None when it is something else."""
    text = dedent(text).strip()
    options = _OPTIONS.match(text)
    for attempt in (text, text[options.end() :].strip() if options else text):
        try:
            tree = ast.parse(attempt)
            compile(tree, "<magic>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if any(isinstance(s, ast.ImportFrom) and s.module == "__future__" for s in tree.body):
            return None  # cannot stand in the middle of a cell
        # An option may say that errors do not matter (%time --no-raise-error).
        return MagicCall(body=tuple(tree.body), to_the_end=attempt is text)
    return None


def _seen_by_the_shell(text: str) -> frozenset[str]:
    return identifiers(*_BRACES.findall(text), *_AFTER_DOLLAR.findall(text))
