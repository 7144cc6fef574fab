"""A broker's address: what the URL says, and which parts of it may be shown.

Rules of this file:
- A password is in `password` and nowhere else: not in `place`, not in an error, not in a repr. An address
  that could be read two ways because of an unquoted character in its password is refused, so that no piece of
  one ends up as a host or a path.
- An unknown option is refused by name: a misspelt `visibility` would otherwise be a silent default.
- A missing extra is reported here, with the line that installs it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from sublet.core.errors import BadInput, MissingExtra

#: How long one question to a broker may take, connecting included. `?timeout=SECONDS` says otherwise.
TIMEOUT_SECONDS = 10.0
#: How long a received message is hidden from other consumers, where the broker goes by time.
#: `?visibility=SECONDS` says otherwise.
VISIBILITY_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    scheme: str
    host: str
    port: int
    path: str  # without its first slash, unquoted
    queue: str  # its name at the broker
    user: str = ""
    password: str = field(default="", repr=False)
    options: dict[str, str] = field(default_factory=dict)

    @property
    def timeout_seconds(self) -> float:
        return self.number("timeout", TIMEOUT_SECONDS, least=0.1, most=3600)

    @property
    def visibility_seconds(self) -> int:
        return int(self.number("visibility", VISIBILITY_SECONDS, least=1, most=12 * 3600))

    @property
    def place(self) -> str:
        """The part that may be shown: host and path, never user or password."""
        where = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{where}" + (f":{self.port}" if self.port else "")

    def number(self, option: str, otherwise: float, *, least: float, most: float) -> float:
        text = self.options.get(option, "")
        try:
            value = float(text) if text else otherwise
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise BadInput(f"{option}={text[:20]!r} in a broker's address is {least:g} to {most:g} seconds")
        return value


def read_address(
    url: str, queue: str, *, options: Collection[str] = (), port: int = 0, host: str = ""
) -> BrokerAddress:
    """`options` are those this broker knows besides `queue` and `timeout`; `port` and `host` count where the
    address names none."""
    parts, found_port = _split(url)
    known = {"queue", "timeout", *options}
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in given:
        if name not in known:
            raise BadInput(
                f"a {parts.scheme}:// address has no option {name[:40]!r}",
                remedy=f"options are {', '.join(sorted(known))}; quote '&', '?' and '#' in a password "
                "with %26, %3F and %23",
            )
    address = BrokerAddress(
        scheme=parts.scheme,
        host=unquote(parts.hostname or "") or host,
        port=found_port or port,
        path=unquote(parts.path[1:]),
        queue=given.get("queue") or queue,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        options=given,
    )
    address.number("timeout", TIMEOUT_SECONDS, least=0.1, most=3600)
    if "visibility" in known:
        address.number("visibility", VISIBILITY_SECONDS, least=1, most=12 * 3600)
    return address


def _split(url: str) -> tuple[SplitResult, int]:
    quoting = (
        "quote what is special in a password: '@' is %40, '/' is %2F, '#' is %23, ':' is %3A, '?' is %3F"
    )
    try:
        parts = urlsplit(url)
        port = parts.port or 0
    except ValueError:
        raise BadInput("the broker's address cannot be read", remedy=quoting) from None
    if not parts.scheme or "://" not in url:
        raise BadInput("a broker's address begins with its kind, as amqp:// or redis://")
    if parts.fragment or "#" in url or "@" in parts.path + parts.query or parts.netloc.count("@") > 1:
        raise BadInput("the broker's address can be read two ways", remedy=quoting)
    return parts, port


def library(name: str, kind: str, extra: str) -> Any:
    """The package a broker needs, or the sentence that says how to get it."""
    try:
        return import_module(name)
    except ImportError as missing:
        raise MissingExtra(
            f"{kind} needs the package {name.split('.')[0]}, which is installed with the extra '{extra}'",
            remedy=f"pip install 'sublet[{extra}]'",
        ) from missing
