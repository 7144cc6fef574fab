"""Frames of a call as lines of JSON: what nobody is shown is not held in the service's memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from sublet.core.studio import frames
from sublet.studio.routes.calls import _as_lines


def _lines_of(pieces: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    """The lines, and how many of the pieces were taken."""
    taken = 0

    async def passing() -> AsyncIterator[bytes]:
        nonlocal taken
        for piece in pieces:
            taken += 1
            yield piece

    async def heard() -> bytes:
        return b"".join([line async for line in _as_lines(passing(), "c", "r")])

    return [json.loads(line) for line in asyncio.run(heard()).splitlines()], taken


def test_parts_of_an_answer_that_are_not_shown_are_not_read() -> None:
    done = frames.head_frame(frames.DONE, {"ok": True, "parts": 1})
    part = [frames.header(frames.PART, 3 << 30), *[b"x" * 65536] * 40]
    lines, taken = _lines_of([frames.frame(frames.OUT, b"hello"), done, *part])
    assert [line["kind"] for line in lines] == ["text", "done"]
    assert taken == 2


def test_an_error_that_is_too_large_is_said_in_words() -> None:
    done = frames.head_frame(frames.DONE, {"ok": False, "parts": 1})
    lines, taken = _lines_of([done, frames.header(frames.PART, 3 << 30), *[b"x" * 65536] * 40])
    assert [line["kind"] for line in lines] == ["failed"]
    assert lines[0]["error"]["code"] == "too_large"
    assert taken == 2
