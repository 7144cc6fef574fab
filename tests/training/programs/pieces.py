"""What a program is put together from, besides its features.

Rules of this file:
- A piece is text with places for other text: `$NAME` alone in a line is a block that is indented as that line is, and elsewhere a word.
- `$N` is the number of steps, `$E` rounds of `$B` steps each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

CALLED_FROM_C = "it trains in a function that C code calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    name: str
    text: str
    setup: str = ""  # in the scope of the loop, before it
    top: str = ""  # definitions of the module
    imports: str = ""
    end: str = ""  # after the loop
    files: tuple[tuple[str, str], ...] = ()  # beside the script
    refusable: str = ""  # why a refusal would be right
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPiece(Piece):
    """A loop, or the body of one."""

    calls: bool = False  # the body is a function
    turns: bool = False  # the body has a `continue` or a `break` of the loop
    own_scope: bool = False  # not in the body of a class: it has functions that use the variables around them


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Piece):
    kind: str  # what features may ask of `w`


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame(Piece):
    call: str = ""  # an expression for the list of texts in which it ends
    scope: str = "function"  # or "module" or "class"
    file: str = ""  # a module beside the script that holds it, and all definitions
    after_each: str = ""  # stands after each update
    needs: str = ""  # a package that may be missing


_P = TypeVar("_P", bound=Piece)


def table_of(pieces: Iterable[_P]) -> dict[str, _P]:
    texts = ("text", "setup", "top", "end")
    return {p.name: replace(p, **{key: getattr(p, key).strip("\n") for key in texts}) for p in pieces}


def filled(text: str, **blocks: str) -> str:
    lines = []
    for line in text.split("\n"):
        found = re.fullmatch(r"(\s*)\$([A-Z]+)", line)
        if found is None or found[2] not in blocks:
            lines.append(re.sub(r"\$([A-Z]+)", lambda m: blocks.get(m[1], m[0]), line))
            continue
        lines += [found[1] + inner if inner else "" for inner in (blocks[found[2]] or "pass").split("\n")]
    return "\n".join(lines)
