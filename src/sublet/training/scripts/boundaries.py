"""The loops that train, and the calls that mark where a step of them ends.

Rules of this file:
- Source in, a tree with calls out. Nothing is run. What is added stands on a line of the loop, so that a
  traceback shows the user's own lines.
- A training loop is the innermost loop whose body goes backward and steps, itself or in a function of the
  same file that it calls. A file may have several, and a function with one may be called from anywhere.
- A step is one turn of such a loop that comes to its end, by `continue` and `break` too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sublet.core.errors import BadInput

AnyLoop = ast.For | ast.While
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
_LOOPS = (ast.For, ast.While, ast.AsyncFor)

NAME = "__sublet__"
TWO_LINES = (
    "change two lines instead: run = sublet.train('name', state={'model': model, 'optim': optimizer}) before "
    "the loop, and for step in run.steps(n) as the loop"
)
#: What a training loop does, in the order in which it is looked for.
_SIGNS = (
    ({"backward", "step"}, "its body calls backward() and step()"),
    ({"backward"}, "its body calls backward()"),
    ({"descent"}, "its body descends: w -= rate * gradient"),
    ({"partial_fit"}, "its body calls partial_fit()"),
    ({"updates"}, "its body updates by gradients: optimizer.update(grads)"),
    ({"carried"}, "its body makes a new state from the old one: state = step(state, batch)"),
)
#: Carrying a state through a function is how JAX trains, and how much else is done.
_JAX = ("jax", "flax", "optax", "equinox")
_ONLY_WITH = {"updates": _JAX, "carried": _JAX}
_UPDATING = ("update", "apply_gradients", "apply_updates")


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    line: int
    kind: str  # "for" or "while"
    scope: str  # the function it stands in; "" for the module
    why: str


@dataclass(slots=True)
class Source:
    """One file of the program, read."""

    path: str
    tree: ast.Module
    loops: list[TrainingLoop] = field(default_factory=list)


def orders_by_hash(tree: ast.Module) -> bool:
    """Whether the order of what it makes may be that of hashes, which are others in each process."""
    return any(
        isinstance(node, (ast.Set, ast.SetComp))
        or (isinstance(node, ast.Name) and node.id in ("set", "frozenset", "hash"))
        for node in ast.walk(tree)
    )


def read_source(text: str, path: str) -> ast.Module:
    try:
        return ast.parse(text, path)
    except SyntaxError as error:
        raise BadInput(
            f"{path} is no Python program: {error.msg} in line {error.lineno}; nothing was started",
            remedy="correct it",
        ) from error


def with_boundaries(text: str, path: str, *, line: int | None = None) -> Source:
    """The file with its steps marked. `line` names the loop where the source does not."""
    tree = read_source(text, path)
    finder = _LoopFinder(tree, path)
    found = finder.named(line) if line is not None else finder.training_loops()
    source = Source(path, tree)
    for loop, why in found:
        finder.check(loop)
        kind = "for" if isinstance(loop, ast.For) else "while"
        source.loops.append(TrainingLoop(loop.lineno, kind, finder.scope_of(loop), why))
    for loop, _ in found:
        _mark(finder.parents, loop, outermost=finder.outermost(loop))
    ast.fix_missing_locations(tree)
    return source


def uses_sublet_train(tree: ast.Module) -> int | None:
    """The line in which a script resumes by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("sublet.train", "sublet.run_step"):
            return node.lineno
    return None


