"""A process on a Ray node that holds a lease, as the process that asked for it sees it.

Rules of this file:
- Only confirmed deadlines count. One that the node did not confirm may not have arrived: when the last
  confirmed one is over, so is the process, whatever was renewed here meanwhile.
- Ray's word that the node is gone ends the waiting, and the lease with it. It proves nothing: the slices stay
  taken until the warden of that host has seen that nothing is left.
- A deadline is converted to the other host's clock early rather than late, by the round trip that measured
  the difference.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from sublet.core.errors import SubletError, WorkerLost
from sublet.core.leasing.lease import Holder
from sublet.placement.agent import GONE, Event
from sublet.wiring import CLOCK

#: How long to wait for Ray before checking whether waiting still makes sense.
LOOK_SECONDS = 0.25
CONFIRM_SECONDS = 20.0
END_SECONDS = 3.0
#: Two clocks of one kind drift apart by less than one part in this many.
DRIFT_PARTS = 5_000


class RayProcess:
    """Implements `ports.worker.LeaseHolder`, except for `begin`: a worker and a command begin differently."""

    here = False

    def __init__(self, agent: Any, facts: Mapping[str, Any], received_us: int) -> None:
        self._agent = agent
        self._number: str = facts["number"]
        self._holder = Holder(host=facts["host"], pid=facts["pid"], started=facts["started"])
        self._containment: str = facts["containment"]
        self._pid = os.getpid()
        self._ending = ""
        self._host_gone = False  # and that is why
        # The least by which the other clock is ahead: exact if the answer took no time to come back.
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
    def ending(self) -> str:
        if not self._ending and self._pid == os.getpid() and self._connected():
            self._hear()
        return self._ending

    @property
    def host_lost(self) -> str:
        return self._ending if self.ending and self._host_gone else ""

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
        """Note what the node has confirmed by now, and whether the process is over. Never waits."""
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
        """Update the clock difference. An earlier measurement holds too, less the drift since, because an
        answer may have waited here to be read."""
        drifted_us = (received_us - self._learnt_us) // DRIFT_PARTS
        self._ahead_us = max(now_us - received_us, self._ahead_us - drifted_us)
        self._learnt_us = received_us

    def _end_with(self, why: str, *, host_gone: bool = False) -> None:
        if not self._ending:
            self._ending, self._host_gone = why, host_gone

    def _connected(self) -> bool:
        """Whether Ray can be asked. At the end of a process it may have left first, and would start a cluster
        of its own."""
        if not ray.is_initialized():
            self._end_with("the connection to Ray was closed")
        return bool(ray.is_initialized())

    def warn(self) -> None:
        if not self._connected():
            return
        with contextlib.suppress(RayError):
            self._agent.warn.remote(self._number)

    def end(self, why: str) -> None:
        if self._pid != os.getpid():
            return
        self._end_with(why)
        if not self._connected():
            return
        with contextlib.suppress(RayError):
            ray.wait([self._agent.end.remote(self._number, why)], timeout=END_SECONDS)

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
            self._check_waiting()

    def _check_waiting(self) -> None:
        """Raise `WorkerLost` when nothing more will come."""
        if self.ending:
            raise WorkerLost(f"the worker ended: {self._ending}", with_host=self._host_gone)

    def _lost(self, why: str, *, begun: bool = True, host_gone: bool = False) -> WorkerLost:
        self._end_with(why, host_gone=host_gone)
        return WorkerLost(f"the worker ended: {self._ending}", begun=begun, with_host=self._host_gone)


def words(error: BaseException) -> str:
    """Describe a Ray error: our own side's message if there is one, else the first line of Ray's."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, SubletError):
        return f"{cause.message}; {cause.remedy}"[:300]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
