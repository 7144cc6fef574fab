"""HTTP to one studio: connections that are kept, requests that may be repeated, answers that are checked.

Rules of this file:
- The token travels in one header, to the one address it was given for, over TLS or to this machine itself. It
  is in no URL, no log, no message and no `repr`. A redirect is refused, so that nobody else sees the token.
- Every request of the client may be sent twice without harm (ids are made here), so one whose connection was
  cut is sent again, at growing pauses, until the patience is over. Then `Disconnected` is raised, with what
  to do.
- The first contact has little patience: a wrong address is reported at once.
- Belongs to the process that made it; a forked child opens connections of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from sublet.client.errors import error_of_answer
from sublet.core.errors import BadInput, Disconnected, Misconfigured, SubletError, Unauthorized

#: How long a request or a call whose connection was cut is tried again before it is given up.
PATIENCE_SECONDS = 60.0
#: The same before the studio was ever reached.
FIRST_PATIENCE_SECONDS = 2.0
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0
#: A kept connection is not used again after so long: servers close idle ones, some after five seconds.
_KEPT_SECONDS = 4.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_TOKEN = re.compile(r"[\x21-\x7e]{1,512}")

Body = bytes | Sequence[bytes | memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudioAddress:
    """Where a studio is."""

    secure: bool
    host: str
    port: int
    prefix: str  # of the path, without a slash at its end

    def __str__(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{shown}:{self.port}{self.prefix}"


def parse_address(url: str) -> StudioAddress:
    example = "write it as https://studio.example.org or http://127.0.0.1:8080"
    if not isinstance(url, str) or not url.strip():
        raise BadInput("the studio's address is empty", remedy=example)
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise BadInput("the studio's address cannot be read", remedy=example) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"the studio's address {_shown(url)} is not one", remedy=example)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise BadInput(
            "the studio's address holds more than an address",
            remedy="give the token apart, as SUBLET_TOKEN or as the second argument; it must not be in a URL",
        )
    secure = parts.scheme == "https"
    return StudioAddress(
        secure=secure,
        host=parts.hostname,
        port=port or (443 if secure else 80),
        prefix=parts.path.rstrip("/"),
    )


def _shown(url: str) -> str:
    """The address without what could be a secret."""
    return repr(url.split("?")[0].split("#")[0].rpartition("@")[2][:80])


def is_this_machine(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Cut(Exception):
    """The connection was lost or refused, or the studio asks to wait. `kept`: it was an old one, which the
    other end may have closed long ago. `pause`: how long to wait at least."""

    def __init__(self, why: str, *, kept: bool = False, pause: float = 0.0) -> None:
        super().__init__(why)
        self.why = why
        self.kept = kept
        self.pause = pause


class RetryPauses:
    """How long to try, and the pauses between: they grow, and differ between clients that were cut off
    together."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds
        self._pause = _FIRST_PAUSE

    def pause(self, at_least: float = 0.0) -> bool:
        """Sleep before the next try; False when the time is over."""
        wanted = max(at_least, self._pause * random.uniform(0.5, 1.0))
        left = self._until - time.monotonic()
        if left <= 0 or at_least > left:
            return False
        time.sleep(min(wanted, left))
        self._pause = min(_LONGEST_PAUSE, self._pause * 2)
        return True

    def renew(self) -> None:
        """The connection works again: the next cut starts with short pauses."""
        self._until = time.monotonic() + self.seconds
        self._pause = _FIRST_PAUSE


