"""Amazon EC2: the interruption of a spot instance, two minutes ahead.

Rules of this file:
- `spot/instance-action` is 404 until an interruption is scheduled, then JSON with the action and the time.
  Asked every 5 s, as Amazon advises. A hibernation begins at once, whatever time is written beside it.
- With a token (IMDSv2), renewed at half its life and when it is refused. Without one (IMDSv1) only where no
  token is available: the token endpoint says 403, 404 or 405, or its answer does not arrive, which is what a
  hop limit of 1 does to a container. Tokens protect credentials, and none are read here; a missed
  interruption costs work, and the worst an untrue one does is an early drain.
- A rebalance recommendation is a `risk`, not a Notice: it has no deadline, may come hours early and may come
  to nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
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
    TookTooLong,
    deadline_of,
    time_in_words,
)
from sublet.ports.clock import Clock
from sublet.ports.notices import Surroundings

BASE = "http://169.254.169.254"
BASE_IPV6 = "http://[fd00:ec2::254]"
TOKEN_SECONDS = 21_600
LOOK_SECONDS = 5.0
HYPERVISOR = Path("/sys/hypervisor/uuid")


class AwsSource:
    name = "aws"

    def __init__(
        self,
        clock: Clock,
        *,
        base: str = BASE,
        named: bool = False,
        disabled: bool = False,
        dmi: Path = DMI,
        look_seconds: float = LOOK_SECONDS,
        token_seconds: int = TOKEN_SECONDS,
        longest_pause_seconds: float = 30.0,
    ) -> None:
        self._clock = clock
        self._service = MetadataService(base, clock)
        self._named, self._disabled = named, disabled
        self._dmi = dmi
        self._look_seconds = look_seconds
        self._token_seconds = token_seconds
        self._longest = longest_pause_seconds
        self._token = ""
        self._renew_at_us = 0
        self.risk = ""

    def here(self) -> bool:
        if self._disabled:
            return False
        return self._named or firmware("sys_vendor", self._dmi) == "Amazon EC2" or self._is_xen()

    def _is_xen(self) -> bool:
        """Whether it is an older instance type, which has no such vendor; its hypervisor's id begins with
        'ec2'."""
        return self._dmi == DMI and firmware(HYPERVISOR.name, HYPERVISOR.parent).lower().startswith("ec2")

    def watch(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        patience = PollPauses(self._longest)
        while not stop.is_set():
            try:
                self._look(raise_notice, stop)
                patience.answered()
                stop.wait(self._look_seconds)
            except ListeningStopped:
                return
            except NoAnswer:
                stop.wait(patience.seconds())

    def _look(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        action = self._get("/latest/meta-data/spot/instance-action", stop)
        if action is not None:
            raise_notice(self._notice(action))
        advice = self._get("/latest/meta-data/events/recommendations/rebalance", stop)
        self.risk = (
            "" if advice is None else "Amazon advises to leave this spot instance (rebalance recommendation)"
        )

    def _notice(self, reply: Reply) -> Notice:
        try:
            found = json.loads(reply.body)
            action, when = str(found["action"]), time_in_words(str(found["time"]))
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise NoAnswer(f"instance-action is not what Amazon documents: {reply.text[:80]!r}") from e
        if when is None:
            raise NoAnswer(f"instance-action has no time: {reply.text[:80]!r}")
        deadline_us = reply.asked_us if action == "hibernate" else deadline_of(when, reply, self._clock)
        why = f"Amazon takes this spot instance back ({action[:20]})"
        return Notice(source=self.name, reason=why, deadline_us=deadline_us)

    def _get(self, path: str, stop: threading.Event) -> Reply | None:
        """Ask for a path; None while there is nothing there (404)."""
        reply = self._service.ask(path, headers=self._proof(stop), stop=stop)
        if reply.status == 401 and self._token:
            self._token = ""
            reply = self._service.ask(path, headers=self._proof(stop), stop=stop)
        if reply.status == 404:
            return None
        if reply.status != 200:
            raise NoAnswer(f"the metadata service said {reply.status}")
        return reply

    def _proof(self, stop: threading.Event) -> dict[str, str]:
        if not self._token or self._clock.monotonic_us() >= self._renew_at_us:
            self._token = self._fresh_token(stop)
        return {"X-aws-ec2-metadata-token": self._token} if self._token else {}

    def _fresh_token(self, stop: threading.Event) -> str:
        """Get a new token; '' where none is available."""
        wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._token_seconds)}
        try:
            reply = self._service.ask(
                "/latest/api/token", method="PUT", headers=wanted, seconds=1.0, stop=stop
            )
        except TookTooLong:
            return ""
        if reply.status in (403, 404, 405):
            return ""
        if reply.status != 200 or not reply.text.isascii() or not 0 < len(reply.text) <= 4096:
            raise NoAnswer(f"the token endpoint said {reply.status}")
        given = reply.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        seconds = int(given) if given.isdigit() else self._token_seconds
        self._renew_at_us = reply.asked_us + seconds * SECOND_US // 2
        return reply.text


def open_source(around: Surroundings) -> AwsSource:
    base = around.environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").strip()
    ipv6 = around.environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6"
    disabled = around.environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    return AwsSource(
        around.clock, base=base or (BASE_IPV6 if ipv6 else BASE), named=bool(base), disabled=disabled
    )
