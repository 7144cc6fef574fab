"""A sink from what the user gives: an address, a function, or the user's own sink."""

from __future__ import annotations

import re
from typing import Any

from sublet.core.errors import BadInput
from sublet.machine.plugins import installed
from sublet.ports.sink import OpenSink, Sink
from sublet.queues.sinks.function import CallableSink

ACCEPTED = (
    "sqlite:PATH, postgresql://user@host/database, dir:PATH, s3://bucket/prefix, gs://…, az://…, an "
    "address of SQLAlchemy's such as "
    "mysql+pymysql://user@host/database, or in Python a function f(key, body, result)"
)
#: The entry point for addresses whose scheme has none.
ANY_OTHER = "sqlalchemy"
_VERBS = ("check", "store", "known", "describe", "close")


def open_sink(what: Any) -> Sink:
    if isinstance(what, str):
        return _by_address(what.strip())
    if not isinstance(what, type):
        lacking = [verb for verb in _VERBS if not callable(getattr(what, verb, None))]
        if not lacking:
            sink: Sink = what
            return sink
        if callable(what):
            return CallableSink(what)
        if len(lacking) < len(_VERBS):
            raise BadInput(
                f"{type(what).__name__} is no sink: it has no {', '.join(lacking)}",
                remedy="see sublet.ports.sink",
            )
    name = what.__name__ + ", a class," if isinstance(what, type) else f"a {type(what).__name__}"
    raise BadInput(f"{name} is no sink; nothing was opened", remedy=f"give {ACCEPTED}")


def _by_address(url: str) -> Sink:
    if re.search(r"[\x00-\x1f\x7f]", url):
        # Parsers end at some of them, and would take a part for the whole.
        raise BadInput("the sink's address holds a control character; nothing was opened")
    found = re.match(r"([A-Za-z][A-Za-z0-9+_.-]*):", url)
    scheme = found.group(1).lower() if found else ""
    offered = installed("sublet.sinks", scheme)
    if scheme not in offered.names and url[len(scheme) :].startswith("://"):
        scheme = ANY_OTHER
    if not scheme or scheme not in offered.names:
        # Not repeated: there may be a password in it.
        raise BadInput(
            "the sink's address begins with no known scheme; nothing was opened", remedy=f"write {ACCEPTED}"
        )
    opens: OpenSink = offered[scheme].load()
    return opens(url)
