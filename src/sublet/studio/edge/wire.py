"""What leaves the service: JSON, and one shape for every error.

Rules of this file:
- An error is a status and {"code", "message", "remedy", "id"}, whoever raised it: a verb, a schema, the
  router, a bug. `id` is the request's.
- One table maps error classes to statuses. A class that is not in it has the status of its nearest base
  class.
- Messages that may name a path or an address of the installation (`HIDDEN`) are replaced by the table's own
  words.
- Texts may come from what others typed: control characters never leave, and JSON is ASCII.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from sublet.core import errors
from sublet.core.errors import SubletError

JSON_TYPE = "application/json"


class TooManyNow(errors.TooMany):
    """More requests came than one tenant or address may send; nothing was done."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class Malformed(errors.BadInput):
    """The request cannot be read; nothing was changed."""


class TooSlow(errors.Disconnected):
    """The request came too slowly and was cut; nothing was changed."""

    code = "too_slow"
    remedy = "send it again on a better line"


class BodyTooLarge(errors.TooLarge):
    """The request is larger than this address takes; nothing was stored."""

    remedy = "send less at once; the operator can raise the limit with --max-call"


class WrongType(errors.BadInput):
    """This address does not take that kind of content; nothing was changed."""

    code = "unsupported_type"
    remedy = "send application/json"


STATUS: dict[type[SubletError], int] = {
    SubletError: 500,
    errors.BadInput: 422,
    errors.NotFound: 404,
    Malformed: 400,
    errors.TooLarge: 413,
    WrongType: 415,
    errors.Misconfigured: 503,
    errors.NotIsolated: 409,
    errors.Refused: 503,
    errors.NeverFits: 422,
    errors.QuotaReached: 409,
    errors.BlockHeld: 409,
    errors.TooMany: 429,
    errors.LeaseLost: 410,
    errors.Stale: 409,
    errors.Elsewhere: 421,
    errors.NotDurable: 503,
    errors.DeviceFault: 503,
    errors.Disconnected: 503,
    TooSlow: 408,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.InvariantBroken: 500,
}

#: Errors shown only in these words: their own may name files, addresses and parts of the service.
HIDDEN: dict[type[SubletError], tuple[str, str]] = {
    errors.Misconfigured: (
        "the service cannot do this as it is set up; nothing was changed",
        "tell whoever runs the service: its log has the request's id",
    ),
    errors.InvariantBroken: (
        "the service found a rule broken and stopped; nothing was changed",
        "tell whoever runs the service: its log has the request's id",
    ),
}

ASK_FOR_ONE = "ask whoever runs the studio for one of your own; its log says what this one lacks"

#: Refusals of the protocol itself: code, what happened, what to do.
PLAIN: dict[int, tuple[str, str, str]] = {
    400: (
        "bad_input",
        "the request cannot be read; nothing was changed",
        "send HTTP/1.1 and valid JSON in UTF-8",
    ),
    404: (
        "not_found",
        "there is nothing at this address; nothing was changed",
        "GET /openapi.json lists every address",
    ),
    405: (
        "method_not_allowed",
        "this address does not take that method; nothing was changed",
        "the header Allow names those it takes",
    ),
    408: (
        "too_slow",
        "the request came too slowly and was cut; nothing was changed",
        "send it again on a better line",
    ),
    413: (
        "too_large",
        "the request is larger than this address takes; nothing was stored",
        "send less at once",
    ),
    415: ("unsupported_type", "this address does not take that kind of content", "send application/json"),
    431: ("too_large", "the headers are larger than the service takes", "send fewer or shorter headers"),
    500: (
        "internal",
        "the service made a mistake; what was committed before is safe",
        "try again; its log has the request's id",
    ),
    503: ("disconnected", "the service cannot do this now; nothing was changed", "try again in a moment"),
}

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


def dumped(value: object) -> bytes:
    return _encode(value).encode("ascii")


def status_of(error: SubletError) -> int:
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def shown(text: str, most: int = 1000) -> str:
    """The text without characters that would steer a terminal or a page."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text[:most])


def told(error: SubletError) -> tuple[str, str, str]:
    """Code, message and remedy as a client may see them."""
    hidden = next((HIDDEN[cls] for cls in type(error).__mro__ if cls in HIDDEN), None)
    if isinstance(error, errors.NotIsolated):  # its reason names no path; its remedy, an operator's, may
        hidden = (error.message, ASK_FOR_ONE)
    message, remedy = hidden or (error.message, error.remedy)
    return error.code, shown(message), shown(remedy)


def error_json(code: str, message: str, remedy: str, request_id: str) -> dict[str, str]:
    return {"code": code, "message": message, "remedy": remedy, "id": request_id}


class Json(Response):
    """A JSON response from a value, or from bytes that are JSON already."""

    media_type = JSON_TYPE

    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else dumped(value)
        super().__init__(body, status, headers)


def refusal(error: SubletError, request_id: str) -> Json:
    headers: dict[str, str] = {}
    status = status_of(error)
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="sublet"'
    if isinstance(error, TooManyNow):
        headers["Retry-After"] = str(max(1, round(error.seconds + 0.499)))
    elif status in (429, 503):
        headers["Retry-After"] = "1"
    return Json(error_json(*told(error), request_id), status, headers)


def plain_refusal(
    status: int, request_id: str, *, message: str = "", headers: Mapping[str, str] | None = None
) -> Json:
    """A refusal at the protocol level, before any verb was called."""
    code, usual, remedy = PLAIN.get(status) or PLAIN[400 if status < 500 else 500]
    return Json(error_json(code, shown(message) or usual, remedy, request_id), status, headers)
