"""Requests to a bucket: retried, bounded in time, and speaking plainly when they fail.

Rules of this file:
- Every request ends: a limit on each attempt, a limit on all of them together. A bucket that failed is left alone for a few seconds, and is
  then knocked at by one thread while the others wait: a save or a load waits for it once, and not at every object.
- A create whose answer was lost may have happened. The next attempt then finds the name taken, and the bytes decide whether it was ours.
- An error names the bucket and what the server said in our words. The client's own messages hold addresses and signatures, so they are
  never passed on, not even as a cause.
- The client's threads do not survive a fork: used in the child it would hang for ever, so it is refused there.
- Each attempt runs in a thread of its own, which can be left behind: a server that was stopped answers nothing and refuses nothing, and who
  waits for it must be able to leave. What it did after that nobody was told, which is a lost answer like any other.
- `away` is said after some seconds of trouble, and only if a small question gets no answer either: a slow upload is not an outage.
"""

from __future__ import annotations

import copy
import errno
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sublet.core.errors import Misconfigured, MissingExtra

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
#: How long a bucket that failed is left alone.
REST_SECONDS = 5.0
#: What a client reads from the environment and forgets when it is given any option of its own.
_OPTIONS = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate", "proxy_excludes")
_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
#: What may be said of one bucket: the end of its variable, and what the client calls it.
_OWN = {
    "s3": {
        "REGION": "region",
        "ENDPOINT_URL": "endpoint",
        "ACCESS_KEY_ID": "access_key_id",
        "SECRET_ACCESS_KEY": "secret_access_key",
        "SESSION_TOKEN": "session_token",
    },
    "gs": {"SERVICE_ACCOUNT": "service_account"},
    "az": {
        "STORAGE_ACCOUNT_NAME": "account_name",
        "STORAGE_ACCOUNT_KEY": "account_key",
        "STORAGE_SAS_TOKEN": "sas_key",
    },
}
_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of this machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the account of this machine",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and its key or token",
}
#: By what the server said: the first that fits.
_REMEDIES = (
    (
        ("no such bucket", "NoSuchBucket"),
        "create it, or correct its name in SUBLET_STORE: sublet creates no bucket",
    ),
    (
        ("RequestTimeTooSkewed", "RequestExpired"),
        "set this machine's clock (chrony, systemd-timesyncd): the server refuses requests that are minutes off",
    ),
    (
        ("another region", "AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocation"),
        "say where it is: {prefix}_REGION for all buckets, or {own}_REGION for this one",
    ),
    (
        (
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "InvalidToken",
            "ExpiredToken",
            "does not know the credentials",
            "401",
        ),
        "the key is not one the server knows: check {keys}; for this bucket alone {own}_ACCESS_KEY_ID and so on",
    ),
    (
        ("403", "AccessDenied", "do not allow it"),
        "the server knows the bucket and refuses this key: let it read, write, list and delete under the prefix, or check {keys}",
    ),
    (
        ("ALLOW_HTTP",),
        "set {prefix}_ALLOW_HTTP=true if the network between is yours, or use an https:// address",
    ),
    (
        ("no connection", "no answer", "connection broke", "answered 5", "SlowDown"),
        "nothing is lost, saves wait for it: check its address ({prefix}_ENDPOINT_URL or {own}_ENDPOINT_URL), the network and the server's own state",
    ),
)
_PERMANENT = (
    "PermissionDeniedError",
    "UnauthenticatedError",
    "NotSupportedError",
    "InvalidPathError",
    "UnknownConfigurationKeyError",
)
#: Answers of the 4xx family that the same request may not get again.
_PASSING = {"408", "409", "423", "425", "429"}

#: Not the process's own: a training whose bucket was away for a moment must draw the numbers it would have drawn.
_jitter = random.Random()

_used_by = 0  # the process whose threads the client has


@dataclass(frozen=True, slots=True)
class Limits:
    request_seconds: float = 60.0
    patience_seconds: float = 120.0  # for one object, all attempts together
    connect_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    path: str
    size: int
    changed: datetime


