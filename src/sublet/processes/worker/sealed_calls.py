"""What a sealed call may be, inside the worker: a pickled function, source text, or the first call with its
terms.

Rules of this file:
- Bytes in, bytes out. The worker is the only place where a pickle of the user's is opened; what comes back is
  a pickle again, or JSON.
- Source runs in `__main__`, which lives as long as the worker. Its tracebacks show its own lines and none of
  ours.
- What the source shows goes into the same stream of frames as what it prints, so that both appear in order.
- The end of the code is not the end of the worker: `SystemExit` is reported like any exception.
"""

from __future__ import annotations

import ast
import builtins
import json
import linecache
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from sublet.core.errors import BadInput
from sublet.core.studio.frames import text_of
from sublet.machine import lease_environment
from sublet.ports.worker import Part
from sublet.processes.channel.pickling import main_globals, pack
from sublet.processes.worker import screen, worker

#: How many sources are kept for tracebacks; functions of older ones are shown without lines.
SOURCES_KEPT = 500
#: A longer text is cut, because it is only to be looked at.
SHOWN_MOST_CHARACTERS = 1 << 20
_RICH = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
}
_RICH_MOST_BYTES = 16 << 20

worker.not_shown(__file__)
worker.not_shown(ast.__file__)


def begin(parts: list[memoryview]) -> list[Part]:
    """The first call: the terms as JSON, see `worker.WorkerTerms`. Without a path, modules are found where
    the zygote found them."""
    terms = _object(parts)
    worker.set_up_worker(
        worker.WorkerTerms(
            lease_id=str(terms["lease_id"]),
            epoch=int(terms["epoch"]),
            environment={str(name): str(value) for name, value in terms["environment"].items()},
            folder=str(terms["folder"]),
            path=tuple(
                terms.get("path")
                or [terms["folder"], *(place for place in sys.path if place not in ("", "/"))]
            ),
        )
    )
    screen.installed(worker.screen_fd)
    return [json.dumps({"pid": os.getpid()}).encode()]


def pickled(parts: list[memoryview]) -> list[Part]:
    """Run a call that `processes/worker/main_module.py` packed, and pack its result. What it raises is a
    packed `worker.Failure`."""
    here, begun = os.getpid(), False
    screen.installed(worker.screen_fd)
    try:
        with worker.interrupts_held_back():  # for the user's code: to import what it needs may take a while
            function, values, several = worker.prepare(parts)
        begun = True
        result = worker.call_many(function, values) if several else worker.call_once(function, values)
        return list(pack(result)) if os.getpid() == here else []
    except worker.LeaseEnding:
        raise
    except BaseException as e:
        if os.getpid() != here:
            raise
        worker.ignore_interrupts()
        raise worker.SealedFailure(pack(worker.failure_of(e, begun=begun))) from None


# --- source ---


_ran = 0
_sources: deque[str] = deque()


def code(parts: list[memoryview]) -> list[Part]:
    """Run JSON {"code", "name"}. The value of a last expression is shown as a result; the answer is JSON
    {"launches"}."""
    order = _object(parts)
    source = text_of(order, "code", most=1 << 26)
    frames = screen.installed(worker.screen_fd)
    here, launched = os.getpid(), lease_environment.launches()
    try:
        try:
            body, last = _compiled(source, text_of(order, "name", default=""))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            raise worker.SealedFailure([_told_of_syntax(e)]) from None
        space = main_globals()
        space.setdefault("__builtins__", builtins)
        exec(body, space)
        if last is not None:
            _show(frames, eval(last, space), space)
    except (worker.LeaseEnding, worker.SealedFailure):
        raise
    except BaseException as e:
        if os.getpid() != here:
            raise
        worker.ignore_interrupts()
        raise worker.SealedFailure(
            [worker.told(e, launches=lease_environment.launches() - launched)]
        ) from None
    return [json.dumps({"launches": lease_environment.launches() - launched}).encode()]


def _compiled(source: str, name: str) -> tuple[CodeType, CodeType | None]:
    """Compile the statements, and the last one apart if it is an expression."""
    global _ran
    _ran += 1
    file = f"<{name or 'code'} {_ran}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    _sources.append(file)
    while len(_sources) > SOURCES_KEPT:
        linecache.cache.pop(_sources.popleft(), None)
    tree = ast.parse(source, file)
    last: CodeType | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        expression = tree.body.pop()
        assert isinstance(expression, ast.Expr)
        last = compile(ast.Expression(expression.value), file, "eval", dont_inherit=True)
    return compile(tree, file, "exec", dont_inherit=True), last


def _told_of_syntax(error: BaseException) -> bytes:
    """Describe a syntax error, which names its place in the source; the compiler's own frames are of no
    use."""
    text = "".join(traceback.format_exception_only(error))
    return json.dumps(
        {"kind": type(error).__name__, "text": str(error), "trace": text, "launches": 0}
    ).encode()


def _show(frames: screen.WorkerScreen, value: Any, space: dict[str, Any]) -> None:
    if value is None:
        return
    text = repr(value)
    if len(text) > SHOWN_MOST_CHARACTERS:
        text = f"{text[:SHOWN_MOST_CHARACTERS]}… ({len(text)} characters in all)"
    data: dict[str, Any] = {"text/plain": text}
    for kind, method in _RICH.items():
        rich = _rich(value, method)
        if rich is not None:
            data[kind] = rich
    space["_"] = value
    for stream in (sys.stdout, sys.stderr):  # the user's own, perhaps: what waits there was printed before
        if stream is not None:
            stream.flush()
    frames.show({"what": "result", "data": data, "metadata": {}})


def _rich(value: Any, method: str) -> str | bytes | None:
    """Return the object's rich representations. One that has none is shown as text."""
    if isinstance(value, type):
        return None
    try:
        made: Callable[[], Any] | None = getattr(value, method, None)
        shown = made() if callable(made) else None
    except Exception:
        return None
    if isinstance(shown, tuple):  # with metadata
        shown = shown[0] if shown else None
    return shown if isinstance(shown, str | bytes) and len(shown) <= _RICH_MOST_BYTES else None


def _object(parts: Sequence[memoryview]) -> dict[str, Any]:
    found = json.loads(bytes(parts[0])) if parts else None
    if not isinstance(found, dict):
        raise BadInput(
            "a sealed call needs one JSON object", remedy="use one version of sublet on both sides"
        )
    return found
