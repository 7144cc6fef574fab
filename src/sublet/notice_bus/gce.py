"""Google Compute Engine: preemption of a spot VM, and host maintenance that ends one.

Rules of this file:
- `instance/preempted` turns TRUE about 30 s before the VM is stopped. It is asked with `wait_for_change` and
  the last ETag, so that the answer comes at once and a change between two questions is not missed.
- `instance/maintenance-event` is looked at between two such waits. A live migration keeps the memory and is
  no loss. The documented notice of a stop is 60 s, and an hour with a GPU; when we find it we cannot know how
  much of it is over, so 60 s it is.
- An answer without `Metadata-Flavor: Google` is somebody else's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from sublet.core.notice import Notice
from sublet.core.values import SECOND_US
from sublet.notice_bus.machine import DMI, firmware
from sublet.notice_bus.metadata import (
    FIRST_PAUSE_SECONDS,
    ListeningStopped,
    MetadataService,
    NoAnswer,
    PollPauses,
    Reply,
)
from sublet.ports.clock import Clock
from sublet.ports.notices import Surroundings

BASE = "http://metadata.google.internal"
FLAVOR = {"Metadata-Flavor": "Google"}
PREEMPTION_US = 30 * SECOND_US
MAINTENANCE_US = 60 * SECOND_US
WAIT_SECONDS = 20


class GceSource:
    name = "gce"
    risk = ""

    def __init__(
        self,
        clock: Clock,
        *,
        base: str = BASE,
        named: bool = False,
        dmi: Path = DMI,
        wait_seconds: int = WAIT_SECONDS,
        longest_pause_seconds: float = 30.0,
    ) -> None:
        self._clock = clock
        self._service = MetadataService(base, clock)
        self._named = named  # somebody gave the address, so it is meant
        self._dmi = dmi
        self._wait_seconds = wait_seconds
        self._longest = longest_pause_seconds

    def here(self) -> bool:
        return self._named or firmware("product_name", self._dmi).startswith("Google")

    def watch(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        patience = PollPauses(self._longest)
        etag, raised = "", False
        while not stop.is_set():
            try:
                self._look_at_maintenance(raise_notice, stop)
                reply = self._wait_for_preemption(etag, stop)
                patience.answered()
            except ListeningStopped:
                return
            except NoAnswer:
                stop.wait(patience.seconds())
                continue
            waited, etag = bool(etag), reply.headers.get("etag", "")
            if reply.text.upper() == "TRUE" and not raised:
                raised = True
                # The answer comes when the value changes. Found without a wait, some of the notice is over
                # already.
                left = PREEMPTION_US if waited else PREEMPTION_US // 2
                why = "Google takes this spot VM back (preempted)"
                raise_notice(
                    Notice(source=self.name, reason=why, deadline_us=self._clock.monotonic_us() + left)
                )
            if not etag:
                stop.wait(FIRST_PAUSE_SECONDS)  # a service that cannot wait must not be asked without pause

    def _wait_for_preemption(self, etag: str, stop: threading.Event) -> Reply:
        path = "/computeMetadata/v1/instance/preempted"
        if etag:
            path += f"?wait_for_change=true&timeout_sec={self._wait_seconds}&last_etag={quote(etag)}"
        return self._ask(path, self._wait_seconds + 10, stop)

    def _look_at_maintenance(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        reply = self._ask("/computeMetadata/v1/instance/maintenance-event", 5, stop)
        if reply.text.upper().startswith("TERMINATE"):
            raise_notice(
                Notice(
                    source=self.name,
                    reason="Google stops this VM for host maintenance",
                    deadline_us=reply.asked_us + MAINTENANCE_US,
                )
            )

    def _ask(self, path: str, seconds: float, stop: threading.Event) -> Reply:
        reply = self._service.ask(path, headers=FLAVOR, seconds=seconds, stop=stop)
        if reply.status != 200 or reply.headers.get("metadata-flavor", "") != "Google":
            raise NoAnswer(f"the metadata service said {reply.status}")
        return reply


def open_source(around: Surroundings) -> GceSource:
    host = around.environment.get("GCE_METADATA_HOST", "").strip()
    return GceSource(around.clock, base=f"http://{host}" if host else BASE, named=bool(host))
