"""Which names a piece of a program binds, changes in place, or only reads.

Rules of this file:
- Pure, and about names only: what kind of object is behind one is seen when the program runs.
- A change reaches names through aliases: the parameter of a function that changes it, the target of a loop over what is changed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef
_OWN_NAMES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

#: Methods that change what they are called on. Of torch also every one that ends in an underscore.
_CHANGING = frozenset(
    [
        "append",
        "appendleft",
        "extend",
        "extendleft",
        "insert",
        "pop",
        "popleft",
        "popitem",
        "remove",
        "clear",
        "sort",
        "reverse",
        "add",
        "discard",
        "update",
        "setdefault",
        "rotate",
        "fill",
        "put",
        "partition",
        "resize",
        "itemset",
        "subtract",
        "setflags",
    ]
)
#: Functions that change what they are given first.
_CHANGING_FIRST = frozenset(
    [
        "shuffle",
        "copyto",
        "heappush",
        "heappop",
        "heapify",
        "heapreplace",
        "heappushpop",
        "put",
        "fill_diagonal",
        "setattr",
        "put_along_axis",
    ]
)


@dataclass(frozen=True, slots=True)
class Names:
    stored: frozenset[str] = frozenset()
    mutated: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()  # a method of it is called, or it is given to somebody
    by_functions: frozenset[str] = frozenset()
    # Of a function:
    parameters: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    global_names: frozenset[str] = frozenset()
    nonlocal_names: frozenset[str] = frozenset()

    def __or__(self, other: Names) -> Names:
        return replace(
            self,
            stored=self.stored | other.stored,
            mutated=self.mutated | other.mutated,
            used=self.used | other.used,
            by_functions=self.by_functions | other.by_functions,
        )

    def without(self, names: frozenset[str]) -> Names:
        return replace(self, stored=self.stored - names, mutated=self.mutated - names, used=self.used - names)

    @property
    def outside(self) -> Names:
        """What a function does to names that are not its own."""
        declared = self.global_names | self.nonlocal_names
        stored, mutated = self.stored & declared, self.mutated - self.own
        used = self.used - self.own
        return Names(stored=stored, mutated=mutated, used=used, by_functions=stored | mutated | used)


def names_in(node: ast.AST, *, but: ast.AST | None = None) -> frozenset[str]:
    """Names read in it; of a target, the names it binds."""
    found = set()
    waiting = [node]
    while waiting:
        at = waiting.pop()
        if at is but:
            waiting += [at.iter] if isinstance(at, ast.For) else []
            continue
        if isinstance(at, ast.Name) and (but is None or not isinstance(at.ctx, ast.Store)):
            found.add(at.id)
        if isinstance(at, ast.AugAssign) and isinstance(at.target, ast.Name):
            found.add(at.target.id)
        waiting += ast.iter_child_nodes(at)
    return frozenset(found)


def root(node: ast.AST) -> str | None:
    """`a` of `a.b[c].d`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def names_of_functions(tree: ast.Module) -> dict[str, Names]:
    """Every function of the program by `name@line`, and what it does to the names it sees."""
    functions = {
        f"{node.name}@{node.lineno}": node for node in ast.walk(tree) if isinstance(node, AnyFunction)
    }
    found = {key: _of_function(node, {}) for key, node in functions.items()}
    for _ in range(
        len(functions)
    ):  # a function that passes its parameter on to one that changes it, and so on
        again = {key: _of_function(node, found) for key, node in functions.items()}
        if again == found:
            break
        found = again
    return found


def _of_function(node: AnyFunction, functions: dict[str, Names]) -> Names:
    arguments = node.args
    parameters = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
    others = [a.arg for a in [*arguments.kwonlyargs, arguments.vararg, arguments.kwarg] if a is not None]
    global_names: set[str] = set()
    nonlocal_names: set[str] = set()
    for inside in _own_nodes(node):
        if isinstance(inside, ast.Global):
            global_names.update(inside.names)
        elif isinstance(inside, ast.Nonlocal):
            nonlocal_names.update(inside.names)
    touched = names_touched(node, functions)
    own = (touched.stored | set(parameters) | set(others)) - global_names - nonlocal_names
    return replace(
        touched,
        parameters=(*parameters, *others),
        own=frozenset(own),
        global_names=frozenset(global_names),
        nonlocal_names=frozenset(nonlocal_names),
    )


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What is in it, but for the inside of functions and classes that stand in it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _OWN_NAMES):
            yield from _own_nodes(child)


