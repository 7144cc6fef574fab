"""The studio's errors, as the exceptions they would be without a studio.

Rules of this file:
- The code says the class; message and remedy are the studio's own words.
- A code this version does not know becomes the nearest family its HTTP status names: `except` clauses go on working.
- What comes from elsewhere is text, of any length and kind: it is cut, and never trusted to be what it should be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sublet.core.errors import (
    BadInput,
    Disconnected,
    LeaseLost,
    NotFound,
    Refused,
    Stale,
    SubletError,
    TooLarge,
    Unauthorized,
    WorkerLost,
    error_tree,
)

_LONGEST = 10_000
#: What a status means when the code says nothing.
_BY_STATUS: Mapping[int, type[SubletError]] = {
    400: BadInput,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    405: BadInput,
    408: Disconnected,
    409: Stale,
    410: LeaseLost,
    413: TooLarge,
    415: BadInput,
    421: Stale,
    422: BadInput,
    429: Refused,
    502: Disconnected,
    503: Disconnected,
    504: Disconnected,
}


def error_from(said: Mapping[str, Any], status: int = 0) -> SubletError:
    """From an error's JSON: the body of an answer, or what a stream ended with."""
    code, message, remedy = (_text(said.get(name)) for name in ("code", "message", "remedy"))
    made = _class_of(code, status)
    if issubclass(made, WorkerLost):
        begun = said.get("begun")
        # Unless it says that nothing had begun, it may have: then nothing is repeated.
        lost = made(message, begun=begun is not False, reason=_text(said.get("reason")), remedy=remedy)
        return _with_id(lost, said, status)
    error = made(message, remedy=remedy)
    version = said.get("version")
    if isinstance(version, int) and hasattr(error, "version"):
        error.version = version
    return _with_id(error, said, status)


def error_of_answer(status: int, body: bytes) -> SubletError | None:
    """None: what answers there does not speak as a studio does."""
    try:
        said = json.loads(body)
    except ValueError:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("code"), str):
        return None
    return error_from(said, status)


def _class_of(code: str, status: int) -> type[SubletError]:
    for known in error_tree():
        if known.code == code and known.__module__ == SubletError.__module__:
            return known
    return _BY_STATUS.get(status, SubletError)


def _with_id(error: SubletError, said: Mapping[str, Any], status: int) -> SubletError:
    """What the operator finds it by in the log; only where it is the studio's own fault."""
    if status >= 500 and isinstance(said.get("id"), str):
        error.add_note(f"the studio's log has it as request {said['id'][:80]}")
    return error


def _text(value: object) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""
