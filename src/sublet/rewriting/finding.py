"""Where a script trains: its training loop, the loops around it, and which variables carry state from one step to the next.

Rules of this file:
- Source in, facts or one error out. Nothing is run and nothing is changed; what cannot be resumed exactly is refused with its line.
- The training loop is the innermost loop whose body goes backward and steps. The loops around it count across functions, as long as each
  function on the way is called in one place.
- In doubt a variable is kept: one too many costs bytes, one too few costs the run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from sublet.core.errors import BadInput
from sublet.rewriting.names import (
    Names,
    iterator_reads,
    left_from_one_to_the_next,
    names_in,
    names_of_functions,
    names_touched,
)

AnyLoop = ast.For | ast.While
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef

TWO_LINES = (
    "change two lines instead: run = sublet.train('name', state={'model': model, 'optim': optimizer}) before the loop, "
    "and for step in run.steps(n) as the loop"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One level: the last is the training loop, those before it enclose it."""

    node: AnyLoop
    line: int
    scope: str  # key of the scope it stands in

    @property
    def kind(self) -> str:
        return "for" if isinstance(self.node, ast.For) else "while"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A function on the way to the training loop, or the module."""

    key: str  # "train", "Trainer.fit", "" for the module
    name: str  # as its code object is called
    line: int  # the first of its code, decorators included
    kept: frozenset[str] = frozenset()  # variables that carry state
    stored: frozenset[str] = (
        frozenset()
    )  # of these, the ones its loops bind anew: they have to be bound again
    mutated: frozenset[str] = frozenset()  # of these, the ones changed in place
    used: frozenset[str] = frozenset()  # objects whose methods its loops call, or that they give to somebody
    carried: frozenset[str] = frozenset()  # bound in the training loop itself, and read in a later iteration
    dropped: frozenset[str] = frozenset()  # assigned in the loop and of no use after the iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    tree: ast.Module
    loops: tuple[Loop, ...]  # outermost first
    scopes: tuple[Scope, ...]  # innermost first; the last is the module
    grads_carried: bool  # whether .grad is of use after an iteration
    why: str
    parents: dict[ast.AST, ast.AST] = field(repr=False)

    @property
    def training(self) -> Loop:
        return self.loops[-1]

    @property
    def shape(self) -> list[str]:
        """What a saved place refers to: a script with another one cannot continue it."""
        return [f"{loop.kind} in {loop.scope or 'the module'}" for loop in self.loops]


def find(source: str, path: str, *, line: int | None = None) -> Found:
    """`line` names the loop where the source does not."""
    try:
        tree = ast.parse(source, path)
    except SyntaxError as e:
        raise BadInput(
            f"{path} is no Python program: {e.msg} in line {e.lineno}; nothing was started",
            remedy="correct it",
        ) from e
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    script = _Script(tree, path, parents)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("sublet.train", "sublet.run_step"):
            raise script.refuse(node, "it resumes by itself", "run it with plain python")
    training, why = script.training_loop(line)
    return script.around(training, why)


class _Script:
    def __init__(self, tree: ast.Module, path: str, parents: dict[ast.AST, ast.AST]) -> None:
        self.tree, self.path, self.parents = tree, path, parents

    def refuse(self, node: ast.AST | None, what: str, remedy: str = "") -> BadInput:
        where = f"{self.path}, line {getattr(node, 'lineno', '?')}" if node is not None else self.path
        return BadInput(f"{where}: {what}; nothing was started", remedy=remedy or TWO_LINES)

    # which loop

    def training_loop(self, line: int | None) -> tuple[AnyLoop, str]:
        loops = [node for node in ast.walk(self.tree) if isinstance(node, (ast.For, ast.While, ast.AsyncFor))]
        if line is not None:
            named = [loop for loop in loops if loop.lineno == line]
            if len(named) != 1:
                lines = ", ".join(str(n) for n in sorted(loop.lineno for loop in loops)) or "none"
                raise self.refuse(
                    None, f"line {line} is no loop; its loops begin in lines {lines}", "correct --loop"
                )
            return self.checked(named[0]), "named by --loop"
        for wanted, why in (
            ({"backward", "step"}, "its body calls backward() and step()"),
            ({"backward"}, "its body calls backward()"),
            ({"descent"}, "its body descends: w -= rate * gradient"),
        ):
            found = self.innermost(loops, wanted) or self.through_calls(wanted)
            if len(found) > 1:
                lines = ", ".join(str(loop.lineno) for loop in found)
                raise self.refuse(
                    found[1],
                    f"it trains in more than one loop (lines {lines}), and which of them to resume is not clear",
                    f"name one with --loop {found[0].lineno}, or {TWO_LINES}",
                )
            if found:
                return self.checked(found[0]), why
        raise self.refuse(
            None,
            "it has no loop that trains: none whose body calls backward() and step(), or changes weights as w -= rate * gradient",
            f"a loop in an imported module is not looked for; name one of the script's with --loop LINE, or {TWO_LINES}",
        )

    def checked(self, loop: ast.For | ast.While | ast.AsyncFor) -> AnyLoop:
        if isinstance(loop, ast.AsyncFor):
            raise self.refuse(loop, "the training loop is an 'async for', which cannot be resumed")
        if loop.orelse:
            raise self.refuse(loop, "the training loop has an 'else', which a resumed one could not honour")
        return loop

    def innermost(
        self, loops: list[ast.For | ast.While | ast.AsyncFor], wanted: set[str]
    ) -> list[ast.For | ast.While | ast.AsyncFor]:
        marked = [loop for loop in loops if wanted <= self.marks(loop)]
        inside = {id(outer) for inner in marked for outer in self.all_around(inner)}
        return sorted((loop for loop in marked if id(loop) not in inside), key=lambda loop: loop.lineno)

    def through_calls(self, wanted: set[str]) -> list[ast.For | ast.While | ast.AsyncFor]:
        """The step is a function of its own: its loop is where it is called."""
        found: list[ast.For | ast.While | ast.AsyncFor] = []
        for function in [n for n in ast.walk(self.tree) if isinstance(n, AnyFunction)]:
            if not wanted <= self.marks(function):
                continue
            if any(
                wanted <= self.marks(n)
                for n in ast.walk(function)
                if n is not function and isinstance(n, AnyFunction)
            ):
                continue
            at: ast.AST | None = function
            seen: set[ast.AST] = set()
            while at is not None and at not in seen:
                seen.add(at)
                at = self.call_of(at) if isinstance(at, AnyFunction) else self.parents.get(at)
                if isinstance(at, (ast.For, ast.While, ast.AsyncFor)):
                    found.append(at)
                    break
        return list({id(loop): loop for loop in found}.values())

    def marks(self, node: ast.AST) -> set[str]:
        found = set()
        for inside in ast.walk(node):
            if isinstance(inside, ast.Call) and isinstance(inside.func, ast.Attribute):
                if inside.func.attr in ("backward", "step"):
                    found.add(inside.func.attr)
            elif (target := _descent(inside)) is not None and not self.over_parameters(inside, target, node):
                found.add("descent")
        return found

    def over_parameters(self, statement: ast.AST, target: ast.expr, loop: ast.AST) -> bool:
        """`for p, g in zip(params, grads): p -= rate * g` goes over the parameters, not over the data."""
        return isinstance(loop, ast.For) and bool(names_in(target) & names_in(loop.target))

    # what is around it

    def enclosing(self, node: ast.AST) -> Iterator[ast.AST]:
        """Up to the function or module it stands in, that one included."""
        while node in self.parents:
            node = self.parents[node]
            yield node
            if isinstance(node, (AnyFunction, ast.Lambda, ast.ClassDef)):
                return

    def around(self, training: AnyLoop, why: str) -> Found:
        scopes: list[tuple[ast.AST, list[AnyLoop]]] = []
        at: ast.AST = training
        mine: list[AnyLoop] = [training]
        while True:
            home: ast.AST = self.tree
            for outer in self.enclosing(at):
                if isinstance(outer, (ast.For, ast.While)):
                    mine.insert(0, outer)
                elif isinstance(outer, (ast.AsyncFor, ast.AsyncFunctionDef)):
                    raise self.refuse(
                        outer, "the training loop is inside asynchronous code, which cannot be resumed"
                    )
                elif isinstance(
                    outer, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
                ):
                    raise self.refuse(
                        outer, "training is started inside an expression that loops, which cannot be resumed"
                    )
                elif isinstance(outer, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                    home = outer
            if isinstance(home, ast.ClassDef):
                raise self.refuse(
                    at, "the training loop stands in the body of a class, which cannot be resumed"
                )
            if any(home is known for known, _ in scopes):
                raise self.refuse(home, f"{getattr(home, 'name', 'it')} calls itself, and cannot be resumed")
            scopes.append((home, mine))
            if not isinstance(home, ast.FunctionDef):
                break
            if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(home)):
                raise self.refuse(home, "the training loop is inside a generator, which cannot be resumed")
            call = self.call_of(home)
            if call is None:  # called by somebody else, such as a decorator: what is around it is not seen
                scopes.append((self.tree, []))
                break
            at, mine = call, []
        return self.described(training, scopes, why)

    def call_of(self, function: ast.AST) -> ast.Call | None:
        """The one place it is called in."""
        assert isinstance(function, AnyFunction)
        method = isinstance(self.parents.get(function), ast.ClassDef)
        calls = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
            and (
                (method and isinstance(node.func, ast.Attribute) and node.func.attr == function.name)
                or (not method and isinstance(node.func, ast.Name) and node.func.id == function.name)
            )
            and not any(outer is function for outer in self.all_around(node))
        ]
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            raise self.refuse(
                calls[1], f"{function.name}, which trains, is called in more than one place (lines {lines})"
            )
        return calls[0] if calls else None

    def all_around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def described(self, training: AnyLoop, scopes: list[tuple[ast.AST, list[AnyLoop]]], why: str) -> Found:
        if read := iterator_reads(training):
            name = ast.unparse(read.args[0])
            raise self.refuse(
                read,
                f"next({name}) reads from an iterator that is kept from step to step, and an iterator cannot be saved",
                f"let the loop itself go over the data (for batch in loader), or {TWO_LINES}",
            )
        loops: list[Loop] = []
        described: list[Scope] = []
        by_functions = names_of_functions(self.tree)
        for home, mine in scopes:
            key = self.key(home)
            loops = [Loop(node=node, line=node.lineno, scope=key) for node in mine] + loops
            described.append(self.scope(home, mine, training, by_functions))
        return Found(
            tree=self.tree,
            loops=tuple(loops),
            scopes=tuple(described),
            grads_carried=_grads_carried(training),
            why=why,
            parents=self.parents,
        )

    def scope(
        self, home: ast.AST, mine: list[AnyLoop], training: AnyLoop, functions: dict[str, Names]
    ) -> Scope:
        touched = names_touched(mine[0], functions) if mine else Names()
        if isinstance(home, ast.Module):
            for names in functions.values():
                touched = touched | names.outside
        elif isinstance(home, ast.FunctionDef):
            for inner in ast.walk(home):
                if inner is not home and isinstance(inner, AnyFunction):
                    touched = touched | functions[f"{inner.name}@{inner.lineno}"].outside
            touched = touched.without(functions[f"{home.name}@{home.lineno}"].global_names)
        dropped: frozenset[str] = frozenset()
        carried: frozenset[str] = frozenset()
        if training in mine:
            elsewhere = names_in(home, but=training)
            dropped = left_from_one_to_the_next(training).of_no_use - elsewhere - touched.by_functions
            carried = names_touched(training, functions).stored - dropped
        name = home.name if isinstance(home, ast.FunctionDef) else "<module>"
        decorators = home.decorator_list if isinstance(home, ast.FunctionDef) else []
        line = min([home.lineno, *(d.lineno for d in decorators)]) if isinstance(home, ast.FunctionDef) else 0
        return Scope(
            key=self.key(home),
            name=name,
            line=line,
            kept=frozenset(touched.stored | touched.mutated) - dropped,
            stored=frozenset(touched.stored) - dropped,
            mutated=frozenset(touched.mutated) - dropped,
            used=frozenset(touched.used),
            carried=carried,
            dropped=dropped,
        )

    def key(self, home: ast.AST) -> str:
        if not isinstance(home, (ast.FunctionDef, ast.ClassDef)):
            return ""
        around = [n.name for n in self.all_around(home) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        return ".".join([*reversed(around), home.name])


def _descent(node: ast.AST) -> ast.expr | None:
    """What is descended: the target of `w -= a * b` or `w = w - a * b`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub):
        return node.target if _product(node.value) else None
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.BinOp):
        target, value = node.targets[0], node.value
        same = isinstance(value.op, ast.Sub) and ast.unparse(target) == ast.unparse(value.left)
        return target if same and _product(value.right) else None
    return None


def _product(value: ast.expr) -> bool:
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Mult, ast.Div)) for n in ast.walk(value))


def _grads_carried(loop: AnyLoop) -> bool:
    """False only where every iteration clears them before it goes backward, whatever happens."""
    cleared_always = 0
    first: bool | None = None  # whether clearing comes first

    def always(body: list[ast.stmt]) -> None:
        nonlocal cleared_always, first
        for statement in body:
            if isinstance(statement, (ast.With, ast.AsyncWith)):
                always(statement.body)
                continue
            calls = _calls(statement)
            if isinstance(statement, ast.Expr) and calls.count("zero_grad") == 1:
                cleared_always += 1
                first = first is None or first
            elif "backward" in calls and first is None:
                first = False

    always(loop.body)
    return not first or _calls(loop).count("zero_grad") != cleared_always


def _calls(node: ast.AST) -> list[str]:
    return [
        n.func.attr for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    ]