@dataclass(slots=True)
class _Pool:
    """The kept connections of one process."""

    pid: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: list[tuple[float, http.client.HTTPConnection]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise _not_a_studio(self.status) from None


class Client:
    def __init__(
        self,
        url: str,
        token: str,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        certificate: str = "",
        in_the_clear: bool = False,
    ) -> None:
        """`certificate`: a file with the certificate to trust, for a studio that signed its own.
        `in_the_clear`: the network between is trusted with the token."""
        self.address = parse_address(url)
        if not isinstance(token, str) or not token.strip():
            raise Unauthorized(
                "there is no token for the studio",
                remedy="set SUBLET_TOKEN to the token the operator gave you (sublet tenant token add NAME)",
            )
        if _TOKEN.fullmatch(token.strip()) is None:
            raise Unauthorized("what was given as the token cannot be one; it was not sent anywhere")
        if not (self.address.secure or in_the_clear or is_this_machine(self.address.host)):
            raise Misconfigured(
                f"{self.address} is another machine, and without TLS the token would travel in the clear; "
                "nothing was sent",
                remedy="use https://, or a tunnel: ssh -L 8080:127.0.0.1:8080 HOST and "
                "http://127.0.0.1:8080; "
                "in a network you trust: sublet.connect(url, token, in_the_clear=True)",
            )
        self._token = token.strip()
        self.patience_seconds = patience_seconds
        self._certificate = certificate
        self._tls: ssl.SSLContext | None = None
        self._pool = _Pool(os.getpid())
        self._reached = False

    def __repr__(self) -> str:
        return f"<Client of {self.address}>"

    def __reduce__(self) -> Any:
        raise TypeError("a connection to a studio cannot be pickled: it holds a token")

    # whole answers

    def get(self, path: str, query: Mapping[str, object] | None = None, **more: Any) -> Any:
        return self.ask("GET", path, query=query, **more).json()

    def post(self, path: str, body: Mapping[str, object] | None = None, **more: Any) -> Any:
        return self.ask("POST", path, document=body or {}, **more).json()

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        document: object = None,
        body: Body = b"",
        kind: str = "application/octet-stream",
        patience_seconds: float | None = None,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> Answered:
        """Ask, and raise the error the studio answered with, or `Disconnected` when the patience is over."""
        if document is not None:
            body, kind = json.dumps(document, allow_nan=False).encode(), "application/json"
        patience = self.patience(patience_seconds)
        while True:
            try:
                with self._exchange(method, path, query, body, kind, answer_seconds) as (response, keep):
                    with cuts():
                        data = response.read()
                    keep()
                    answered = Answered(status=response.status, headers=response.headers, body=data)
                error = self._error_in(answered)
            except Cut as cut:
                if cut.kept or patience.pause():
                    continue
                raise self.unreachable(cut.why) from None
            if error is None:
                return answered
            if not (_may_be_asked_again(answered, error) and patience.pause(_retry_after(answered))):
                raise error

    def patience(self, seconds: float | None = None) -> RetryPauses:
        if seconds is None:
            seconds = self.patience_seconds if self._reached else FIRST_PATIENCE_SECONDS
        return RetryPauses(seconds)

    # streams

    @contextlib.contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: Body = b"",
        kind: str = "application/octet-stream",
        silence_seconds: float = ANSWER_SECONDS,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """One attempt: `Cut` when the connection goes. What is read of the answer is read within `cuts`."""
        with self._exchange(method, path, query, body, kind, silence_seconds, headers) as (response, keep):
            if response.status >= 300:
                with cuts():
                    data = response.read()
                keep()
                error = self._error_in(Answered(status=response.status, headers=response.headers, body=data))
                if response.status == 429 and error is not None:
                    raise Cut(error.message, pause=_retry_after_of(response.headers)) from error
                raise error or _not_a_studio(response.status)
            self._reached = True
            yield response
            if response.isclosed():
                keep()

    # one exchange

    @contextlib.contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None,
        body: Body,
        kind: str,
        seconds: float,
        more: Mapping[str, str] | None = None,
    ) -> Iterator[tuple[http.client.HTTPResponse, Any]]:
        connection, kept = self._take()
        keeps = over = False

        def keep() -> None:
            nonlocal keeps
            keeps = True

        try:
            with cuts(kept):
                self._send(connection, method, path, query, body, kind, seconds, more)
                response = connection.getresponse()
            yield response, keep
            over = keeps and not response.will_close
        finally:
            if over:
                self._give_back(connection)
            else:
                connection.close()

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        query: Mapping[str, object] | None,
        body: Body,
        kind: str,
        seconds: float,
        more: Mapping[str, str] | None,
    ) -> None:
        if connection.sock is None:
            connection.timeout = CONNECT_SECONDS
            try:
                connection.connect()
            except ssl.SSLCertVerificationError as e:
                raise self._untrusted(e) from None
            except ssl.SSLError as e:
                raise Misconfigured(
                    f"{self.address} does not speak TLS as it should ({e.reason or 'no reason given'}); "
                    "nothing was sent",
                    remedy="is it an http:// address, or another service's port?",
                ) from None
        assert connection.sock is not None
        connection.sock.settimeout(seconds)
        parts: Iterable[bytes | memoryview] = [body] if isinstance(body, bytes) else body
        size = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        target = f"{self.address.prefix}{path}"
        if query:
            target += "?" + urlencode({k: v for k, v in query.items() if v is not None}, quote_via=quote)
        connection.putrequest(method, target, skip_accept_encoding=True)
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Accept-Encoding": "identity",
            "User-Agent": "sublet",
            "Content-Length": str(size),
            **({"Content-Type": kind} if size else {}),
            **(more or {}),
        }
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        try:
            for part in parts:
                connection.send(part)
        except (BrokenPipeError, ConnectionResetError):
            # Refused before it was all sent, perhaps: then the answer says why.
            pass

    def _error_in(self, answered: Answered) -> SubletError | None:
        status = answered.status
        if 300 <= status < 400:
            where = _shown(answered.headers.get("Location") or "nowhere")
            return Misconfigured(
                f"{self.address} answers with a redirect to {where}; it was not followed, and nobody else "
                "was shown the token",
                remedy="if that is the studio, use its address as SUBLET_URL",
            )
        if status < 300:
            self._reached = True
            return None
        error = error_of_answer(status, answered.body)
        if error is None and status in (502, 503, 504):  # what stands before a studio that is down
            return Disconnected(
                f"what stands before the studio at {self.address} says that it is down (HTTP {status})",
                remedy="try again in a moment",
            )
        if error is None:
            return _not_a_studio(status, str(self.address))
        self._reached = True
        return error

    # connections

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        pool = self._own_pool()
        oldest = time.monotonic() - _KEPT_SECONDS
        with pool.lock:
            while pool.idle:
                since, connection = pool.idle.pop()
                if since >= oldest:
                    return connection, True
                connection.close()
        address = self.address
        if not address.secure:
            return http.client.HTTPConnection(address.host, address.port), False
        if self._tls is None:
            self._tls = self._context()
        return http.client.HTTPSConnection(address.host, address.port, context=self._tls), False

    def _context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self._certificate or None)
        except (OSError, ssl.SSLError) as e:
            raise Misconfigured(
                f"the certificate file {self._certificate!r} cannot be used: {e}",
                remedy="give the studio's certificate as a PEM file",
            ) from None

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        pool = self._own_pool()
        with pool.lock:
            pool.idle.append((time.monotonic(), connection))

    def _own_pool(self) -> _Pool:
        if self._pool.pid != os.getpid():
            # The parent's connections stay open here, unused: to close them would end them for the parent
            # too, under TLS.
            self._inherited, self._pool = self._pool, _Pool(os.getpid())
        return self._pool

    def close(self) -> None:
        pool = self._own_pool()
        with pool.lock:
            for _, connection in pool.idle:
                connection.close()
            pool.idle.clear()

    # what to say

    def unreachable(self, why: str) -> Disconnected:
        if self._reached:
            return Disconnected(
                f"the studio at {self.address} cannot be reached: {why}",
                remedy="try again in a moment; what it holds for you it goes on holding until it runs out",
            )
        return Disconnected(
            f"there is no studio at {self.address}: {why}",
            remedy="check SUBLET_URL, and that 'sublet serve' runs there and this machine may reach it",
        )

    def _untrusted(self, error: ssl.SSLCertVerificationError) -> Misconfigured:
        return Misconfigured(
            f"the certificate of {self.address} is not one this machine trusts ({error.verify_message}); "
            "nothing was sent",
            remedy="if the studio signed its own, put its certificate (PEM) into a file and name it: "
            "SSL_CERT_FILE=studio.pem, "
            "or sublet.connect(url, token, certificate='studio.pem')",
        )


