"""The studio's errors, as the exceptions that the same failure raises without a studio.

Rules of this file:
- The code tells the class; message and remedy are the studio's own words.
- A code this version does not know becomes the nearest family its HTTP status names: `except` clauses go on
  working.
- What another machine sends is text of any length and kind: it is cut, and checked before use.
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
#: The error family of a status, for codes that are not known.
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
    """Make the exception from an error's JSON: the body of an answer, or the end of a stream."""
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
    """Return None if the answer is not one of a studio."""
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
    """Add the request's id, by which the operator finds it in the log; only for the studio's own faults."""
    if status >= 500 and isinstance(said.get("id"), str):
        error.add_note(f"the studio's log has it as request {said['id'][:80]}")
    return error


def _text(value: object) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""
