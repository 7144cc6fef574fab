"""A leased worker on a Ray node, as the process that asked for it sees it.

Rules of this file:
- Calls are packed as for a worker of this host and travel sealed: the node's agent opens nothing. What comes
  back is unpickled here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from sublet.core.errors import BadInput, WorkerLost
from sublet.placement.agent import BESIDE_BYTES, Event, carried
from sublet.placement.process import CONFIRM_SECONDS, RayProcess, words
from sublet.ports.worker import CallSink, Part, Screen
from sublet.processes.channel.sealed_caller import (
    ScreenListener,
    SilentSink,
    opened_answer,
    plain_screen,
    taken,
)
from sublet.processes.worker.packed_calls import PackedCalls

#: Larger arguments are put into Ray's object store once, and mapped by the node.
STORED_BYTES = 1 << 20
PICKLED = "sublet.processes.worker.sealed_calls:pickled"
BEGIN = "sublet.processes.worker.sealed_calls:begin"

Answered = tuple[bool, list[memoryview]]


class RayWorker(RayProcess, PackedCalls):
    """Implements `ports.worker.Worker`."""

    def __init__(self, agent: Any, facts: Mapping[str, Any], received_us: int) -> None:
        RayProcess.__init__(self, agent, facts, received_us)
        PackedCalls.__init__(self)
        self._of_tenant: bool = facts["tenant"] != ""
        self._serial = 0
        self._launches = 0

    @property
    def launches(self) -> int:
        return self._launches

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        """Begin in the folder and with the modules of this process, where the node has them too. A tenant's
        worker sees nothing of this process."""
        if self._of_tenant:
            self._begin_there(lease_id, epoch, environment)
            return
        try:
            around = ray.get(self._agent.around.remote(), timeout=CONFIRM_SECONDS)
        except RayError as e:
            raise self._lost(f"its node was lost: {words(e)}", begun=False, host_gone=True) from e
        folder = ""
        with contextlib.suppress(OSError):
            folder = os.getcwd()
        path = [place or folder for place in sys.path]
        terms = {
            "lease_id": lease_id,
            "epoch": epoch,
            "environment": {**around["environment"], **environment},
            "folder": folder,
            "path": [*path, *(place for place in around["path"] if place not in path)],
        }
        fine, answer = self.call_sealed(BEGIN, [json.dumps(terms).encode()], SilentSink())
        if not fine:
            raise self._lost(
                f"it could not begin: {bytes(answer[0][:500]).decode(errors='replace')}", begun=False
            )

    def _begin_there(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        try:
            sent = self._agent.begin.remote(self._number, lease_id, epoch, dict(environment))
            failed = ray.get(sent, timeout=CONFIRM_SECONDS)
        except RayError as e:
            raise self._lost(f"its node was lost: {words(e)}", begun=False, host_gone=True) from e
        if failed:
            raise self._lost(f"it could not begin: {failed}", begun=False)

    def interrupt(self) -> None:
        if self._caller and self._connected():
            with contextlib.suppress(RayError):
                self._agent.interrupt.remote(self._number)

    # the caller's side

    def call_sealed(self, target: str, parts: Sequence[Part], sink: CallSink) -> Answered:
        with self._turn():
            fine, answer, _ = self._carry(target, parts, sink)
            return fine, answer

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
            parcel = self._parcel(function, values, several)
            fine, parts, interrupted = self._carry(PICKLED, parcel.packed, listener)
            fine, value = opened_answer(fine, parts)
            if taken(fine, value):
                self._shipped.took(parcel)
            return fine, value, interrupted

    def _carry(
        self, target: str, parts: Sequence[Part], sink: CallSink
    ) -> tuple[bool, list[memoryview], bool]:
        """Send a call, pass on its events, and return its answer and whether it was interrupted."""
        if self.ending:
            raise WorkerLost(f"the worker had ended: {self._ending}", begun=False, with_host=self._host_gone)
        self._serial += 1
        # Kept until the answer is here: the object store drops an object with its last reference.
        stored: Any = carried(parts)
        if sum(memoryview(part).nbytes for part in parts) >= STORED_BYTES:
            stored = self._asked(partial(ray.put, stored), begun=False)
        waiting = self._asked(
            lambda: self._agent.call.remote(self._number, self._serial, target, stored), begun=False
        )
        interrupted, seen = False, 0
        while True:
            try:
                first, events = self._news(waiting)
                for event in events[seen - first :]:
                    if event[0] in ("done", "lost", "refused"):
                        return *self._answer_of(event), interrupted
                    self._happened(event, sink)
                    seen += 1
                waiting = self._asked(partial(self._agent.more.remote, self._number, self._serial, seen))
            except KeyboardInterrupt:
                if interrupted:
                    self.end("interrupted twice")
                    raise
                interrupted = True
                self.interrupt()
            except WorkerLost:
                raise
            except BaseException:
                self.interrupt()
                raise

    def _answer_of(self, event: Event) -> Answered:
        if event[0] == "done":
            _, fine, parts, launches = event
            self._launches += launches
            if sum(memoryview(part).nbytes for part in parts) >= BESIDE_BYTES:
                self._asked(partial(self._agent.forget.remote, self._number, self._serial))
            # A writable copy, so that results do not hold anything in the object store.
            return fine, [memoryview(bytearray(part)) for part in parts]
        if event[0] == "refused":
            raise BadInput(event[1], remedy=event[2])
        _, why, begun, host_gone = event
        raise self._lost(why, begun=begun, host_gone=host_gone)

    def _happened(self, event: Event, sink: CallSink) -> None:
        if event[0] == "text":
            sink.text(event[1], event[2])
        elif event[0] == "show":
            sink.show(event[1])
        elif event[0] == "ask":
            fine, told = False, []
            try:
                fine, answer = sink.ask(event[1], [memoryview(part) for part in event[2]])
                told = carried(answer)
            finally:  # it waits for nothing else
                self._asked(lambda: self._agent.answer.remote(self._number, self._serial, fine, told))
