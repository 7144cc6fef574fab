"""The names a notebook cell takes from the notebook and gives back, and the points at which it may be interrupted.

Rules of this file:
- A cell is followed in the order in which it runs. A name is settled once the cell has surely bound or deleted it: from then
  on the notebook's own value cannot be seen. A name that may be read before it is settled is a read.
- What may not run settles nothing: the body of a loop, one side of a choice, what stands behind `and`. Ways that end in a
  `raise`, `break` or `continue` do not reach what follows.
- A function reads its globals when it runs, which is unknown: from the first use of its name on, or else at the end of the
  cell. A class likewise, for its methods; its body runs at once. A decorator may call what it is given, but for `_ONLY_WRAP`.
- A `with` is taken to let exceptions through, but for `_SUPPRESSING`.
- Anything unclear counts as a read. The caller takes those that the notebook has.
- A deletion that may not happen is listed too, and its name was either a read or bound by the cell: a name in `deletes` that
  is not there after the cell was deleted by it.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import CodeType

from sublet.core.cell_magic import asked

#: The builtin that is called at every point.
POINT = "__sublet_point__"

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_Loop = ast.For | ast.AsyncFor | ast.While

#: Decorators that keep what they are given and do not call it there and then, by their last name.
_ONLY_WRAP = frozenset(
    [
        "abstractmethod",
        "asynccontextmanager",
        "cache",
        "cached_property",
        "classmethod",
        "contextmanager",
        "dataclass",
        "enable_grad",
        "inference_mode",
        "lru_cache",
        "no_grad",
        "overload",
        "property",
        "setter",
        "staticmethod",
        "total_ordering",
        "wraps",
    ]
)
#: Context managers after which the program goes on although their body did not, by their last name.
_SUPPRESSING = frozenset(["suppress", "raises", "assertRaises"])
_READS = frozenset(["LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Sorted, each."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()


def names_of(source: str) -> Names:
    """Of a cell that is already plain Python. Raises SyntaxError for what could not run."""
    try:
        tree = ast.parse(source, "<cell>")
        code = compile(tree, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (ValueError, RecursionError, MemoryError) as problem:  # a null byte, or too deep for the compiler
        raise SyntaxError(f"the cell cannot be compiled: {problem}") from problem
    cell = _Scope(_Kind.MODULE, annotations_run=not _postponed(tree))
    try:
        cell.block(tree.body)
        cell.run_what_waits()
    except RecursionError:  # the compiler goes deeper than we do
        return _without_order(code)
    return Names(
        reads=tuple(sorted(cell.reads)),
        writes=tuple(sorted(cell.writes)),
        deletes=tuple(sorted(cell.state.gone | cell.dropped)),
    )


@lru_cache(maxsize=512)
def names_of_code(code: CodeType) -> tuple[str, ...]:
    """Every global the code reads, also in functions defined inside it."""
    return tuple(sorted(_named(code, _READS)))


def _named(code: CodeType, operations: frozenset[str]) -> set[str]:
    found: set[str] = set()
    waiting = [code]
    while waiting:
        at = waiting.pop()
        found.update(str(i.argval) for i in dis.get_instructions(at) if i.opname in operations)
        waiting += [constant for constant in at.co_consts if isinstance(constant, CodeType)]
    return found


def _without_order(code: CodeType) -> Names:
    """Every name, as if all were read before any was bound."""
    deleted = _named(code, frozenset(["DELETE_NAME", "DELETE_GLOBAL"]))
    return Names(
        reads=tuple(sorted(_named(code, _READS) | deleted)),
        writes=tuple(sorted(_named(code, frozenset(["STORE_NAME", "STORE_GLOBAL"])))),
        deletes=tuple(sorted(deleted)),
    )


def _postponed(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(alias.name == "annotations" for alias in node.names)
        for node in tree.body
    )


# --- points ------------------------------------------------------------------------------------------------------


class Points(ast.NodeTransformer):
    """A call of `POINT` at the start of every iteration of the outermost loops. No line moves: the call is on the loop's own."""

    def visit(self, node: ast.AST) -> ast.AST:
        waiting = [node]
        while waiting:
            at = waiting.pop()
            if isinstance(at, _Loop):
                at.body.insert(0, _point(at))
                waiting += at.orelse  # runs once, after the loop
            elif not isinstance(at, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
                waiting += ast.iter_child_nodes(at)
        return node


def _point(loop: _Loop) -> ast.stmt:
    made = ast.Expr(ast.Call(ast.Name(POINT, ast.Load()), [], []))
    head = loop.test if isinstance(loop, ast.While) else loop.target
    for node in ast.walk(made):
        ast.copy_location(node, head)
    return made


# --- the order in which a cell runs --------------------------------------------------------------------------------


class _Kind(Enum):
    MODULE = "module"
    CLASS = "class"
    FUNCTION = "function"


@dataclass(slots=True)
class _State:
    """What is known at one place of the program."""

    settled: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)  # may have been deleted, and not surely bound again
    waiting: dict[str, frozenset[str]] = field(default_factory=dict)  # what a function reads when it runs
    dead: bool = False  # nothing gets here

    def copy(self) -> _State:
        return _State(set(self.settled), set(self.gone), dict(self.waiting), self.dead)


