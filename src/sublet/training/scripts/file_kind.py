"""Open files as objects of a program that is saved."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from sublet.core.errors import Unsavable
from sublet.training.program_state.kinds import Kind, Unknown
from sublet.training.scripts.open_files import describe, put_back, reopened
from sublet.training.scripts.output import is_printed_once

_LAYERS = (
    io.TextIOWrapper,
    io.BufferedReader,
    io.BufferedWriter,
    io.BufferedRandom,
    io.FileIO,
    io.StringIO,
    io.BytesIO,
)


class FileKind(Kind):
    """Where it is in which file, put back into the object that the new process has opened."""

    def content(self, thing: Any) -> Any:
        if is_printed_once(thing):
            return None
        try:
            return describe(thing)
        except Unsavable as error:
            raise Unknown(thing, error.message) from error

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if is_printed_once(thing):
            return standard_output, (isinstance(thing, io.TextIOWrapper),)
        return reopened, (self.content(thing),)

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        if content is not None:
            put_back(thing, content)


def standard_output(as_text: bool) -> Any:
    return sys.stdout if as_text else sys.stdout.buffer


def is_file(cls: type) -> bool:
    return issubclass(cls, _LAYERS)


FILE = FileKind()