def names_touched(region: ast.AST, functions: dict[str, Names]) -> Names:
    by_name: dict[str, list[Names]] = {}
    for key, names in functions.items():
        by_name.setdefault(key.partition("@")[0], []).append(names)
    stored: set[str] = set()
    mutated: set[str] = set()
    used: set[str] = set()
    aliases: list[
        tuple[frozenset[str], frozenset[str]]
    ] = []  # a change of one of the first is one of the second
    nodes = [region, *_own_nodes(region)] if not isinstance(region, AnyFunction) else list(_own_nodes(region))
    comprehended = {
        id(n)
        for node in nodes
        if isinstance(node, _COMPREHENSIONS)
        for part in node.generators
        for n in ast.walk(part.target)
    }
    for node in nodes:
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load) and id(node) not in comprehended:
                stored.add(node.id)
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            mutated |= _some(root(node))
        elif isinstance(node, ast.AugAssign):
            mutated |= _some(root(node.target))
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            aliases.append((names_in(node.target), names_in(node.iter)))
        elif isinstance(node, ast.Assign) and isinstance(
            node.value, (ast.Name, ast.Attribute, ast.Subscript)
        ):
            aliases.append(
                (frozenset().union(*(names_in(t) for t in node.targets)), frozenset(_some(root(node.value))))
            )
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            stored |= {(a.asname or a.name).partition(".")[0] for a in node.names}
        elif isinstance(node, (ast.ExceptHandler, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stored |= _some(node.name)
        elif isinstance(node, ast.Call):
            mutated |= _changed_by(node, by_name)
            if isinstance(node.func, ast.Attribute):
                used |= _some(root(node.func.value))
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                used |= _some(root(argument))
    for _ in aliases:
        before = len(mutated)
        for alias, behind in aliases:
            if alias & mutated:
                mutated |= behind
        if len(mutated) == before:
            break
    return Names(stored=frozenset(stored), mutated=frozenset(mutated), used=frozenset(used))


def _some(name: str | None) -> set[str]:
    return {name} if name is not None else set()


def _changed_by(call: ast.Call, functions: dict[str, list[Names]]) -> set[str]:
    found: set[str] = set()
    for keyword in call.keywords:
        if keyword.arg == "out":
            found |= _some(root(keyword.value))
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if isinstance(call.func, ast.Attribute) and (
        name in _CHANGING or (name.endswith("_") and not name.startswith("_"))
    ):
        found |= _some(root(call.func.value))
    if name in _CHANGING_FIRST and call.args:
        found |= _some(root(call.args[0]))
    for called in functions.get(name, []):
        parameters = called.parameters
        if isinstance(call.func, ast.Attribute) and parameters[:1] == ("self",):
            parameters = parameters[1:]
        for parameter, argument in zip(parameters, call.args, strict=False):
            if parameter in called.mutated:
                found |= _some(root(argument))
        for keyword in call.keywords:
            if keyword.arg in called.mutated:
                found |= _some(root(keyword.value))
    return found


# --- from one iteration to the next --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Passing:
    of_no_use: frozenset[str]  # bound in every iteration before they are read


def left_from_one_to_the_next(loop: ast.For | ast.While) -> Passing:
    bound: set[str] = set()
    needed: set[str] = set(names_in(loop.test)) if isinstance(loop, ast.While) else set()
    if isinstance(loop, ast.For):
        bound |= {
            n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }

    def read(node: ast.AST) -> None:
        needed.update(names_in(node, but=_NOWHERE) - bound)

    def follow(body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, (ast.With, ast.AsyncWith)):
                for item in statement.items:
                    read(item.context_expr)
                    if item.optional_vars is not None:
                        bound.update(_bound(item.optional_vars))
                follow(statement.body)
            elif isinstance(statement, ast.Assign):
                read(statement.value)
                for target in statement.targets:
                    read(target)
                    bound.update(_bound(target))
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                read(statement.value)
                bound.update(_bound(statement.target))
            else:
                read(statement)

    follow(loop.body)
    anywhere = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return Passing(frozenset(anywhere - needed))


#: Makes `names_in` give only what is read.
_NOWHERE = ast.Pass()


def _bound(target: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def iterator_reads(loop: ast.For | ast.While) -> ast.Call | None:
    """`next(it)` with an iterator from before the iteration."""
    fresh = left_from_one_to_the_next(loop).of_no_use
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "next"
            and node.args
        ):
            name = root(node.args[0])
            if name is not None and name not in fresh:
                return node
    return None
