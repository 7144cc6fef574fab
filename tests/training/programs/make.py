"""A program from a seed: what it is made of is drawn, then its text is put together.

Rules of this file:
- A recipe says everything. The same recipe is the same text, on every machine and whatever is installed.
- What is drawn fits together: a body with `continue` stands in a loop that survives it, a class body has no closures, and so on.
- Seven of ten programs have nothing in them that would justify a refusal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tests.training.programs.bodies import BODIES
from tests.training.programs.features import Feature, all_features, with_names, with_numbers
from tests.training.programs.frames import FRAMES
from tests.training.programs.holders import HOLDERS, Held, bound_names, holders_for, indent
from tests.training.programs.loops import LOOPS
from tests.training.programs.models import MODELS
from tests.training.programs.pieces import Frame, LoopPiece, Model, Piece, filled
from tests.training.programs.sites import AROUND, SITES

MAIN = "train.py"
#: Of all programs.
WITH_TORCH, MAY_BE_REFUSED = 0.1, 0.3
_STEPS = ((2, 6), (2, 7), (2, 8), (3, 4), (3, 5), (3, 6), (4, 4))


@dataclass(frozen=True, slots=True)
class Use:
    """One feature in a program: where its state is, and the seed of its own numbers."""

    feature: str
    holder: str = "inline"
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.feature}@{self.holder}#{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    model: str = "array"
    frame: str = "module"
    site: str = "assignment"
    around: str = "nothing"
    loop: str = "range"
    body: str = "plain"
    rounds: int = 2
    batches: int = 7
    uses: tuple[Use, ...] = ()

    PIECES = ("model", "frame", "site", "around", "loop", "body")

    def __str__(self) -> str:
        """A line from which `recipe_of` makes it again."""
        pieces = [f"{kind}={getattr(self, kind)}" for kind in self.PIECES]
        return " ".join([*pieces, f"steps={self.rounds}x{self.batches}", *map(str, self.uses)])

    @property
    def names(self) -> list[str]:
        """Of everything in it that can be at fault."""
        pieces = [f"{kind}:{name}" for kind in self.PIECES if (name := getattr(self, kind)) not in _PLAIN]
        return [
            *pieces,
            *(use.feature for use in self.uses),
            *(f"holder:{u.holder}" for u in self.uses if u.holder != "inline"),
        ]


_PLAIN = {"array", "module", "assignment", "nothing", "range", "plain"}


def recipe_of(text: str) -> Recipe:
    given: dict[str, object] = {}
    uses = []
    for word in text.split():
        kind, equals, name = word.partition("=")
        if kind == "steps":
            given["rounds"], given["batches"] = map(int, name.split("x"))
        elif equals:
            given[kind] = name
        else:
            feature, _, rest = word.partition("@")
            holder, _, seed = rest.partition("#")
            uses.append(Use(feature, holder or "inline", int(seed or 1)))
    return Recipe(**given, uses=tuple(uses))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    seed: int
    recipe: Recipe
    files: dict[str, str]  # by name; the one to start is `MAIN`
    steps: int  # of its training loop; more, when it trains more than once
    may_be_refused: tuple[str, ...] = ()  # reasons that would be right
    needs: frozenset[str] = field(default=frozenset())  # packages that may be missing
    torch: bool = False

    @property
    def features(self) -> list[str]:
        return self.recipe.names


def make_program(seed: int) -> Program:
    return cook(draw_recipe(seed), seed=seed)


# --- drawing -------------------------------------------------------------------------------------------------

_T = TypeVar("_T", bound=Piece)


def draw_recipe(seed: int) -> Recipe:
    rng = random.Random(f"program {seed}")
    torch, refusable = rng.random() < WITH_TORCH, rng.random() < MAY_BE_REFUSED

    def chosen(table: Mapping[str, _T], fits: Callable[[_T], bool] = lambda piece: True) -> _T:
        rest = [piece for piece in table.values() if fits(piece) and (refusable or not piece.refusable)]
        return rng.choices(rest, [piece.weight for piece in rest])[0]

    model = chosen(MODELS, lambda piece: (piece.kind == "torch") == torch)
    frame = chosen(FRAMES)
    site = chosen(SITES) if frame.call else SITES["assignment"]
    loop = chosen(LOOPS, lambda piece: loop_fits(piece, frame))
    body = chosen(BODIES, lambda piece: body_fits(piece, loop, frame))
    rounds, batches = rng.choice(_STEPS)
    around = chosen(AROUND)
    recipe = Recipe(
        model=model.name,
        frame=frame.name,
        site=site.name,
        around=around.name,
        loop=loop.name,
        body=body.name,
        rounds=rounds,
        batches=batches,
    )
    uses = _draw_uses(rng, model, frame, refusable)
    if around.name == "temporary_folder":  # it is removed by its name, which has no folder
        uses = tuple(use for use in uses if use.feature != "working_directory")
    return replace(recipe, uses=uses)


def loop_fits(loop: LoopPiece, frame: Frame) -> bool:
    if frame.scope == "class" and (loop.own_scope or loop.calls):
        return False
    return not (loop.calls and frame.after_each)


def body_fits(body: LoopPiece, loop: LoopPiece, frame: Frame) -> bool:
    if body.turns and (loop.calls or "break" in loop.text.partition("$BODY")[2]):
        return False
    return not (body.own_scope and frame.scope == "class")


def feature_fits(feature: Feature, model: Model, frame: Frame) -> bool:
    if feature.weights and feature.weights != model.kind:
        return False
    if frame.scope == "class" and feature.inline:
        return False
    modules = set(feature.imports.split())
    if "event loop" in frame.refusable and "asyncio" in modules:
        return False
    return not ("thread" in frame.refusable and "signal" in modules)


def _draw_uses(rng: random.Random, model: Model, frame: Frame, refusable: bool) -> tuple[Use, ...]:
    fitting = [f for f in all_features().values() if feature_fits(f, model, frame)]
    if not refusable:
        fitting = [f for f in fitting if not f.refusable]
    weights = [f.weight * (6 if f.weights == "torch" else 1) for f in fitting]
    uses: list[Use] = []
    for number in range(rng.choice((2, 2, 3, 3, 4, 4, 5, 6))):
        feature = rng.choices(fitting, weights)[0]
        if refusable and number == 0 and not frame.refusable:
            feature = rng.choice([f for f in fitting if f.refusable])
        if feature.name in {use.feature for use in uses}:
            continue
        holders = holders_for(feature.name)
        if frame.scope == "class":
            holders = [holder for holder in holders if holder.stands_alone]
        holder = rng.choices(holders, [holder.weight for holder in holders])[0]
        uses.append(Use(feature.name, holder.name, rng.randrange(1, 10_000)))
    if "working_directory" in {use.feature for use in uses}:  # the others name their files without a folder
        uses = [use for use in uses if all_features()[use.feature].family != "effects"]
    return tuple(uses)


#: A feature that any way of keeping and resuming should manage, and that stands everywhere.
_CALM = Use("deque_with_a_limit")


def alone() -> Iterator[tuple[str, Recipe]]:
    """Each thing that a program can have, once, with as little as possible beside it."""
    for name, feature in all_features().items():
        model = "torch_sgd" if feature.weights == "torch" else "array"
        yield name, Recipe(model=model, uses=(Use(name),))
    for name in HOLDERS:
        yield f"holder:{name}", Recipe(uses=(replace(_CALM, holder=name),))
    for name in MODELS:
        yield f"model:{name}", Recipe(model=name, uses=(_CALM,))
    for name, frame in FRAMES.items():
        use = replace(_CALM, holder="closure") if frame.scope == "class" else _CALM
        yield f"frame:{name}", Recipe(frame=name, uses=(use,))
    for name in SITES:
        yield f"site:{name}", Recipe(frame="function", site=name, uses=(_CALM,))
    for kind, table in (("around", AROUND), ("loop", LOOPS), ("body", BODIES)):
        for name in table:
            yield f"{kind}:{name}", replace(Recipe(uses=(_CALM,)), **{kind: name})


# --- putting together ----------------------------------------------------------------------------------------


def used(use: Use, number: int) -> tuple[Feature, Held, str]:
    """The feature with its numbers and names, and how it is held."""
    slug = f"{use.feature.split('_')[0]}{number}"
    feature = with_names(with_numbers(all_features()[use.feature], use.seed), slug)
    return feature, HOLDERS[use.holder].hold(feature, slug), slug


def cook(recipe: Recipe, *, seed: int = 0, forget: tuple[int, int] | None = None) -> Program:
    """`forget` is (number of a use, step): a program that at this step loses this state and nothing else."""
    model, frame, site = MODELS[recipe.model], FRAMES[recipe.frame], SITES[recipe.site]
    around, loop, body = AROUND[recipe.around], LOOPS[recipe.loop], BODIES[recipe.body]
    parts = [used(use, number) for number, use in enumerate(recipe.uses, 1)]
    held = [held for _, held, _ in parts]
    count = recipe.rounds * recipe.batches
    numbers = {"N": str(count), "E": str(recipe.rounds), "B": str(recipe.batches)}

    step = ["x = 0.1 * float(item)"]
    for number, (_, held_as, slug) in enumerate(parts):
        if forget is not None and forget[0] == number:
            step.append(f"if step == {forget[1]}:\n{indent(held_as.reset)}")
        step += [held_as.step, f"x += {0.3 / (1 + number):.3f} * float({slug}_v)"]
    update = "\n".join(filter(None, (model.text, frame.after_each)))
    inner = filled(body.text, STEP="\n".join(step), UPDATE=update)

    setup = ["parts = []", model.setup, *(h.setup for h in held), body.setup]
    if loop.calls:
        setup.append(_function_of_the_body(inner, "\n".join(filter(None, setup)), frame))
    setup.append(loop.setup)
    looping = filled(around.text, LOOP=filled(loop.text, BODY=inner), UPDATE=update)
    text = filled(
        frame.text,
        SETUP=_joined(setup),
        LOOP=looping,
        FINISH=_joined([*(h.end for h in held), loop.end, body.end, model.end]),
    )
    pieces: list[Piece] = [model, around, loop, body, frame]
    tops = [*(piece.top for piece in pieces), *(h.top for h in held)]
    imports = {name for piece in pieces for name in piece.imports.split()}
    imports |= {name for h in held for name in h.imports.split()}
    files = {name: text for piece in pieces for name, text in piece.files}
    for h in held:
        files |= h.files
    own = {name.removesuffix(".py") for name in files if name.endswith(".py")}
    whole, top = filled(text, **numbers), filled(_joined(tops, 2), **numbers)
    files |= _modules(recipe, frame, site, whole, top, imports, own)
    reasons = [thing.refusable for thing in (*(feature for feature, _, _ in parts), *pieces, site)]
    return Program(
        seed=seed,
        recipe=recipe,
        files=files,
        steps=count,
        may_be_refused=tuple(dict.fromkeys(filter(None, reasons))),
        needs=frozenset(filter(None, [frame.needs, *(feature.needs for feature, _, _ in parts)])),
        torch=model.kind == "torch",
    )


def _joined(texts: Sequence[str], between: int = 1) -> str:
    return ("\n" * between).join(text.strip("\n") for text in texts if text.strip("\n"))


def _function_of_the_body(body: str, setup: str, frame: Frame) -> str:
    carried = sorted(bound_names(body) & bound_names(setup))
    keyword = "global" if frame.scope == "module" else "nonlocal"
    declared = f"{keyword} {', '.join(carried)}\n" if carried else ""
    return f"def one(step):\n{indent(f'{declared}item = step % 5{chr(10)}{body}{chr(10)}return x')}\n"


def _modules(
    recipe: Recipe, frame: Frame, site: Piece, text: str, tops: str, imports: set[str], own: set[str]
) -> dict[str, str]:
    """The main script, and the module beside it that some frames stand in. `own` are the modules of features."""
    calling = "" if not frame.call else _joined([site.setup, filled(site.text, CALL=frame.call)])
    needed = {"hashlib", *site.imports.split()}
    if not frame.file:
        head = _head(imports | needed, own)
        return {MAIN: _joined([head, tops, site.top, text, calling, _LAST], 3) + "\n"}
    beside = {frame.file} if frame.call.startswith(f"{frame.file}.") else set()
    needed |= {name for name in frame.imports.split() if name in frame.call}
    return {
        f"{frame.file}.py": _joined([_head(imports, own), tops, text], 3) + "\n",
        MAIN: _joined([_head(needed | beside, beside), site.top, calling, _LAST], 3) + "\n",
    }


def _head(imports: set[str], own: set[str]) -> str:
    """Modules of the program itself are imported when the random numbers are seeded: some draw while they are."""
    lines = [f"import {name}" for name in sorted((imports | {"random"}) - own)]
    lines += ["", "random.seed(11)"] + (["numpy.random.seed(12)"] if "numpy" in imports else [])
    lines += ["torch.manual_seed(13)"] if "torch" in imports else []
    return "\n".join([*lines, *(f"import {name}" for name in sorted(imports & own))])


_LAST = """
digest = hashlib.sha256("\\n".join(map(str, parts)).encode("utf-8", "backslashreplace")).hexdigest()
with open("result.txt", "w") as result:
    result.write("\\n".join(map(ascii, parts)))
print("result", digest)
"""
