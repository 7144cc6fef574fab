"""A leased worker on a Ray node, as the process that asked for it sees it.

Rules of this file:
- Calls are packed as for a worker of one's own and travel sealed: the node's agent opens nothing. What comes back is unpickled here.
- What counts is what the node has confirmed. A deadline it did not confirm may not have arrived: when the last confirmed one is over, so is
  the worker, whatever this process has renewed meanwhile.
- Ray's word that the node is gone ends the waiting, and the lease with it. It proves nothing: the slices stay taken until the warden of that
  host has seen that nothing is left.
- A deadline crosses to the other host's clock early rather than late, by as much as the question took that learnt the difference.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from sublet.core.errors import BadInput, SubletError, WorkerLost
from sublet.core.lease import Holder
from sublet.hosting.failing import revived
from sublet.hosting.local import Nobody
from sublet.hosting.sealed_caller import ScreenListener, opened_answer, plain_screen, result_of, taken
from sublet.hosting.shipping import UNSENDABLE, Parcel, Shipped
from sublet.placement.agent import BESIDE_BYTES, GONE, Event, carried
from sublet.ports.worker import Call, Part, Screen, Sink
from sublet.wiring import CLOCK

#: How long Ray is waited for before this process looks whether waiting makes sense.
LOOK_SECONDS = 0.25
CONFIRM_SECONDS = 20.0
END_SECONDS = 3.0
#: Two clocks of one kind part by less than one in so many.
DRIFT_PARTS = 5_000
#: Larger arguments are put into Ray's object store once, and mapped by the node.
STORED_BYTES = 1 << 20
PICKLED = "sublet.hosting.sealed_calls:pickled"
BEGIN = "sublet.hosting.sealed_calls:begin"

Answered = tuple[bool, list[memoryview]]


class RayWorker:
    """Implements `ports.worker.Worker`."""

    here = False

    def __init__(self, agent: Any, facts: Mapping[str, Any], received_us: int) -> None:
        self._agent = agent
        self._number: str = facts["number"]
        self._holder = Holder(host=facts["host"], pid=facts["pid"], started=facts["started"])
        self._containment: str = facts["containment"]
        self._of_tenant: bool = facts["tenant"] != ""
        self._pid = os.getpid()
        self._shipped = Shipped()
        self._lock = threading.Lock()
        self._caller = 0
        self._serial = 0
        self._ending = ""
        self._host_gone = False  # and that is why
        self._launches = 0
        # How far the other clock is ahead, at least: the answer came back in no time, or it is further.
        self._ahead_us = facts["now_us"] - received_us
        self._learnt_us = received_us
        self._confirmed_us: int | None = None  # the last deadline the node has, on this clock
        self._unconfirmed: list[tuple[Any, int]] = []
        self._armed = 0
        self._asking = threading.Lock()
        self._over = agent.over.remote(self._number)  # answered when it has ended, or its node is lost

    @property
    def holder(self) -> Holder:
        return self._holder

    @property
    def containment(self) -> str:
        return self._containment

    @property
    def launches(self) -> int:
        return self._launches

    @property
    def ending(self) -> str:
        if not self._ending and self._pid == os.getpid() and self._connected():
            self._hear()
        return self._ending

    @property
    def host_lost(self) -> str:
        return self._ending if self.ending and self._host_gone else ""

    # the lease's side

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        if self._ending or not self._connected():
            return
        ahead = self._ahead_us
        try:
            with self._asking:
                self._armed += 1
                sent = self._agent.arm.remote(
                    self._number, self._armed, stop_us + ahead, kill_us + ahead, confirm
                )
                self._unconfirmed.append((sent, stop_us))
        except RayError as e:
            self._end_with(f"its node cannot be reached: {words(e)}", host_gone=True)
            return
        if confirm:
            with contextlib.suppress(RayError):
                ray.wait([sent], timeout=CONFIRM_SECONDS)
            self._hear()
            if self._confirmed_us is None:
                raise WorkerLost(
                    f"the worker ended before it began: {self._ending or 'its node does not answer'}",
                    begun=False,
                    with_host=True,
                )

    def _hear(self) -> None:
        """What the node has confirmed by now; whether the worker is over. Waits for nothing."""
        with self._asking:
            try:
                if ray.wait([self._over], timeout=0)[0]:
                    why = ray.get(self._over)
                    self._end_with(why, host_gone=why == GONE)
                    return
            except RayError as e:
                self._end_with(f"its node was lost: {words(e)}", host_gone=True)
                return
            for number, (sent, stop_us) in reversed(list(enumerate(self._unconfirmed))):
                try:
                    if not ray.wait([sent], timeout=0)[0]:
                        continue
                    said = ray.get(sent)
                    received_us = CLOCK.monotonic_us()
                except RayError as e:
                    self._end_with(f"its node was lost: {words(e)}", host_gone=True)
                    return
                del self._unconfirmed[: number + 1]  # with it, those it overtook
                if said["ending"]:
                    self._end_with(said["ending"], host_gone=said["ending"] == GONE)
                    return
                self._learn(said["now_us"], received_us)
                self._confirmed_us = stop_us
                break
            if self._confirmed_us is not None and CLOCK.monotonic_us() >= self._confirmed_us:
                self._end_with("its node did not confirm a renewal in time", host_gone=True)

    def _learn(self, now_us: int, received_us: int) -> None:
        """What was learnt before holds too, less what the clocks may have drifted since: an answer may have waited here to be read."""
        drifted_us = (received_us - self._learnt_us) // DRIFT_PARTS
        self._ahead_us = max(now_us - received_us, self._ahead_us - drifted_us)
        self._learnt_us = received_us

    def _end_with(self, why: str, *, host_gone: bool = False) -> None:
        if not self._ending:
            self._ending, self._host_gone = why, host_gone

    def _connected(self) -> bool:
        """At the end of a process Ray may have left before us, and would start a cluster of its own if it were asked anything."""
        if not ray.is_initialized():
            self._end_with("the connection to Ray was closed")
        return bool(ray.is_initialized())

    def warn(self) -> None:
        if not self._connected():
            return
        with contextlib.suppress(RayError):
            self._agent.warn.remote(self._number)

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        """In the folder and with the modules of this process, where the node has them too. A tenant's sees nothing of this process."""
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
        fine, answer = self.call_sealed(BEGIN, [json.dumps(terms).encode()], Nobody())
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

    def end(self, why: str) -> None:
        if self._pid != os.getpid():
            return
        self._end_with(why)
        if not self._connected():
            return
        with contextlib.suppress(RayError):
            ray.wait([self._agent.end.remote(self._number, why)], timeout=END_SECONDS)

    def interrupt(self) -> None:
        if self._caller and self._connected():
            with contextlib.suppress(RayError):
                self._agent.interrupt.remote(self._number)

    # the caller's side

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return result_of(*self._trip(function, (tuple(args), dict(kwargs)), several=False))

    def call_many(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[tuple[bool, Any]]:
        trip = self._trip(function, [(tuple(a), dict(k)) for a, k in calls], several=True)
        return [(well, result if well else revived(result)) for well, result in result_of(*trip)]

    def call_shown(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        screen: Screen,
        answer: Callable[[Any], Any],
    ) -> Any:
        listener = ScreenListener(screen, answer)
        fine, value, _ = self._trip(function, (tuple(args), {}), several=False, listener=listener)
        return result_of(fine, value, False)

    def call_sealed(self, target: str, parts: Sequence[Part], sink: Sink) -> Answered:
        with self._turn():
            fine, answer, _ = self._carry(target, parts, sink)
            return fine, answer

    def _trip(
        self,
        function: Callable[..., Any],
        values: Any,
        *,
        several: bool,
        listener: ScreenListener | None = None,
    ) -> tuple[bool, Any, bool]:
        with self._turn():
            parcel = self._parcel(function, values, several)
            fine, answer, interrupted = self._carry(
                PICKLED, parcel.packed, listener or ScreenListener(plain_screen())
            )
            fine, value = opened_answer(fine, answer)
            if taken(fine, value):
                self._shipped.took(parcel)
            return fine, value, interrupted

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time, and which thread is in it."""
        if self._pid != os.getpid():
            raise WorkerLost("this worker belongs to the parent process", begun=False)
        if self._caller == threading.get_ident():
            raise BadInput(
                "the worker is in the middle of a call, and what answers its question cannot call it",
                remedy="answer first, and call when the call is over",
            )
        with self._lock:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = 0

    def _parcel(self, function: Callable[..., Any], values: Any, several: bool) -> Parcel:
        try:
            return self._shipped.parcel(function, values, several)
        except SubletError:
            raise
        except UNSENDABLE as e:
            raise BadInput(
                f"this cannot be sent to the worker: {e}",
                remedy="make it inside the function, or pass what it is made from",
            ) from e

    def _carry(self, target: str, parts: Sequence[Part], sink: Sink) -> tuple[bool, list[memoryview], bool]:
        """Send it, pass on what it says, and return its answer and whether it was interrupted."""
        if self.ending:
            raise WorkerLost(f"the worker had ended: {self._ending}", begun=False, with_host=self._host_gone)
        self._serial += 1
        # Held until the answer is here: with the last reference, the object store forgets it.
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

    def _asked(self, ask: Callable[[], Any], *, begun: bool = True) -> Any:
        try:
            return ask()
        except RayError as e:
            raise self._lost(f"its node was lost: {words(e)}", begun=begun, host_gone=True) from e

    def _news(self, waiting: Any) -> tuple[int, list[Event]]:
        while True:
            try:
                if ray.wait([waiting], timeout=LOOK_SECONDS)[0]:
                    return ray.get(waiting)  # type: ignore[no-any-return]
            except GetTimeoutError:
                pass
            except RayError as e:
                raise self._lost(f"its node was lost: {words(e)}", host_gone=True) from e
            if self.ending:
                raise WorkerLost(f"the worker ended: {self._ending}", with_host=self._host_gone)

    def _answer_of(self, event: Event) -> Answered:
        if event[0] == "done":
            _, fine, parts, launches = event
            self._launches += launches
            if sum(memoryview(part).nbytes for part in parts) >= BESIDE_BYTES:
                self._asked(partial(self._agent.forget.remote, self._number, self._serial))
            # Ours to write to, and nothing of the object store's is held by what is made of it.
            return fine, [memoryview(bytearray(part)) for part in parts]
        if event[0] == "refused":
            raise BadInput(event[1], remedy=event[2])
        _, why, begun, host_gone = event
        raise self._lost(why, begun=begun, host_gone=host_gone)

    def _happened(self, event: Event, sink: Sink) -> None:
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

    def _lost(self, why: str, *, begun: bool = True, host_gone: bool = False) -> WorkerLost:
        self._end_with(why, host_gone=host_gone)
        return WorkerLost(f"the worker ended: {self._ending}", begun=begun, with_host=self._host_gone)


def words(error: BaseException) -> str:
    """Of Ray's explanations the first line is for people; what our own side of it raised says it better."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, SubletError):
        return f"{cause.message}; {cause.remedy}"[:300]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
