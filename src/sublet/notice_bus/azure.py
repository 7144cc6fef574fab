"""Azure Scheduled Events: eviction of a spot VM, and anything else that takes its memory.

Rules of this file:
- Events reach every VM of an availability set or scale set. Only those that name this VM in `Resources`
  count.
- A `Freeze` pauses the VM for seconds and keeps its memory: no loss.
- `NotBefore` may be days ahead, for hardware expected to fail. A notice is held back until two minutes, or
  the grace if that is longer, before it: leaving a working GPU days early would be the greater loss.
- An event that is taken back after it was raised stays raised: whoever heard it has begun to leave.
- Approving an event (`StartRequests`) lets it begin at once for every VM it names. It is off unless asked
  for, is done when the listener leaves, and only for events that name nobody else.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sublet.core.notice import Notice
from sublet.core.values import SECOND_US
from sublet.notice_bus.machine import DMI, firmware
from sublet.notice_bus.metadata import (
    ListeningStopped,
    MetadataService,
    NoAnswer,
    PollPauses,
    Reply,
    deadline_of,
    time_in_words,
)
from sublet.ports.clock import Clock
from sublet.ports.notices import Surroundings

BASE = "http://169.254.169.254"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
ASKED = {"Metadata": "true"}
#: What the firmware of every Azure VM has, and no other machine's.
ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
#: The first question turns the service on, and may take two minutes to be answered.
FIRST_SECONDS = 130.0
LOOK_SECONDS = 1.0
AHEAD_US = 120 * SECOND_US
_VM_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")
LOSSES = {
    "Preempt": "Azure takes this spot VM back",
    "Terminate": "Azure deletes this VM",
    "Redeploy": "Azure moves this VM to another machine",
    "Reboot": "Azure restarts this VM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    id: str
    notice: Notice
    alone: bool  # names no other VM


class AzureSource:
    name = "azure"
    risk = ""

    def __init__(
        self,
        clock: Clock,
        *,
        hostname: str,
        grace_us: int,
        base: str = BASE,
        dmi: Path = DMI,
        acknowledge: bool = False,
        look_seconds: float = LOOK_SECONDS,
        first_seconds: float = FIRST_SECONDS,
        longest_pause_seconds: float = 30.0,
    ) -> None:
        self._clock = clock
        self._service = MetadataService(base, clock)
        self._names = {hostname.lower()}
        self._ahead_us = max(AHEAD_US, grace_us)
        self._dmi = dmi
        self._acknowledge = acknowledge
        self._look_seconds = look_seconds
        self._first_seconds = first_seconds
        self._longest = longest_pause_seconds

    def here(self) -> bool:
        return firmware("chassis_asset_tag", self._dmi) == ASSET_TAG

    def watch(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        patience = PollPauses(self._longest)
        known, seconds = False, self._first_seconds
        raised: dict[str, _Event] = {}
        while not stop.is_set():
            try:
                known = known or self._learn_name(stop)
                reply = self._service.ask(EVENTS, headers=ASKED, seconds=seconds, stop=stop)
                events = list(self._ours(reply))
                seconds = min(self._first_seconds, 10.0)
                patience.answered()
            except ListeningStopped:
                break
            except NoAnswer:
                known = False  # a service that gave no events may have given no name either
                stop.wait(patience.seconds())
                continue
            for event in events:
                if event.notice.deadline_us - self._clock.monotonic_us() <= self._ahead_us:
                    raised[event.id] = event
                    raise_notice(event.notice)
            stop.wait(self._look_seconds)
        if self._acknowledge:
            self._approve([event.id for event in raised.values() if event.alone])

    def _learn_name(self, stop: threading.Event) -> bool:
        """Learn the VM's name, which is often but not always the host's; one of a scale set has another."""
        reply = self._service.ask(NAME, headers=ASKED, stop=stop)
        if reply.status == 200 and _VM_NAME.fullmatch(reply.text):
            self._names = {reply.text.lower()}
        elif reply.status != 404:
            raise NoAnswer(f"the metadata service said {reply.status}")
        return True

    def _ours(self, reply: Reply) -> Iterator[_Event]:
        if reply.status != 200:
            raise NoAnswer(f"the metadata service said {reply.status}")
        try:
            events = json.loads(reply.body)["Events"]
            for event in events:
                resources = {str(name).lower() for name in event["Resources"]}
                if event["EventType"] in LOSSES and resources & self._names:
                    yield _Event(
                        id=str(event["EventId"]),
                        notice=self._notice(event, reply),
                        alone=len(resources) == 1,
                    )
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise NoAnswer(f"the scheduled events are not what Azure documents: {reply.text[:80]!r}") from e

    def _notice(self, event: dict[str, object], reply: Reply) -> Notice:
        kind = str(event["EventType"])
        begins = time_in_words(str(event.get("NotBefore") or ""))
        # Without a time it has begun, and nothing more is promised.
        begun = begins is None or event.get("EventStatus") == "Started"
        deadline_us = reply.asked_us if begun or begins is None else deadline_of(begins, reply, self._clock)
        return Notice(source=self.name, reason=f"{LOSSES[kind]} ({kind})", deadline_us=deadline_us)

    def _approve(self, ids: list[str]) -> None:
        if not ids:
            return
        body = json.dumps({"StartRequests": [{"EventId": id} for id in ids]}).encode()
        headers = ASKED | {"Content-Type": "application/json"}
        with contextlib.suppress(NoAnswer):
            self._service.ask(EVENTS, method="POST", headers=headers, body=body)


def open_source(around: Surroundings) -> AzureSource:
    return AzureSource(around.clock, hostname=around.hostname, grace_us=around.grace_us)