@contextlib.contextmanager
def cuts(kept: bool = False) -> Iterator[None]:
    """Around sending and reading, and nothing else: everything by which a connection shows that it is gone is
    `Cut`."""
    try:
        yield
    except TimeoutError:
        raise Cut("it did not answer in time") from None
    except socket.gaierror:
        raise Cut("there is no machine of that name", kept=kept) from None
    except (http.client.HTTPException, ssl.SSLError, OSError) as e:
        raise Cut(_words(e), kept=kept) from None


def _words(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected | ConnectionError):
        return "the connection was cut"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"what answers there does not speak HTTP ({type(error).__name__})"


def _not_a_studio(status: int, where: str = "that address") -> Misconfigured:
    return Misconfigured(
        f"what answers at {where} is not a studio (HTTP {status})",
        remedy="check SUBLET_URL: the address and port of 'sublet serve', without a path unless a proxy "
        "adds one",
    )


def _may_be_asked_again(answered: Answered, error: SubletError) -> bool:
    """Whether waiting helps: the studio was down, or has too many requests."""
    return isinstance(error, Disconnected) or (answered.status == 429 and _retry_after(answered) > 0)


def _retry_after(answered: Answered) -> float:
    return _retry_after_of(answered.headers)


def _retry_after_of(headers: http.client.HTTPMessage) -> float:
    try:
        return max(0.0, min(3600.0, float(headers.get("Retry-After") or 0)))
    except ValueError:
        return 0.0