class BucketFailed(OSError):
    """A bucket that said no or nothing. `lasting`: asking again will not help."""

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(errno.EIO, message)
        self.lasting = lasting

    def what_next(self, scheme: str, bucket: str) -> str:
        """What to do next about what the server said."""
        said, prefix = str(self.strerror), _PREFIXES[scheme]
        for words, remedy in _REMEDIES:
            if any(word in said for word in words):
                return remedy.format(
                    prefix=prefix, own=f"SUBLET_BUCKET_{variable_name(bucket)}", keys=_KEYS[scheme]
                )
        return (
            "check that the bucket exists and that these credentials may read, write, list and delete in it"
        )

    def __str__(self) -> str:
        return str(self.strerror)


class _Attempt:
    """One request under way. Nobody has to wait for its end."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._over = threading.Event()
        self._outcome: Any = None
        self._failure: BaseException | None = None
        self.answered = False

    def begin(self) -> None:
        try:
            threading.Thread(target=self._run, name="sublet-request", daemon=True).start()
        except RuntimeError:
            self._run()  # no room for another thread: then here, and nobody can leave it

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            self._outcome = work()
        except BaseException as e:
            self._failure = e
        self.answered = True
        self._over.set()

    def wait(self, seconds: float) -> bool:
        self._over.wait(max(0.0, seconds))
        return self.answered

    def leave(self) -> None:
        """Whoever waits goes on without an answer."""
        self._over.set()

    @property
    def left(self) -> bool:
        return self._over.is_set() and not self.answered

    def result(self) -> Any:
        failure, self._failure = self._failure, None
        if failure is None:
            return self._outcome
        try:
            raise failure
        finally:
            del failure  # it knows the frames it came through, and through them the caller's memory


class BucketClient:
    """The few requests that are made. Used from several threads."""

    def __init__(self, scheme: str, bucket: str, prefix: str, limits: Limits) -> None:
        try:
            self._obstore: Any = import_module("obstore")
            self._errors: Any = import_module("obstore.exceptions")
        except ImportError:
            raise MissingExtra(
                f"{scheme}:// needs the package obstore, which is not installed",
                remedy="pip install 'sublet[bucket]'",
            ) from None
        self.limits = limits
        self.where = _where(scheme, bucket)
        self._knocking = threading.Lock()
        self._down = ""  # what it said when it failed last
        self._failures = 0
        self._next_try = 0.0
        self._trouble: tuple[str, float] | None = None  # what it said, and since when it said nothing else
        self._lock = threading.Lock()
        self._under_way: set[_Attempt] = set()
        self._leaving = threading.Event()
        self._hurried = False
        try:
            self._store: Any = _connect(scheme, bucket, prefix, limits)
            self._door: Any = _connect(
                scheme, bucket, prefix, replace(limits, request_seconds=limits.connect_seconds)
            )
        except Exception as e:  # whatever the client thinks of the settings; its words may quote them
            raise Misconfigured(
                f"the settings for {self.where} are not usable ({type(e).__name__})",
                remedy=f"check the variables that begin with {_PREFIXES[scheme]}_",
            ) from None

    # requests

    def create(self, path: str, data: bytes | bytearray, *, patience: float | None = None) -> bool:
        """True: it is there with exactly these bytes. False: something else is. Never writes over anything."""

        def attempt() -> bool:
            try:
                self._obstore.put(self._store, path, data, mode="create", use_multipart=False)
                return True
            except self._errors.AlreadyExistsError:
                there = self._whole(path, len(data))
                if there is None:
                    raise _Again from None  # gone between the two, or still being decided between two writers
                return there == data

        try:
            return self._persist(attempt, patience)
        except FileNotFoundError:
            raise BucketFailed("there is no such bucket", lasting=True) from None

    def part(self, path: str, start: int, length: int) -> bytes | None:
        """Fewer bytes than asked for when it ends before; None when it is not there."""
        found = self.beginning(path, length, start=start)
        return found[0] if found is not None else None

    def beginning(self, path: str, most: int, *, start: int = 0) -> tuple[bytes, int] | None:
        """Bytes of it, and how many it has."""

        def attempt() -> tuple[bytes, int]:
            try:
                answer = self._obstore.get(self._store, path, options={"range": (start, start + most)})
                return bytes(answer.bytes()), int(answer.meta["size"])
            except self._errors.BaseError as e:
                if _status(e) == "416":
                    return b"", 0  # it ends before
                raise

        return self._missing_is_none(attempt)

    def whole(self, path: str, most: int) -> bytes | None:
        """The object, or its first `most` bytes and one more: no more than that is read."""
        return self._missing_is_none(lambda: self._whole(path, most))

    def _whole(self, path: str, most: int) -> bytes | None:
        try:
            answer = self._obstore.get(self._store, path)
            if answer.meta["size"] > most + 1:
                return bytes(self._obstore.get_range(self._store, path, start=0, length=most + 1))
            return bytes(answer.bytes())
        except FileNotFoundError:
            return None

    def look(self, path: str) -> Found | None:
        return self._missing_is_none(lambda: _found(self._obstore.head(self._store, path)))

    def list(self, folder: str) -> Iterator[Found]:
        """All of them or an error: a part of a listing would pass for the whole."""

        def attempt() -> list[Found]:
            try:
                return [_found(o) for batch in self._obstore.list(self._store, folder) for o in batch]
            except FileNotFoundError:
                return []  # Azurite, of a container that is not there

        yield from self._persist(attempt)

    def copy(self, source: str, target: str) -> bool:
        """False when the source is not there."""

        def attempt() -> bool:
            self._obstore.copy(self._store, source, target)
            return True

        return self._missing_is_none(attempt) is not None

    def delete(self, path: str, *, patience: float | None = None) -> None:
        def attempt() -> bool:
            self._obstore.delete(self._store, path)
            return True

        self._missing_is_none(attempt, patience)

    # patience

    def _missing_is_none(self, attempt: Callable[[], T], patience: float | None = None) -> T | None:
        try:
            return self._persist(attempt, patience)
        except FileNotFoundError:
            return None

    def _persist(self, attempt: Callable[[], T], patience: float | None = None) -> T:
        self._check_fork()
        # An answer to a request that may take long is waited for as long as the client itself does, unless there is a hurry.
        hurry = self._hurried or patience is not None
        patience = self._patience(patience)
        begun = time.monotonic()
        ends = begun + (max(patience, self.limits.connect_seconds) if hurry else math.inf)
        pause, tries = FIRST_PAUSE_SECONDS, 0
        while True:
            tries += 1
            try:
                result = self._answered(attempt, ends)
                self._is_there()
                return result
            except FileNotFoundError:
                self._is_there()
                raise
            except _Again:
                said = "its name is taken and it is not there"
            except _Silent:
                said = self._troubled("no answer in time")
            except self._errors.BaseError as e:
                said, lasting = _said(e)
                if lasting:
                    self._trouble = None  # it answered
                    raise BucketFailed(said, lasting=True) from None
                self._troubled(said)
            now = time.monotonic()
            if now + pause - begun > patience:
                self._went_down(said)
                often = f" ({tries} times in {now - begun:.0f} s)" if tries > 1 else ""
                raise BucketFailed(said + often) from None
            if self._leaving.wait(pause * _jitter.uniform(0.5, 1.0)):
                raise BucketFailed(f"{said}, and {_NOT_AWAITED}")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _answered(self, attempt: Callable[[], T], ends: float) -> T:
        """Its outcome. `_Silent` when there is none by then; `BucketFailed` when it was not waited for."""
        asked = _Attempt(attempt)
        with self._lock:
            if self._leaving.is_set():
                raise BucketFailed(_NOT_AWAITED)
            self._under_way.add(asked)
        try:
            asked.begin()
            seconds = self.limits.connect_seconds
            while not asked.wait(min(seconds, ends - time.monotonic())):
                if asked.left:
                    trouble = self._trouble
                    raise BucketFailed(f"{trouble[0]}, and {_NOT_AWAITED}" if trouble else _NOT_AWAITED)
                if time.monotonic() >= ends:
                    raise _Silent
                self._look_for_it()
        finally:
            with self._lock:
                self._under_way.discard(asked)
        found: T = asked.result()
        return found

    # being there, or away

    @property
    def away(self) -> str:
        """What is wrong, once that has lasted for some seconds; '' as long as it answers."""
        trouble = self._trouble
        if trouble is None or time.monotonic() - trouble[1] < self.limits.connect_seconds:
            return ""
        return trouble[0]

    def _is_there(self) -> None:
        self._down, self._failures, self._trouble = "", 0, None

    def _troubled(self, said: str) -> str:
        trouble = self._trouble
        self._trouble = (said, trouble[1] if trouble is not None else time.monotonic())
        return said

    def _look_for_it(self) -> None:
        """A request takes long. Whether the bucket is away or only slow, a small question tells; one at a time asks it."""
        if not self._knocking.acquire(blocking=False):
            return
        began = time.monotonic()
        door = _Attempt(lambda: self._obstore.head(self._door, "probe/knock"))
        try:
            door.begin()
            with self._lock:
                self._under_way.add(door)
            if not door.wait(self.limits.connect_seconds):
                raise _Silent
            door.result()
            self._trouble = None
        except FileNotFoundError:
            self._trouble = None
        except _Silent:
            self._troubled_since("no answer", began - self.limits.connect_seconds)
        except self._errors.BaseError as e:
            said, lasting = _said(e)
            if not lasting:
                self._troubled_since(said, began - self.limits.connect_seconds)
        finally:
            with self._lock:
                self._under_way.discard(door)
            self._knocking.release()

    def _troubled_since(self, said: str, since: float) -> None:
        self._trouble = self._trouble or (said, since)

    def give_up(self) -> None:
        """Whoever waits for an answer stops waiting, and nothing more is asked, until `take_up`."""
        self._leaving.set()
        with self._lock:
            for asked in self._under_way:
                asked.leave()

    def take_up(self) -> None:
        self._leaving.clear()

    def ask_again(self) -> None:
        """The next question is asked: how long it was to be left alone was a guess, and somebody waits."""
        self._failures, self._next_try = 0, 0.0

    def hurried(self, seconds: float) -> BucketClient:
        """The same bucket for whoever can also ask elsewhere: it is waited for so long and no longer, and what it did not answer to them
        does not count against it for those who have nobody else."""
        other = copy.copy(self)
        other.limits = replace(self.limits, patience_seconds=seconds)
        other._hurried = True
        other._knocking = threading.Lock()
        other._down, other._failures, other._next_try, other._trouble = "", 0, 0.0, None
        return other

    def _patience(self, asked: float | None) -> float:
        """For how long attempts are made. Raises at once while the bucket is left alone."""
        if asked:
            return asked
        if self._down:
            self._knock()
        return self.limits.patience_seconds if asked is None else asked

    def _knock(self) -> None:
        """A small question with a short limit: any answer will do."""
        with self._knocking:
            if not self._down:
                return
            if time.monotonic() < self._next_try:
                raise BucketFailed(f"{self._down}, a moment ago")
            try:
                self._obstore.head(self._door, "probe/knock")
            except FileNotFoundError:
                pass
            except self._errors.BaseError as e:
                said, lasting = _said(e)
                if not lasting:
                    self._went_down(said)
                    raise BucketFailed(said) from None
            self._is_there()

    def _went_down(self, said: str) -> None:
        rest = min(REST_SECONDS * 2**self._failures, self.limits.patience_seconds)
        self._failures = min(self._failures + 1, 10)
        self._down, self._next_try = said, time.monotonic() + rest

    def _check_fork(self) -> None:
        global _used_by
        with _fork_lock:
            if not _used_by:
                _used_by = os.getpid()
            if _used_by == os.getpid():
                return
        raise BucketFailed(
            "this process was forked from one that had used a bucket, which buckets do not survive; "
            "start it with multiprocessing's 'spawn', or open the bucket in the child only",
            lasting=True,
        )


_NOT_AWAITED = "it was not waited for any longer"


class _Again(Exception):
    """Not settled yet."""


class _Silent(Exception):
    """No answer in the time there was."""


_fork_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_fork_lock=threading.Lock()))


def _connect(scheme: str, bucket: str, prefix: str, limits: Limits) -> Any:
    stores = import_module("obstore.store")
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=limits.request_seconds),
        "connect_timeout": timedelta(seconds=limits.connect_seconds),
    }
    for key in _OPTIONS:
        value = os.environ.get(f"{_PREFIXES[scheme]}_{key.upper()}")
        if value:
            options[key] = value.lower() in ("1", "true", "yes", "on") if key.startswith("allow_") else value
    own = own_settings(scheme, bucket)
    # Retried here: the client does not repeat a create, and cannot know whose bytes are there when it does.
    common = {
        "prefix": prefix or None,
        "client_options": options,
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=limits.patience_seconds)},
    }
    common |= own
    if scheme == "s3":
        more: dict[str, Any] = {"disable_bulk_delete": True}  # not every server has it
        if "AWS_CHECKSUM_ALGORITHM" not in os.environ:
            more["checksum_algorithm"] = "SHA256"
        return stores.S3Store(bucket, **common, **more)
    if scheme == "gs":
        return stores.GCSStore(bucket, **common)
    return stores.AzureStore(bucket, **common)


def variable_name(bucket: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", bucket.upper())


def own_settings(scheme: str, bucket: str) -> dict[str, str]:
    """What the environment says of this bucket alone: `SUBLET_BUCKET_EU_CHECKPOINTS_REGION` for the bucket eu-checkpoints. Buckets in several
    regions, or on several servers, need it: the cloud's own variables say one thing for all of them."""
    name = variable_name(bucket)
    found = {}
    for variable, key in _OWN[scheme].items():
        value = os.environ.get(f"SUBLET_BUCKET_{name}_{variable}")
        if value:
            found[key] = value
    return found


