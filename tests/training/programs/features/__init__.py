"""What a feature is: a few lines of a program that keep state from step to step and let it flow into the weights.

Rules of this package:
- One feature is one `feature(...)` call in the module of its family. It is text, so that it reads as a user would write it.
- Names that begin with `my_` and `My` are its own. Each use in a program gets another name in their place.
- `«3..9»` is a number and `«a|b»` a choice, drawn from the program's seed.
- `setup` runs once before the loop and makes the state; `step` runs in each step, changes the state and leaves a number in `my_v`. It may
  use `step` (a number), `x` (what came before in this step) and `w` (the weights); where it needs a certain kind of `w` it says so.
- Every feature ends alike under plain Python, whatever the hash seed and the folder. Where the order of a set or an identity matters, the
  program compares it with what it saw before, so that an undisturbed run always sees the same.
- `setup` has no `global` and no `nonlocal`. What needs one is a function in `top`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module

FAMILIES = (
    "iterators",
    "generators",
    "outside",
    "classes",
    "process_state",
    "unseen",
    "containers",
    "objects",
    "values",
    "libraries",
    "threads",
    "effects",
    "with_torch",
    "everyday",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    name: str
    family: str
    setup: str
    step: str
    imports: str = ""  # names of modules, between blanks
    top: str = ""  # definitions at the top of the module
    finish: str = ""  # an expression whose `repr` belongs to the result
    end: str = ""  # statements after the loop
    reset: str = ""  # what forgets the state; by default the setup once more
    files: dict[str, str] = field(default_factory=dict)  # beside the script
    inline: bool = False  # only as it is, in the scope of the loop
    weights: str = ""  # the only kind of weights it works with: "numpy" or "torch"
    refusable: str = ""  # why a refusal would be right
    needs: str = ""  # a package that may be missing
    weight: float = 1.0  # how often it is drawn

    @property
    def forgets(self) -> str:
        return self.reset or self.setup


@cache
def all_features() -> dict[str, Feature]:
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
    return dict(_known)


_known: dict[str, Feature] = {}


def feature(family: str, name: str, *, setup: str = "", step: str, **given: object) -> None:
    assert name not in _known, name
    assert re.fullmatch(r"[a-z0-9_]+", name), name
    texts = {key: value.strip("\n") if isinstance(value, str) else value for key, value in given.items()}
    if given.get("weights") == "torch":
        texts["imports"] = f"{texts.get('imports', '')} torch".strip()
    _known[name] = Feature(
        name=name, family=family.rpartition(".")[2], setup=setup.strip("\n"), step=step.strip("\n"), **texts
    )  # type: ignore[arg-type]


_TEXTS = ("imports", "top", "setup", "step", "finish", "end", "reset")


def with_numbers(feature: Feature, seed: int) -> Feature:
    """Numbers and choices in their places."""
    rng = random.Random(f"{feature.name} {seed}")

    def draw(found: re.Match[str]) -> str:
        low, dots, high = found[1].partition("..")
        return str(rng.randint(int(low), int(high))) if dots else rng.choice(found[1].split("|"))

    return _changed(feature, lambda text: re.sub(r"«([^«»]*)»", draw, text))


def with_names(feature: Feature, slug: str) -> Feature:
    """Its own names, told apart from those of other uses."""
    return _changed(feature, lambda text: named(text, slug))


def named(text: str, slug: str) -> str:
    camel = "".join(word.capitalize() for word in slug.split("_"))
    return re.sub(r"\bMy(?=[A-Z])", camel, re.sub(r"\bmy_", f"{slug}_", text))


def _changed(feature: Feature, change: Callable[[str], str]) -> Feature:
    texts = {name: change(getattr(feature, name)) for name in _TEXTS}
    files = {change(path): change(text) for path, text in feature.files.items()}
    return replace(feature, **texts, files=files)