def _either(states: Sequence[_State]) -> _State:
    """After any of them."""
    alive = [s for s in states if not s.dead]
    waiting: dict[str, frozenset[str]] = {}
    for state in states:
        for name, needs in state.waiting.items():
            waiting[name] = waiting.get(name, frozenset()) | needs
    return _State(
        settled=set.intersection(*(s.settled for s in alive or states)),
        gone=set.union(*(s.gone for s in states)),
        waiting=waiting,
        dead=not alive,
    )


@dataclass(slots=True)
class _Ways:
    """How a loop is left, and begun again, from inside."""

    out: list[_State] = field(default_factory=list)
    again: list[_State] = field(default_factory=list)


class _Scope:
    """The cell, a class body or a function body, followed from its start to its end. Reads and writes are of globals only."""

    def __init__(
        self,
        kind: _Kind,
        *,
        hidden: frozenset[str] = frozenset(),
        declared: frozenset[str] = frozenset(),
        private: str = "",
        annotations_run: bool = True,
        outer: _Scope | None = None,
    ) -> None:
        self.kind = kind
        self.hidden = hidden  # names of a function or comprehension around this place
        self.declared = declared  # `global` in it
        self.private = private  # the class whose name is put before __names
        self.annotations_run = annotations_run
        self.outer = outer  # of a class body: it runs there and then
        self.state = _State()
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.dropped: set[str] = set()  # deleted by functions
        self.later: set[str] = set()  # read by the methods of a class
        self.loops: list[_Ways] = []
        self.in_comprehension = False

    # Names

    def load(self, name: str) -> None:
        name = _mangled(name, self.private)
        if name in self.hidden:
            return
        if self.kind is _Kind.CLASS and not self.in_comprehension:
            for need in self.state.waiting.get(name, ()):
                self.read(need)
            if name in self.state.settled:
                return
        self.read(name)

    def read(self, name: str) -> None:
        """A global, and what the function behind it reads, and so on."""
        if self.outer is not None:
            self.outer.load_from_class(name)
            return
        seen: set[str] = set()
        due = [name]
        while due:
            at = due.pop()
            if at in seen:
                continue
            seen.add(at)
            if at not in self.state.settled:
                self.reads.add(at)
            due += self.state.waiting.get(at, ())

    def load_from_class(self, name: str) -> None:
        """A class body does not see the names of the class around it."""
        if name not in self.hidden:
            self.read(name)

    def bind(self, name: str) -> None:
        name = _mangled(name, self.private)
        if name in self.hidden:
            return
        if self.kind is not _Kind.CLASS or name in self.declared:
            self.writes.add(name)
        if self.kind is not _Kind.CLASS or name not in self.declared:
            self.state.settled.add(name)
            self.state.gone.discard(name)
            self.state.waiting.pop(name, None)

    def drop(self, name: str) -> None:
        """A name that is not there cannot be deleted."""
        name = _mangled(name, self.private)
        if name in self.hidden:
            return
        if self.kind is _Kind.CLASS:
            if name in self.declared:
                self.read(name)
                self.dropped.add(name)
            self.state.settled.discard(name)  # what is behind it can be seen again
            self.state.waiting.pop(name, None)
            return
        if name not in self.state.settled:
            self.reads.add(name)
        self.state.settled.add(name)
        self.state.gone.add(name)
        self.state.waiting.pop(name, None)
        if self.kind is _Kind.FUNCTION:
            self.dropped.add(name)

    def define(self, name: str, needs: Iterable[str], *, at_once: bool) -> None:
        """A function or class that reads `needs` when it runs."""
        self.bind(name)
        if at_once or self.kind is _Kind.FUNCTION:
            for need in needs:
                self.read(need)
        else:
            self.state.waiting[_mangled(name, self.private)] = frozenset(needs)
            self.later.update(needs)

    def run_what_waits(self) -> None:
        for needs in list(self.state.waiting.values()):
            for need in needs:
                self.read(need)

    # Statements

    def block(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if self.state.dead:
                return
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign():
                self.assign(node)
            case ast.AugAssign():
                self.expression(_loaded(node.target))
                self.expression(node.value)
                self.target(node.target)
            case ast.AnnAssign():
                self.annotated(node)
            case ast.Import() | ast.ImportFrom():
                for name in _imported(node):
                    self.bind(name)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.function(node)
            case ast.ClassDef():
                self.class_body(node)
            case ast.Delete():
                for target in node.targets:
                    self.target(target)
            case ast.If():
                self.choice(node)
            case ast.For() | ast.AsyncFor() | ast.While():
                self.loop(node)
            case ast.With() | ast.AsyncWith():
                self.with_(node)
            case ast.Try() | ast.TryStar():
                self.try_(node)
            case ast.Match():
                self.match_(node)
            case ast.Assert():
                self.expression(node.test)
                self.maybe([node.msg])
            case ast.Break() | ast.Continue():
                ways = self.loops[-1]
                (ways.out if isinstance(node, ast.Break) else ways.again).append(self.state.copy())
                self.state.dead = True
            case ast.Raise() | ast.Return():
                self.parts(node)
                self.state.dead = True
            case ast.Expr():
                self.expression(node.value)
            case ast.Global() | ast.Nonlocal() | ast.Pass():
                pass
            case _:  # `type X = ...`, where Python has it
                self.type_alias(node)

    def assign(self, node: ast.Assign) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as value):
                self.define(name, self.lambda_(value), at_once=False)
            case _:
                self.expression(node.value)
                for target in node.targets:
                    self.target(target)

    def annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.expression(node.value)
            self.target(node.target)
        elif not isinstance(node.target, ast.Name):
            self.parts(node.target)
        if self.annotations_run and self.kind is not _Kind.FUNCTION:
            self.expression(node.annotation)

    def choice(self, node: ast.If) -> None:
        ends: list[_State] = []
        while True:  # an `elif` stands inside the `else` before it
            self.expression(node.test)
            otherwise = self.state.copy()
            self.block(node.body)
            ends.append(self.state)
            self.state = otherwise
            if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
                node = node.orelse[0]
                continue
            self.block(node.orelse)
            self.state = _either([*ends, self.state])
            return

    def loop(self, node: _Loop) -> None:
        if not isinstance(node, ast.While):
            self.expression(node.iter)
        while True:
            if isinstance(node, ast.While):
                self.expression(node.test)
            head, ways = self.state.copy(), _Ways()
            self.loops.append(ways)
            if not isinstance(node, ast.While):
                self.target(node.target)
            self.block(node.body)
            self.loops.pop()
            after = _either([head, self.state, *ways.again])
            self.state = after
            if after.waiting == head.waiting:
                break
            # A function that the body defines may be called by the next iteration.
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
            after.dead = True
        self.block(node.orelse)
        self.state = _either([self.state, *ways.out])

    def with_(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.expression(item.context_expr)
            if item.optional_vars is not None:
                self.target(item.optional_vars)
        before = self.state.copy()
        self.block(node.body)
        if any(_last_name(item.context_expr) in _SUPPRESSING for item in node.items):
            self.state = _either([before, self.state])

    def try_(self, node: ast.Try | ast.TryStar) -> None:
        before = self.state.copy()
        self.block(node.body)
        raised = _either([before, self.state])
        raised.settled = set(before.settled)
        self.block(node.orelse)
        ends = [self.state]
        for handler in node.handlers:
            self.state = raised.copy()
            self.handler(handler)
            ends.append(self.state)
        after = _either(ends)
        self.state = after
        if node.finalbody:
            self.state = _either([raised, after])
            self.state.settled, self.state.dead = set(before.settled), False
            self.block(node.finalbody)
            self.state.settled |= after.settled
            self.state.dead |= after.dead

    def handler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.expression(node.type)
        if node.name is None:
            self.block(node.body)
            return
        name = _mangled(node.name, self.private)
        own = name in self.hidden
        known = name in self.state.settled or name in self.reads
        if not own:
            self.state.settled.add(name)
            self.state.waiting.pop(name, None)
        self.block(node.body)
        if own:
            return
        if self.kind is _Kind.CLASS:
            self.state.settled.discard(name)
        elif known or name in self.writes:  # its name is unbound again
            self.state.gone.add(name)

    def match_(self, node: ast.Match) -> None:
        self.expression(node.subject)
        ends: list[_State] = []
        for case in node.cases:
            otherwise = self.state.copy()
            for part in ast.walk(case.pattern):
                if isinstance(part, ast.MatchValue):
                    self.expression(part.value)
                elif isinstance(part, ast.MatchClass):
                    self.expression(part.cls)
                elif isinstance(part, ast.MatchMapping):
                    for key in part.keys:
                        self.expression(key)
            for name in _captured(case.pattern):
                self.bind(name)
            if case.guard is not None:
                self.expression(case.guard)
            failed = self.state.copy()
            self.block(case.body)
            ends.append(self.state)
            self.state = _either([otherwise, failed])
            if case.guard is None and _always_matches(case.pattern):
                self.state.dead = True
                break
        self.state = _either([*ends, self.state])

    def target(self, node: ast.expr) -> None:
        match node:
            case ast.Name(id=name, ctx=ast.Del()):
                self.drop(name)
            case ast.Name(id=name):
                self.bind(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self.target(part)
            case ast.Starred(value=value):
                self.target(value)
            case _:
                self.parts(node)

    # Functions and classes

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.expression(decorator)
        self.defaults(node.args)
        outside = self.hidden
        self.type_parameters(node)
        if self.annotations_run:
            for argument in _arguments(node.args):
                if argument.annotation is not None:
                    self.expression(argument.annotation)
            if node.returns is not None:
                self.expression(node.returns)
        needs = self.called(node, node.body)
        self.hidden = outside
        self.define(node.name, needs, at_once=_may_call(node.decorator_list))

    def lambda_(self, node: ast.Lambda) -> set[str]:
        self.defaults(node.args)
        return self.called(node, [ast.Expr(node.body)])

    def defaults(self, args: ast.arguments) -> None:
        for default in [*args.defaults, *args.kw_defaults]:
            if default is not None:
                self.expression(default)

    def called(self, node: _Function, body: Sequence[ast.stmt]) -> set[str]:
        """What a function reads when it is called."""
        found = _Bindings.of(body, self.private)
        own = found.bound | {_mangled(a.arg, self.private) for a in _arguments(node.args)}
        hidden = self.hidden | {"__class__"} if self.kind is _Kind.CLASS else self.hidden
        inside = _Scope(
            _Kind.FUNCTION,
            hidden=(hidden | own) - found.declared,
            declared=found.declared,
            private=self.private,
            annotations_run=self.annotations_run,
        )
        inside.block(body)
        self.writes |= inside.writes
        self.dropped |= inside.dropped
        return inside.reads

    def class_body(self, node: ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            self.expression(decorator)
        outside = self.hidden
        self.type_parameters(node)
        for part in [*node.bases, *node.keywords]:
            self.expression(part)
        declared = _Bindings.of(node.body, node.name).declared
        inside = _Scope(
            _Kind.CLASS,
            hidden=self.hidden - declared,
            declared=declared,
            private=node.name,
            annotations_run=self.annotations_run,
            outer=self,
        )
        inside.state.settled |= {"__module__", "__qualname__"}
        inside.block(node.body)
        self.writes |= inside.writes
        self.dropped |= inside.dropped
        self.hidden = outside
        at_once = bool(node.keywords) or _may_call(node.decorator_list)
        self.define(node.name, inside.later, at_once=at_once)

    def type_parameters(self, node: ast.AST) -> None:
        """`[T: bound]`: names of their own, where Python has them."""
        parameters: list[ast.AST] = getattr(node, "type_params", [])
        self.hidden |= {_mangled(getattr(p, "name", ""), self.private) for p in parameters}
        for parameter in parameters:
            self.parts(parameter)

    def type_alias(self, node: ast.stmt) -> None:
        outside = self.hidden
        self.type_parameters(node)
        value = getattr(node, "value", None)
        if isinstance(value, ast.expr):
            self.expression(value)
        self.hidden = outside
        name = getattr(node, "name", None)
        if isinstance(name, ast.Name):
            self.bind(name.id)

    # Expressions

    def expression(self, node: ast.AST) -> None:
        match node:
            case ast.Name():
                self.load(node.id)
            case ast.NamedExpr():
                self.expression(node.value)
                self.bind(node.target.id)
            case ast.Lambda():  # given to somebody who may call it
                for need in self.lambda_(node):
                    self.read(need)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self.comprehension(node)
            case ast.BoolOp():
                self.expression(node.values[0])
                self.maybe(node.values[1:])
            case ast.Compare():
                self.expression(node.left)
                self.expression(node.comparators[0])
                self.maybe(node.comparators[1:])
            case ast.IfExp():
                self.expression(node.test)
                otherwise = self.state.copy()
                self.expression(node.body)
                first, self.state = self.state, otherwise
                self.expression(node.orelse)
                self.state = _either([first, self.state])
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if key is not None:
                        self.expression(key)
                    self.expression(value)
            case ast.Call():
                self.parts(node)
                self.magic(node)
            case _:
                self.parts(node)

    def parts(self, node: ast.AST) -> None:
        for part in ast.iter_child_nodes(node):
            self.expression(part)

    def maybe(self, nodes: Iterable[ast.AST | None]) -> None:
        """They may not run."""
        before = self.state.copy()
        for node in nodes:
            if node is not None:
                self.expression(node)
        self.state = _either([before, self.state])

    def comprehension(self, node: _Comprehension) -> None:
        self.expression(node.generators[0].iter)
        outside, was_inside, before = self.hidden, self.in_comprehension, self.state.copy()
        self.in_comprehension = True
        self.hidden |= {
            _mangled(part.id, self.private)
            for generator in node.generators
            for part in ast.walk(generator.target)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
        for generator in node.generators:
            if generator is not node.generators[0]:
                self.expression(generator.iter)
            self.target(generator.target)
            for test in generator.ifs:
                self.expression(test)
        for part in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self.expression(part)
        self.hidden, self.in_comprehension = outside, was_inside
        self.state = _either([before, self.state])

    def magic(self, node: ast.Call) -> None:
        found = asked(node)
        if found is None:
            return
        for name in sorted(found.reads):
            self.load(name)
        if found.keeps:
            self.block(found.body)
        else:
            before, writes = self.state.copy(), set(self.writes)
            self.block(found.body)
            self.run_what_waits()
            self.state, self.writes = before, writes
        for name in sorted(found.writes):
            self.bind(name)


# --- what a piece of syntax says by itself ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bindings:
    """Names a body binds for itself, and those it declares global."""

    bound: frozenset[str]
    declared: frozenset[str]

    @staticmethod
    def of(body: Iterable[ast.AST], private: str) -> _Bindings:
        bound: set[str] = set()
        declared: set[str] = set()
        around: set[str] = set()  # `nonlocal`: hidden already
        waiting = [(node, False) for node in body]
        while waiting:
            node, in_comprehension = waiting.pop()
            inner: Iterable[ast.AST | None] = ast.iter_child_nodes(node)
            match node:
                case ast.Name(ctx=ast.Store() | ast.Del()) if not in_comprehension:
                    bound.add(node.id)
                case ast.NamedExpr():
                    bound.add(node.target.id)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    bound.add(node.name)
                    notes = [a.annotation for a in _arguments(node.args)]
                    inner = [*node.decorator_list, *_defaults(node.args), *notes, node.returns]
                case ast.ClassDef():
                    bound.add(node.name)
                    inner = [*node.decorator_list, *node.bases, *node.keywords]
                case ast.Lambda():
                    inner = _defaults(node.args)
                case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                    in_comprehension = True
                case ast.Import() | ast.ImportFrom():
                    bound.update(_imported(node))
                case ast.ExceptHandler(name=str(name)):
                    bound.add(name)
                case ast.MatchAs() | ast.MatchStar() | ast.MatchMapping():
                    bound.update(_captured_here(node))
                case ast.Global():
                    declared.update(node.names)
                case ast.Nonlocal():
                    around.update(node.names)
                case _:
                    pass
            waiting += [(part, in_comprehension) for part in inner if part is not None]
        globals_ = frozenset(_mangled(name, private) for name in declared)
        own = frozenset(_mangled(name, private) for name in bound - around)
        return _Bindings(own - globals_, globals_)


def _arguments(args: ast.arguments) -> list[ast.arg]:
    several = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return [*several, *(a for a in (args.vararg, args.kwarg) if a is not None)]


def _defaults(args: ast.arguments) -> list[ast.expr]:
    return [default for default in [*args.defaults, *args.kw_defaults] if default is not None]


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """A star binds what only the module knows."""
    names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return [name for name in names if name != "*"]


def _captured_here(node: ast.AST) -> list[str]:
    match node:
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return [name]
        case _:
            return []


def _captured(pattern: ast.pattern) -> list[str]:
    return [name for node in ast.walk(pattern) for name in _captured_here(node)]


def _always_matches(pattern: ast.pattern) -> bool:
    match pattern:
        case ast.MatchAs(pattern=None):
            return True
        case ast.MatchAs(pattern=ast.pattern() as inner):
            return _always_matches(inner)
        case ast.MatchOr(patterns=patterns):
            return _always_matches(patterns[-1])
        case _:
            return False


def _loaded(target: ast.expr) -> ast.AST:
    """The target of `+=` is read first."""
    return ast.Name(target.id, ast.Load()) if isinstance(target, ast.Name) else target


def _last_name(node: ast.expr) -> str:
    """`suppress` of `contextlib.suppress(KeyError)`."""
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _may_call(decorators: Iterable[ast.expr]) -> bool:
    return any(_last_name(decorator) not in _ONLY_WRAP for decorator in decorators)


def _mangled(name: str, private: str) -> str:
    """`__name` inside a class is `_Class__name`, also as a global."""
    bare = private.lstrip("_")
    if not bare or not name.startswith("__") or name.endswith("__"):
        return name
    return f"_{bare}{name}"
