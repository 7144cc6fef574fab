"""The worker of a session, as the client that calls it sees it.

Rules of this file:
- Calls are packed as for a worker of one's own (`hosting/shipping.py`) and travel sealed: nobody between here and the session opens
  them. What comes back is unpickled here.
- One call at a time; what it prints is shown by whoever waits for the answer.
- What a call changed of the functions and globals the worker has counts when the call's answer is here, as for a worker of one's own.
- Functions travel as the bytecode of one Python: another version at the other end is refused before anything runs.
"""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sublet.core.errors import BadInput, LeaseLost, Misconfigured, SubletError, WorkerLost
from sublet.hosting.failing import Failure, revived
from sublet.hosting.sealed_caller import (
    ScreenListener,
    failure_of,
    is_pickle,
    opened_answer,
    plain_screen,
    result_of,
    taken,
    told_failure,
)
from sublet.hosting.shipping import UNSENDABLE, Parcel, Shipped
from sublet.ports.worker import Call as CallArguments
from sublet.ports.worker import Part, Screen
from sublet.remote.call import Call, Ended
from sublet.remote.client import Client
from sublet.remote.wanted import END_PATIENCE_SECONDS, end_session

HERE = platform.python_version()


class RemoteWorker:
    def __init__(self, client: Client, session_id: str, lease_id: str) -> None:
        self._client = client
        self._session_id = session_id
        self.lease_id = lease_id
        self._shipped = Shipped()
        self._lock = threading.Lock()
        self._caller = 0
        self._pid = os.getpid()
        self._python = ""
        self.ending = ""  # why it ended; '' while it lives, as far as is known here
        self.launches = 0

    # calls

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return result_of(*self._trip(function, (tuple(args), dict(kwargs)), several=False))

    def call_many(
        self, function: Callable[..., Any], calls: Sequence[CallArguments]
    ) -> list[tuple[bool, Any]]:
        trip = self._trip(function, [(tuple(a), dict(k)) for a, k in calls], several=True)
        return [(well, result if well else revived(result)) for well, result in result_of(*trip)]

    def call_shown(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        screen: Screen,
        answer: Callable[[Any], Any],
    ) -> Any:
        """An interrupt is passed on, and what the call then returns is returned: it says itself that it was interrupted."""
        listener = ScreenListener(screen, answer)
        fine, value, _ = self._trip(function, (tuple(args), {}), several=False, listener=listener)
        return result_of(fine, value, False)

    def run_code(self, text: str, screen: Screen | None = None) -> int:
        """Source, in the session's own `__main__`; how many kernels it launched."""
        if not isinstance(text, str):
            raise BadInput("code is a text")
        parts = [json.dumps({"code": text, "name": "code"}).encode()]
        with self._turn():
            ended = self._call("code", parts).run(ScreenListener(screen or plain_screen()))
        return code_answer(ended)

    def attach(self, call_id: str, screen: Screen | None = None) -> Any:
        """Listen to a call made before, from its beginning as far as it is kept; its result, or what it raised."""
        call = Call(self._client, self._session_id, "pickled", None, lease_id=self.lease_id, call=call_id)
        ended = call.run(ScreenListener(screen or plain_screen()))
        if is_pickle(ended.parts):
            return result_of(*_opened(ended))
        code_answer(ended)
        return None

    def end(self, why: str) -> None:
        self.ending = self.ending or why
        end_session(self._client, self._session_id, patience_seconds=END_PATIENCE_SECONDS)

    # one trip

    def _trip(
        self,
        function: Callable[..., Any],
        values: Any,
        *,
        several: bool,
        listener: ScreenListener | None = None,
    ) -> tuple[bool, Any, bool]:
        if self._caller == threading.get_ident():
            raise BadInput(
                "the session is in the middle of a call, and what answers its question cannot call it",
                remedy="answer first, and call when the call is over",
            )
        with self._turn():
            self._check_python()
            parcel = self._parcel(function, values, several)
            call = self._call("pickled", parcel.packed)
            return self._made(call, parcel, listener or ScreenListener(plain_screen()))

    def _turn(self) -> _Turn:
        if self._pid != os.getpid():
            raise WorkerLost("this session belongs to the parent process", begun=False)
        return _Turn(self)

    def _call(self, target: str, parts: Sequence[Part]) -> Call:
        return Call(self._client, self._session_id, target, parts, lease_id=self.lease_id)

    def _parcel(self, function: Callable[..., Any], values: Any, several: bool) -> Parcel:
        try:
            return self._shipped.parcel(function, values, several)
        except SubletError:
            raise
        except UNSENDABLE as e:
            raise BadInput(
                f"this cannot be sent to the session: {e}",
                remedy="make it inside the function, or pass what it is made from",
            ) from e

    def _made(self, call: Call, parcel: Parcel, listener: ScreenListener) -> tuple[bool, Any, bool]:
        try:
            ended = call.run(listener)
        except KeyboardInterrupt:
            self.end("interrupted twice")
            raise
        except LeaseLost as e:
            self.ending = e.message
            raise
        fine, value, interrupted = _opened(ended)
        self.launches += ended.launches
        if taken(fine, value):
            self._shipped.took(parcel)
        return fine, value, interrupted

    def _check_python(self) -> None:
        """Once, by a function that every Python has under the same name."""
        if self._python:
            return
        parcel = Shipped().parcel(platform.python_version, ((), {}))
        fine, there, _ = _opened(self._call("pickled", parcel.packed).run(ScreenListener(plain_screen())))
        if not fine:
            raise revived(there) if isinstance(there, Failure) else there
        if there.split(".")[:2] != HERE.split(".")[:2]:
            raise Misconfigured(
                f"this is Python {HERE}, the session runs {there}: functions cannot travel between them; nothing was run",
                remedy=f"use Python {'.'.join(there.split('.')[:2])} here, or send text: session.run_code(...)",
            )
        self._python = there


class _Turn:
    """One call at a time, and which thread is in it."""

    def __init__(self, worker: RemoteWorker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._worker._lock.acquire()
        self._worker._caller = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._worker._caller = 0
        self._worker._lock.release()


def _opened(ended: Ended) -> tuple[bool, Any, bool]:
    return *opened_answer(ended.fine, ended.parts), ended.interrupted


def code_answer(ended: Ended) -> int:
    """Of source that ran: how many kernels it launched. What it raised is raised."""
    if ended.interrupted:
        raise KeyboardInterrupt
    if not ended.fine:
        raise told_failure(failure_of(ended.parts))
    return ended.launches
