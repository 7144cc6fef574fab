"""The worker of a session, as the client that calls it sees it.

Rules of this file:
- Calls are packed as for a worker of one's own (`processes/worker/main_module.py`) and travel sealed: nobody
  between here and the session opens them. What comes back is unpickled here.
- What a call prints is shown by whoever waits for the answer.
- What a call changed of the functions and globals the worker has counts when the call's answer is here, as
  for a worker of one's own.
- Functions travel as the bytecode of one Python: another version at the other end is refused before anything
  runs.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from typing import Any

from sublet.client.call import Call, CallResult
from sublet.client.http import Client
from sublet.client.request import END_PATIENCE_SECONDS, end_session
from sublet.core.errors import BadInput, LeaseLost, Misconfigured
from sublet.ports.worker import Part, Screen
from sublet.processes.channel.sealed_caller import (
    ScreenListener,
    error_of_failure,
    failure_of,
    is_pickle,
    opened_answer,
    plain_screen,
    result_of,
    taken,
)
from sublet.processes.worker.main_module import Parcel, Shipped
from sublet.processes.worker.packed_calls import PackedCalls
from sublet.processes.worker.remote_exception import Failure, revived

HERE = platform.python_version()


class RemoteWorker(PackedCalls):
    callee = "session"

    def __init__(self, client: Client, session_id: str, lease_id: str) -> None:
        super().__init__()
        self._client = client
        self._session_id = session_id
        self.lease_id = lease_id
        self._python = ""
        self.ending = ""  # why it ended; '' while it lives, as far as is known here
        self.launches = 0

    def run_code(self, text: str, screen: Screen | None = None) -> int:
        """Source, in the session's own `__main__`; how many kernels it launched."""
        if not isinstance(text, str):
            raise BadInput("code is a text")
        parts = [json.dumps({"code": text, "name": "code"}).encode()]
        with self._turn():
            ended = self._call("code", parts).run(ScreenListener(screen or plain_screen()))
        return code_answer(ended)

    def attach(self, call_id: str, screen: Screen | None = None) -> Any:
        """Listen to a call made before, from its beginning as far as it is kept; its result, or what it
        raised."""
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
        screen: Screen | None = None,
        answer: Callable[[Any], Any] | None = None,
    ) -> tuple[bool, Any, bool]:
        listener = ScreenListener(screen or plain_screen(), answer)
        with self._turn():
            self._check_python()
            parcel = self._parcel(function, values, several)
            return self._made(self._call("pickled", parcel.packed), parcel, listener)

    def _call(self, target: str, parts: Sequence[Part]) -> Call:
        return Call(self._client, self._session_id, target, parts, lease_id=self.lease_id)

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
        """Check the session's Python once, by a function that every version has under the same name."""
        if self._python:
            return
        parcel = Shipped().parcel(platform.python_version, ((), {}))
        fine, there, _ = _opened(self._call("pickled", parcel.packed).run(ScreenListener(plain_screen())))
        if not fine:
            raise revived(there) if isinstance(there, Failure) else there
        if there.split(".")[:2] != HERE.split(".")[:2]:
            raise Misconfigured(
                f"this is Python {HERE}, the session runs {there}: functions cannot travel between them; "
                "nothing was run",
                remedy=f"use Python {'.'.join(there.split('.')[:2])} here, or send text: "
                "session.run_code(...)",
            )
        self._python = there


def _opened(ended: CallResult) -> tuple[bool, Any, bool]:
    return *opened_answer(ended.fine, ended.parts), ended.interrupted


def code_answer(ended: CallResult) -> int:
    """Return how many kernels source that ran has launched, or raise what it raised."""
    if ended.interrupted:
        raise KeyboardInterrupt
    if not ended.fine:
        raise error_of_failure(failure_of(ended.parts))
    return ended.launches
