"""Kubernetes: this pod is being deleted, and when it will be killed.

Rules of this file:
- The pod is read from the cluster's own API as the pod's service account. The token is read again for every
  question: it is replaced about once an hour.
- `deletionTimestamp` is when the grace is over, not when it began. `deletionGracePeriodSeconds` bounds it, in
  case the clocks differ.
- A service account that may not read its pod hears nothing here. SIGTERM reaches the first process of the
  container all the same.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from sublet.core.notice import Notice
from sublet.core.values import SECOND_US
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

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOOK_SECONDS = 5.0


class KubernetesSource:
    name = "kubernetes"
    risk = ""

    def __init__(
        self,
        clock: Clock,
        *,
        base: str,
        pod: str,
        namespace: str = "",
        account: Path = ACCOUNT,
        look_seconds: float = LOOK_SECONDS,
        longest_pause_seconds: float = 60.0,
    ) -> None:
        self._clock = clock
        self._base, self._pod, self._namespace = base, pod, namespace
        self._account = account
        self._look_seconds = look_seconds
        self._longest = longest_pause_seconds

    def here(self) -> bool:
        return bool(self._base and self._pod) and (self._account / "token").is_file()

    def watch(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        patience = PollPauses(self._longest)
        while not stop.is_set():
            try:
                notice = self._notice(self._ask(stop))
                patience.answered()
            except ListeningStopped:
                return
            except (NoAnswer, OSError, ValueError):
                stop.wait(patience.seconds())
                continue
            if notice is not None:
                raise_notice(notice)
            stop.wait(self._look_seconds)

    def _ask(self, stop: threading.Event) -> Reply:
        token = (self._account / "token").read_text().strip()
        namespace = self._namespace or (self._account / "namespace").read_text().strip()
        service = MetadataService(self._base, self._clock)
        if self._base.startswith("https:"):
            service.trust = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(self._pod, safe='')}"
        reply = service.ask(path, headers=headers, seconds=5.0, stop=stop)
        if reply.status != 200:
            raise NoAnswer(f"the cluster's API said {reply.status}")
        return reply

    def _notice(self, reply: Reply) -> Notice | None:
        try:
            about = json.loads(reply.body)["metadata"]
            stamp, grace = about.get("deletionTimestamp"), about.get("deletionGracePeriodSeconds")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise NoAnswer(f"the pod is not what Kubernetes documents: {reply.text[:80]!r}") from e
        when = time_in_words(stamp) if isinstance(stamp, str) else None
        if when is None:
            return None
        deadline_us = deadline_of(when, reply, self._clock)
        if isinstance(grace, int) and grace >= 0:
            deadline_us = min(deadline_us, self._clock.monotonic_us() + grace * SECOND_US)
        why = f"Kubernetes deletes this pod ({self._pod})"
        return Notice(source=self.name, reason=why, deadline_us=deadline_us)


def open_source(around: Surroundings) -> KubernetesSource:
    host = around.environment.get("KUBERNETES_SERVICE_HOST", "")
    port = around.environment.get("KUBERNETES_SERVICE_PORT_HTTPS") or around.environment.get(
        "KUBERNETES_SERVICE_PORT", "443"
    )
    shown = f"[{host}]" if ":" in host else host
    return KubernetesSource(
        around.clock,
        base=f"https://{shown}:{port}" if host else "",
        pod=around.environment.get("POD_NAME", "") or around.hostname,
        namespace=around.environment.get("POD_NAMESPACE", ""),
    )