def imported_names(tree: ast.Module) -> set[str]:
    """The modules that it imports, by their whole names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


class _LoopFinder:
    def __init__(self, tree: ast.Module, path: str) -> None:
        self.tree, self.path = tree, path
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._imported = {name.partition(".")[0] for name in imported_names(tree)}

    # which loops

    def named(self, line: int) -> list[tuple[AnyLoop, str]]:
        loops = [node for node in ast.walk(self.tree) if isinstance(node, _LOOPS)]
        named = [loop for loop in loops if loop.lineno == line]
        if len(named) != 1 or isinstance(named[0], ast.AsyncFor):
            lines = ", ".join(str(n) for n in sorted(loop.lineno for loop in loops)) or "none"
            raise BadInput(
                f"{self.path}: line {line} is no loop; its loops begin in lines {lines}; nothing was started",
                remedy="correct --loop",
            )
        return [(named[0], "named by --loop")]

    def training_loops(self) -> list[tuple[AnyLoop, str]]:
        loops = [node for node in ast.walk(self.tree) if isinstance(node, _LOOPS)]
        for wanted, why in _SIGNS:
            only_with = next((needed for sign, needed in _ONLY_WITH.items() if sign in wanted), None)
            if only_with is not None and self._imported.isdisjoint(only_with):
                continue
            found = self._innermost(loops, wanted) + self._through_calls(wanted)
            known: dict[int, AnyLoop] = {id(loop): loop for loop in found if isinstance(loop, AnyLoop)}
            inside = {id(outer) for loop in known.values() for outer in self._around(loop)}
            chosen = [loop for loop in known.values() if id(loop) not in inside]
            if chosen:
                return [(loop, why) for loop in sorted(chosen, key=lambda loop: loop.lineno)]
        return []

    def _innermost(self, loops: Iterable[ast.AST], wanted: set[str]) -> list[ast.AST]:
        marked = [loop for loop in loops if wanted <= self._signs(loop)]
        inside = {id(outer) for inner in marked for outer in self._around(inner)}
        return [loop for loop in marked if id(loop) not in inside]

    def _through_calls(self, wanted: set[str]) -> list[ast.AST]:
        """The step is a function of its own: its loops are where it is called."""
        found: list[ast.AST] = []
        for function in [n for n in ast.walk(self.tree) if isinstance(n, AnyFunction)]:
            inner = [n for n in ast.walk(function) if n is not function and isinstance(n, AnyFunction)]
            if not wanted <= self._signs(function) or any(wanted <= self._signs(n) for n in inner):
                continue
            if any(isinstance(n, _LOOPS) and wanted <= self._signs(n) for n in ast.walk(function)):
                continue
            found += self._loops_that_call(function, set())
        return found

    def _loops_that_call(self, function: ast.AST, seen: set[int]) -> list[ast.AST]:
        assert isinstance(function, AnyFunction)
        seen.add(id(function))
        found: list[ast.AST] = []
        for call in self._calls_of(function):
            for outer in self._around(call):
                if isinstance(outer, _LOOPS):
                    found.append(outer)
                    break
                if isinstance(outer, AnyFunction):
                    if id(outer) not in seen:
                        found += self._loops_that_call(outer, seen)
                    break
        return found

    def _calls_of(self, function: AnyFunction) -> list[ast.Call]:
        method = isinstance(self.parents.get(function), ast.ClassDef)
        name = function.name
        if method and name in ("__call__", "forward"):
            return [
                n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
            ]
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
            and (
                (method and isinstance(node.func, ast.Attribute) and node.func.attr == name)
                or (not method and isinstance(node.func, ast.Name) and node.func.id == name)
            )
            and not any(outer is function for outer in self._around(node))
        ]

    def _signs(self, node: ast.AST) -> set[str]:
        found = set()
        for inside in ast.walk(node):
            if isinstance(inside, ast.Call) and isinstance(inside.func, ast.Attribute):
                if inside.func.attr in ("backward", "step", "partial_fit"):
                    found.add(inside.func.attr)
                elif inside.func.attr in _UPDATING and any("grad" in name for name in _given_names(inside)):
                    found.add("updates")
            elif (target := _descent(inside)) is not None and not _over_parameters(inside, target, node):
                found.add("descent")
            elif isinstance(inside, ast.Assign) and _carries(inside):
                found.add("carried")
        return found

    # what is around it

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope_of(self, node: ast.AST) -> str:
        names = [n.name for n in self._around(node) if isinstance(n, (*_FUNCTIONS, ast.ClassDef))]
        return ".".join(reversed(names))

    def outermost(self, loop: AnyLoop) -> AnyLoop:
        """The outermost loop around it in its function."""
        found: AnyLoop = loop
        for outer in self._around(loop):
            if isinstance(outer, AnyLoop):
                found = outer
            elif isinstance(outer, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
                break
        return found

    def check(self, loop: AnyLoop) -> None:
        """Refuse what a frame cannot be entered again in."""
        for outer in self._around(loop):
            if isinstance(outer, ast.AsyncFunctionDef):
                raise self._refuse(loop, "the training loop is inside asynchronous code")
            if isinstance(outer, ast.ClassDef):
                raise self._refuse(loop, "the training loop stands in the body of a class")
            if isinstance(outer, ast.FunctionDef):
                own = _inside(outer)
                if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in own):
                    raise self._refuse(loop, f"the training loop is inside the generator {outer.name}")
                return

    def _refuse(self, node: AnyLoop, what: str) -> BadInput:
        return BadInput(
            f"{self.path}, line {node.lineno}: {what}, which cannot be resumed; nothing was started",
            remedy=TWO_LINES,
        )


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _inside(function: ast.AST) -> Iterator[ast.AST]:
    """Of this function, and not of those inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _inside(child)


