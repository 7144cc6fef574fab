"""The names a notebook cell takes from the notebook and gives back.

Rules of this file:
- A name the cell may read before it bound it is a read. So is every name it may delete: only where it was
  there before does one see that it is gone. The caller takes those that the notebook has: builtins are listed
  too.
- The order in which a cell runs is `global_reads.py`; here a copy of the cell is made plain for it. That copy
  never runs.
- A magic becomes the statements it runs (`magics.py`), before the statement it stands in. Those that may
  not run, or not to their end, stand under an `if`: there they settle nothing.
- `with` may swallow what its body raises, so that the body binds nothing for sure; but not the well-known
  `_LETS_THROUGH`.
- A decorator may call what it is given; but not the well-known `_ONLY_WRAP`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType

from sublet.core.cells.global_reads import bound_by, deleted_by, read_from_outside
from sublet.core.cells.magics import MagicCall, magic_call_of

#: Decorators that keep the function they are given and do not call it there and then, by their last name.
_ONLY_WRAP = frozenset(
    [
        "asynccontextmanager",
        "cache",
        "contextmanager",
        "enable_grad",
        "inference_mode",
        "lru_cache",
        "no_grad",
        "on_gpu",
        "wraps",
    ]
)
#: Context managers that do not swallow exceptions, by their last name.
_LETS_THROUGH = frozenset(
    [
        "NamedTemporaryFile",
        "Pool",
        "ProcessPoolExecutor",
        "TemporaryDirectory",
        "ThreadPoolExecutor",
        "autocast",
        "catch_warnings",
        "closing",
        "device",
        "enable_grad",
        "errstate",
        "gpu",
        "inference_mode",
        "no_grad",
        "nullcontext",
        "open",
        "option_context",
        "profile",
        "redirect_stderr",
        "redirect_stdout",
        "set_grad_enabled",
        "stream",
        "tqdm",
    ]
)
#: Called without arguments, they give the cell its own namespace.
_OWN_NAMESPACE = frozenset(["dir", "globals", "locals", "vars"])
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_With = ast.With | ast.AsyncWith


@dataclass(frozen=True, slots=True, kw_only=True)
class CellNames:
    """Sorted, each."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()


def names_of(source: str) -> CellNames:
    """The names of a cell that is already plain Python. Raises SyntaxError for what could not run."""
    try:
        tree = ast.parse(source, "<cell>")
        _compiled(tree)
        looked_up = _looked_up(tree)
        _make_plain(tree)
        code = _compiled(tree)
    except (ValueError, RecursionError, MemoryError) as problem:  # a null byte, or too deep for the compiler
        raise SyntaxError(f"the cell cannot be compiled: {problem}") from problem
    deletes = deleted_by(code)
    return CellNames(
        reads=tuple(sorted(read_from_outside(code) | looked_up | deletes)),
        writes=tuple(sorted(bound_by(code))),
        deletes=tuple(sorted(deletes)),
    )


def _compiled(tree: ast.Module) -> CodeType:
    code: CodeType = compile(tree, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return code


def _looked_up(tree: ast.Module) -> set[str]:
    """Names that are looked up as texts: `if "model" not in globals()`."""
    nodes = list(ast.walk(tree))
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[]) if name in _OWN_NAMESPACE:
                texts = (n.value for n in nodes if isinstance(n, ast.Constant))
                return {text for text in texts if isinstance(text, str) and text.isidentifier()}
            case _:
                pass
    return set()


def _make_plain(tree: ast.Module) -> None:
    """Functions and classes are left as they are, because their order does not matter."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        for part in ("body", "orelse", "finalbody"):
            block = getattr(node, part, None)
            if block:
                block[:] = _plain(block)
        inner = ast.iter_child_nodes(node)
        waiting += [at for at in inner if not isinstance(at, (_Function, ast.ClassDef, ast.expr))]


def _plain(block: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in block:
        for call in _calls(node):
            found = magic_call_of(call)
            if found is not None:
                at_once = isinstance(node, (ast.Expr, ast.Assign)) and node.value is call
                yield from _said(found, surely=at_once and found.to_the_end)
        if isinstance(node, _With) and _all_are(_LETS_THROUGH, (item.context_expr for item in node.items)):
            for item in node.items:
                yield _evaluated(item.context_expr, item.optional_vars)
            yield from _plain(node.body)
        elif isinstance(node, _Function) and _all_are(_ONLY_WRAP, node.decorator_list):
            for decorator in node.decorator_list:
                yield _evaluated(decorator)
            node.decorator_list = []
            yield node
        elif isinstance(node, ast.Global):  # says nothing here, and may not follow what was put before it
            yield ast.copy_location(ast.Pass(), node)
        else:
            yield node


def _calls(node: ast.stmt) -> Iterator[ast.Call]:
    """Calls in the statement itself; in a function or class, anywhere inside."""
    whole = isinstance(node, (_Function, ast.ClassDef))
    waiting: list[ast.AST] = [node]
    while waiting:
        at = waiting.pop()
        if isinstance(at, ast.Call):
            yield at
        waiting += [inner for inner in ast.iter_child_nodes(at) if whole or not isinstance(inner, ast.stmt)]


def _said(found: MagicCall, *, surely: bool) -> Iterator[ast.stmt]:
    """What the call does to names, as statements."""
    for name in sorted(found.reads):
        yield from ast.parse(name).body
    if surely:
        yield from _plain(found.body)
    elif found.body:
        yield _perhaps(*found.body)
    for name in sorted(found.changes):
        yield _perhaps(*ast.parse(f"{name} = None; del {name}").body)


def _perhaps(*body: ast.stmt) -> ast.stmt:
    made = ast.parse("if get_ipython: pass").body[0]
    assert isinstance(made, ast.If)
    made.body = list(body)
    return made


def _evaluated(value: ast.expr, target: ast.expr | None = None) -> ast.stmt:
    made = ast.Expr(value) if target is None else ast.Assign([target], value)
    return ast.copy_location(made, value)


def _all_are(known: frozenset[str], expressions: Iterable[ast.expr]) -> bool:
    return all(_last_name(expression) in known for expression in expressions)


def _last_name(node: ast.expr) -> str:
    """`suppress` of `contextlib.suppress(KeyError)`."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