def _where(scheme: str, bucket: str) -> str:
    """The bucket, and the server when it is not the cloud's own. No user, no key."""
    own = own_settings(scheme, bucket)
    if scheme == "az":
        account = own.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        bucket += f" of {account}" if account else ""
    kinds = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gs": ("GOOGLE_BASE_URL",),
        "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"),
    }
    endpoint = own.get("endpoint") or next((os.environ[k] for k in kinds[scheme] if os.environ.get(k)), "")
    host = endpoint and urlsplit(endpoint).netloc.rpartition("@")[2]
    return f"{scheme} bucket {bucket}" + (f" at {host}" if host else "")


def _found(meta: Any) -> Found:
    return Found(str(meta["path"]), int(meta["size"]), meta["last_modified"])


def _status(error: Exception) -> str:
    found = re.search(r"status code: (\d{3})", str(error))
    return found.group(1) if found else ""


def _said(error: Exception) -> tuple[str, bool]:
    """In our words, and whether it will stay so."""
    text = str(error)
    status = _status(error)
    if status:
        code = re.search(r"<Code>(\w{1,60})</Code>", text)
        said = f"the server answered {status}" + (f" {code.group(1)}" if code else "")
        slow = code is not None and code.group(1) in ("RequestTimeout", "SlowDown", "OperationAborted")
        return said, status.startswith("4") and status not in _PASSING and not slow
    if "redirect" in text.lower():
        return "the server says that it is elsewhere, in another region", True
    if type(error).__name__ in _PERMANENT:
        return {
            "PermissionDeniedError": "the credentials do not allow it",
            "UnauthenticatedError": "the server does not know the credentials",
        }.get(type(error).__name__, f"the request was refused ({type(error).__name__})"), True
    if "kind: Timeout" in text:
        return "no answer in time", False
    if "kind: Connect" in text:
        return "no connection", False
    if "builder error" in text:
        return "an address without TLS, which has to be allowed (…_ALLOW_HTTP=true)", True
    return "the connection broke", False