def _descent(node: ast.AST) -> ast.expr | None:
    """The variable of a gradient step: the target of `w -= a * b` or `w = w - a * b`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub):
        return node.target if _is_product(node.value) else None
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.BinOp):
        target, value = node.targets[0], node.value
        same = isinstance(value.op, ast.Sub) and ast.unparse(target) == ast.unparse(value.left)
        return target if same and _is_product(value.right) else None
    return None


def _is_product(value: ast.expr) -> bool:
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Mult, ast.Div)) for n in ast.walk(value))


def _over_parameters(statement: ast.AST, target: ast.expr, loop: ast.AST) -> bool:
    """`for p, g in zip(params, grads): p -= rate * g` goes over the parameters, not over the data."""
    return isinstance(loop, ast.For) and bool(_names(target) & _names(loop.target))


def _carries(statement: ast.Assign) -> bool:
    """`state, loss = step(state, batch)`."""
    if not isinstance(statement.value, ast.Call):
        return False
    bound = set[str]().union(*(_names(target) for target in statement.targets))
    given = [*statement.value.args, *(keyword.value for keyword in statement.value.keywords)]
    return any(isinstance(value, ast.Name) and value.id in bound for value in given)


def _given_names(call: ast.Call) -> set[str]:
    """Of its arguments, by position or by keyword."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    named = {keyword.arg for keyword in call.keywords if keyword.arg}
    return {value.id for value in given if isinstance(value, ast.Name)} | named


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


# --- marking ------------------------------------------------------------------------------------------------


def _mark(parents: dict[ast.AST, ast.AST], loop: AnyLoop, *, outermost: AnyLoop) -> None:
    for parent, leaving in list(_ends_of_turns(loop)):
        _put(parent, leaving, [*_call("step", leaving), leaving])
    last = loop.body[-1]
    if not isinstance(last, (ast.Continue, ast.Break, ast.Return, ast.Raise)):
        loop.body += _call("step", last, end=True)
    _put(parents[loop], loop, [*_call("begin", loop), loop])
    _put(parents[outermost], outermost, [outermost, *_call("after", outermost)])


def _call(name: str, at: ast.AST, *, end: bool = False) -> list[ast.stmt]:
    made = ast.parse(f"{NAME}.{name}()").body
    for statement in made:
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                ast.copy_location(node, at)
                line = getattr(at, "end_lineno", None) if end else getattr(at, "lineno", None)
                node.lineno = node.end_lineno = line or 1  # type: ignore[attr-defined]
                node.end_col_offset = node.col_offset  # type: ignore[attr-defined]
    return made


def _ends_of_turns(loop: AnyLoop) -> Iterator[tuple[ast.AST, ast.stmt]]:
    """The `break`s and `continue`s of this loop, not of one inside it."""

    def follow(parent: ast.AST, children: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, ast.stmt]]:
        for child in children:
            if isinstance(child, (ast.Break, ast.Continue)):
                yield parent, child
            elif isinstance(child, _LOOPS):
                yield from follow(child, child.orelse)
            elif not isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
                yield from follow(child, ast.iter_child_nodes(child))

    return follow(loop, loop.body)


def _put(parent: ast.AST, node: ast.stmt, by: list[ast.stmt]) -> None:
    for _, value in ast.iter_fields(parent):
        if isinstance(value, list) and any(member is node for member in value):
            at = next(i for i, member in enumerate(value) if member is node)
            value[at : at + 1] = by
            return
    raise AssertionError("a statement is in what holds it")
