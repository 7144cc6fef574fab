"""Where the state of a feature is: in the loop's own variables, or in one of the other places a program keeps things in.

Rules of this file:
- A holder takes a feature's text and gives text that does the same, with the state elsewhere. The names of the state are those that the
  feature's setup binds.
- A holder either leaves them names (of a function, a module, a generator) or makes places of them (`self.n`, `box['n']`). Names that are
  bound by `def`, `class`, `import` or `:=`, or read by text that is run, cannot be moved into places.
- Nothing here draws: the same feature in the same holder is the same text.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

from tests.training.programs.features import Feature, all_features, named, with_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A feature as it stands in a program: text of the module, of the scope of the loop, and of the loop."""

    top: str = ""
    setup: str = ""
    step: str = ""
    end: str = ""
    reset: str = ""
    files: dict[str, str] = field(default_factory=dict)
    imports: str = ""


# --- names ---------------------------------------------------------------------------------------------------

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_OWN_SCOPES = (*_SCOPES, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def bound_names(text: str) -> set[str]:
    """Names that these statements bind in the scope they stand in."""
    found: set[str] = set()
    for node in _of_this_scope(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(node.id)
        elif isinstance(node, _SCOPES) and not isinstance(node, ast.Lambda):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def _of_this_scope(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _OWN_SCOPES):
            yield from _of_this_scope(child)
        else:  # a walrus in a comprehension binds outside of it
            yield from (n.target for n in ast.walk(child) if isinstance(n, ast.NamedExpr))


def state_of(feature: Feature) -> list[str]:
    """Names that live from step to step."""
    return sorted(bound_names(feature.setup)) if feature.setup else []


def can_be_moved(feature: Feature) -> bool:
    """Whether its names may become places."""
    state = set(state_of(feature))
    for text in (feature.setup, feature.step, feature.end, feature.finish):
        for node in ast.walk(ast.parse(text)):
            named = {
                ast.NamedExpr: lambda n: n.target.id,
                ast.FunctionDef: lambda n: n.name,
                ast.ClassDef: lambda n: n.name,
                ast.ExceptHandler: lambda n: n.name,
            }.get(type(node))
            if named is not None and named(node) in state:
                return False
            if isinstance(node, ast.Import):
                return False
    return bool(state)


class _Moving(ast.NodeTransformer):
    def __init__(self, names: set[str], place: str) -> None:
        self.names, self.place = names, place

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names:
            return node
        moved = ast.parse(self.place.format(node.id), mode="eval").body
        moved.ctx = node.ctx  # type: ignore[attr-defined]
        return ast.copy_location(moved, node)


def moved(text: str, names: list[str], place: str) -> str:
    """`place` is such as `self.{}` or `box['{}']`."""
    tree = _Moving(set(names), place).visit(ast.parse(text))
    return ast.unparse(ast.fix_missing_locations(tree))


# --- holders -------------------------------------------------------------------------------------------------


def indent(text: str, by: int = 1) -> str:
    return textwrap.indent(text, "    " * by)


def _inline(f: Feature, slug: str) -> Held:
    finish = f"parts.append(repr(({f.finish})))" if f.finish else ""
    return Held(
        top=f.top,
        setup=f.setup,
        step=f.step,
        end="\n".join(filter(None, (f.end, finish))),
        reset=f.forgets,
        files=f.files,
        imports=f.imports,
    )


def _body(f: Feature, slug: str, declared: str = "") -> str:
    """Of a function of (step, x, w): a step, or with a negative number the end."""
    last = "\n".join(filter(None, (f.end, f"return repr(({f.finish or 'None'}))")))
    return "\n".join(
        filter(None, (declared, f"if step < 0:\n{indent(last)}", f.step, f"return float({slug}_v)"))
    )


def _called(f: Feature, slug: str, call: str, **given: str) -> Held:
    """The feature in a function of its own, made by `setup` unless that is given."""
    return Held(
        **{  # type: ignore[arg-type]
            "step": f"{slug}_v = {call}(step, x, w)",
            "end": f"parts.append({call}(-1, 0.0, w))",
            "reset": f.reset or given.get("setup", ""),
            "files": f.files,
            "imports": f.imports,
            **given,
        }
    )


def _function_of_globals(f: Feature, slug: str) -> Held:
    names = state_of(f)
    stored = sorted(set(names) & bound_names("\n".join((f.step, f.end))))
    declared = f"global {', '.join(stored)}" if stored else ""
    top = f"{f.top}\n{f.setup}\n\ndef {slug}_held_draw(step, x, w):\n{indent(_body(f, slug, declared))}"
    return _called(f, slug, f"{slug}_held_draw", top=top, reset=f"exec({f.forgets!r}, globals())")


def _closure(f: Feature, slug: str) -> Held:
    stored = sorted(set(state_of(f)) & bound_names("\n".join((f.step, f.end))))
    declared = f"nonlocal {', '.join(stored)}" if stored else ""
    draw = f"def draw(step, x, w):\n{indent(_body(f, slug, declared))}"
    top = f"{f.top}\n\ndef {slug}_held_make():\n{indent(f.setup or 'pass')}\n\n{indent(draw)}\n\n    return draw"
    return _called(f, slug, f"{slug}_held_draw", top=top, setup=f"{slug}_held_draw = {slug}_held_make()")


def _generator(f: Feature, slug: str) -> Held:
    last = "\n".join(filter(None, (f.end, f"answer = repr(({f.finish or 'None'}))", "continue")))
    loop = f"while True:\n    step, x, w = yield answer\n    if step < 0:\n{indent(last, 2)}\n{indent(f.step)}\n    answer = float({slug}_v)"
    top = f"{f.top}\n\ndef {slug}_held_run():\n{indent(f.setup or 'pass')}\n    answer = None\n{indent(loop)}"
    setup = f"{slug}_held_it = {slug}_held_run()\nnext({slug}_held_it)"
    return _called(
        f,
        slug,
        "",
        top=top,
        setup=setup,
        step=f"{slug}_v = {slug}_held_it.send((step, x, w))",
        end=f"parts.append({slug}_held_it.send((-1, 0.0, w)))",
    )


def _module(f: Feature, slug: str) -> Held:
    """A module beside the script, with its definitions and its state."""
    alone = _function_of_globals(f, slug)
    imports = "".join(f"import {name}\n" for name in f.imports.split())
    files = {**f.files, f"{slug}_beside.py": f"{imports}{alone.top}\n"}
    return _called(
        f,
        slug,
        f"{slug}_beside.{slug}_held_draw",
        imports=f"{slug}_beside",
        files=files,  # type: ignore[arg-type]
        reset=f"exec({f.forgets!r}, vars({slug}_beside))",
    )


def _text_that_was_run(f: Feature, slug: str) -> Held:
    """A module that no file holds: its functions were compiled from a text of the program."""
    alone = _function_of_globals(f, slug)
    imports = "".join(f"import {name}\n" for name in f.imports.split())
    top = f"{slug}_held_space = {{'__name__': '{slug}_held_space'}}\nexec({imports + alone.top!r}, {slug}_held_space)"
    call = f"{slug}_held_space['{slug}_held_draw']"
    return _called(f, slug, call, top=top, reset=f"exec({f.forgets!r}, {slug}_held_space)")


def _class(f: Feature, slug: str, *, slots: bool = False, base: str = "") -> tuple[str, str]:
    """A class with the state in its objects; its name and text."""
    names = state_of(f)
    inside = replace(
        f, **{key: moved(getattr(f, key), names, "self.{}") for key in ("setup", "step", "end", "finish")}
    )
    camel = "".join(word.capitalize() for word in slug.split("_")) + "Holder"
    told = f"    __slots__ = {tuple(names)!r}\n\n" if slots else ""
    return camel, (
        f"{f.top}\n\nclass {camel}{base}:\n{told}    def __init__(self):\n{indent(inside.setup, 2)}\n\n"
        f"    def draw(self, step, x, w):\n{indent(_body(inside, slug), 2)}"
    )


def _object(f: Feature, slug: str) -> Held:
    name, top = _class(f, slug)
    return _called(f, slug, f"{slug}_held_home.draw", top=top, setup=f"{slug}_held_home = {name}()")


def _object_with_slots(f: Feature, slug: str) -> Held:
    name, top = _class(f, slug, slots=True)
    return _called(f, slug, f"{slug}_held_home.draw", top=top, setup=f"{slug}_held_home = {name}()")


def _bound_method(f: Feature, slug: str) -> Held:
    name, top = _class(f, slug)
    return _called(f, slug, f"{slug}_held_draw", top=top, setup=f"{slug}_held_draw = {name}().draw")


def _object_in_a_cycle(f: Feature, slug: str) -> Held:
    name, top = _class(f, slug)
    setup = f"{slug}_held_ring = [{name}()]\n{slug}_held_ring[0].ring = {{'ring': {slug}_held_ring}}"
    return _called(f, slug, f"{slug}_held_ring[0].ring['ring'][0].draw", top=top, setup=setup)


def _attribute_by_name(f: Feature, slug: str) -> Held:
    """An object that finds its own method by `__getattr__`, with the state in an object that it hides."""
    name, top = _class(f, slug)
    top += (
        f"\n\nclass {name}Proxy:\n    def __init__(self, inner):\n        self.__dict__['_inner'] = inner\n\n"
        f"    def __getattr__(self, name):\n        if name.startswith('__'):\n            raise AttributeError(name)\n"
        "        return getattr(self.__dict__['_inner'], name)"
    )
    return _called(
        f, slug, f"{slug}_held_proxy.draw", top=top, setup=f"{slug}_held_proxy = {name}Proxy({name}())"
    )


def _partial(f: Feature, slug: str) -> Held:
    names = state_of(f)
    inside = {key: moved(getattr(f, key), names, "box['{}']") for key in ("setup", "step", "end", "finish")}
    body = _body(replace(f, **inside), slug)
    top = f"{f.top}\n\ndef {slug}_held_fill(box):\n{indent(inside['setup'])}\n    return box\n\ndef {slug}_held_step(box, step, x, w):\n{indent(body)}"
    setup = f"{slug}_held_draw = functools.partial({slug}_held_step, {slug}_held_fill({{}}))"
    return _called(
        f,
        slug,
        f"{slug}_held_draw",
        top=top,
        setup=setup,
        imports=f"{f.imports} functools",
        reset=f.reset or setup,
    )


def _default_argument(f: Feature, slug: str) -> Held:
    names = state_of(f)
    inside = {key: moved(getattr(f, key), names, "box['{}']") for key in ("setup", "step", "end", "finish")}
    begin = f"if not box:\n{indent(inside['setup'])}\n"
    top = f"{f.top}\n\ndef {slug}_held_draw(step, x, w, *, box={{}}):\n{indent(begin + _body(replace(f, **inside), slug))}"
    return _called(
        f,
        slug,
        f"{slug}_held_draw",
        top=top,
        setup="",
        reset=f.reset or f"{slug}_held_draw.__kwdefaults__['box'].clear()",
    )


def _context_variable(f: Feature, slug: str) -> Held:
    names = state_of(f)
    place = f"{slug}_held_context.get()['{{}}']"
    inside = {key: moved(getattr(f, key), names, place) for key in ("setup", "step", "end", "finish")}
    top = f"{f.top}\n\n{slug}_held_context = contextvars.ContextVar('{slug}_held_context')"
    return _in_place(
        f, inside, top=top, begin=f"{slug}_held_context.set({{}})", imports=f"{f.imports} contextvars"
    )


def _in_place(
    f: Feature, inside: dict[str, str], *, top: str = "", begin: str = "", imports: str = ""
) -> Held:
    """In the scope of the loop, with the state elsewhere."""
    finish = f"parts.append(repr(({inside['finish']})))" if f.finish else ""
    return Held(
        top=top or f.top,
        setup="\n".join(filter(None, (begin, inside["setup"]))),
        step=inside["step"],
        end="\n".join(filter(None, (inside["end"], finish))),
        reset=f.reset or "\n".join(filter(None, (begin, inside["setup"]))),
        files=f.files,
        imports=imports or f.imports,
    )


def _place(place: str, begin: str = "", top: str = "", imports: str = "") -> Callable[[Feature, str], Held]:
    """The state in places such as `my_held_box['{}']`."""

    def hold(f: Feature, slug: str) -> Held:
        where, first, above = (named(text, slug) for text in (place, begin, top))
        names = state_of(f)
        inside = {key: moved(getattr(f, key), names, where) for key in ("setup", "step", "end", "finish")}
        above = "\n\n".join(filter(None, (f.top, above)))
        return _in_place(f, inside, top=above, begin=first, imports=f"{f.imports} {imports}")

    return hold


_RECORD = (
    "@dataclasses.dataclass\nclass MyHeldRecord:\n    values: dict = dataclasses.field(default_factory=dict)"
)
_MADE = "sys.modules['my_held_made'].{}"


@dataclass(frozen=True, slots=True)
class Holder:
    name: str
    hold: Callable[[Feature, str], Held]
    moves: bool  # names become places
    stands_alone: bool = (
        False  # it makes and keeps the state in a function of its own, also for the body of a class
    )
    weight: float = 1.0


HOLDERS = {
    holder.name: holder
    for holder in (
        Holder("inline", _inline, False, weight=8.0),
        Holder("function_of_globals", _function_of_globals, False, True),
        Holder("closure", _closure, False, True, 2.0),
        Holder("generator", _generator, False, True, 2.0),
        Holder("module", _module, False, True, 2.0),
        Holder("text_that_was_run", _text_that_was_run, False, True, 0.5),
        Holder("object", _object, True, True, 2.0),
        Holder("object_with_slots", _object_with_slots, True, True),
        Holder("bound_method", _bound_method, True, True),
        Holder("object_in_a_cycle", _object_in_a_cycle, True, True),
        Holder("attribute_by_name", _attribute_by_name, True, True),
        Holder("partial", _partial, True, True),
        Holder("default_argument", _default_argument, True, True),
        Holder("context_variable", _context_variable, True, weight=0.6),
        Holder("dict", _place("my_held_box['{}']", "my_held_box = {}"), True),
        Holder(
            "namespace",
            _place("my_held_space.{}", "my_held_space = types.SimpleNamespace()", "", "types"),
            True,
        ),
        Holder("class_attributes", _place("MyHeld.{}", "", "class MyHeld:\n    pass"), True),
        Holder("function_attributes", _place("my_held_home.{}", "", "def my_held_home():\n    pass"), True),
        Holder("nested_containers", _place("my_held_deep[0][0]['{}']", "my_held_deep = ([{}],)"), True),
        Holder(
            "thread_local",
            _place("my_held_local.{}", "my_held_local = threading.local()", "", "threading"),
            True,
        ),
        Holder(
            "dataclass",
            _place("my_held_record.values['{}']", "my_held_record = MyHeldRecord()", _RECORD, "dataclasses"),
            True,
        ),
        Holder(
            "module_made_by_hand",
            _place(_MADE, f"{_MADE[:-3]} = types.ModuleType('my_held_made')", "", "sys types"),
            True,
        ),
    )
}


@cache
def holders_for(name: str) -> list[Holder]:
    feature = with_numbers(all_features()[name], 0)
    if feature.inline:
        return [HOLDERS["inline"]]
    movable, beside = can_be_moved(feature), _reads_the_weights(feature)
    return [h for h in HOLDERS.values() if (movable or not h.moves) and not (h.stands_alone and beside)]


def _reads_the_weights(feature: Feature) -> bool:
    """When it begins, so that it begins in the scope that has them."""
    return any(isinstance(node, ast.Name) and node.id == "w" for node in ast.walk(ast.parse(feature.setup)))
