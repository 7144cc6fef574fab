"""What users call: `sublet.queue(...)`.

Rules of this file:
- It turns arguments into a queue: durations and the addresses of brokers and sinks are read only here.
- What is left out stays as the queue has it: opening it with `tries=3` changes its tries and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sublet.core.errors import BadInput
from sublet.core.leasing.lease import Holder
from sublet.core.queues.items import QueueTerms, check_terms
from sublet.core.values import parse_duration
from sublet.leases.request import ensure_tenant
from sublet.ports.broker import Broker
from sublet.ports.items import ConsumerRecord
from sublet.ports.sink import Sink
from sublet.processes.ladder import read_stat
from sublet.processes.sandbox.containment import contained
from sublet.queues.queue import ConsumerIdentity, Queue
from sublet.queues.sinks.opening import open_sink
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, open_broker, open_ledger, processes

Duration = str | int | float


def queue(
    name: str,
    *,
    visibility: Duration | None = None,
    tries: int | None = None,
    losses: int | None = None,
    backoff: Duration | None = None,
    concurrency: int | None = None,
    sink: str | Sink | Callable[..., Any] | None = None,
    broker: str | Broker | None = None,
    tenant: str | None = None,
    settings: Settings | None = None,
) -> Queue:
    """A queue of items, each done once whatever dies: `sublet.queue("images").publish(paths, key=str)`.

    `visibility`: how long an item stays with a process that says nothing (60s). `tries`: dead after so many
    failures (5); `losses`: or so many lost workers (20). `backoff`: before the second try (1s), doubling.
    `concurrency`: the most handed out at once. `sink`: where results go besides the ledger. `broker`: where
    items come from that other programs publish.
    """
    settings = settings or load_settings()
    said: dict[str, Any] = {
        "visibility_us": None if visibility is None else parse_duration(visibility, what="visibility"),
        "tries": tries,
        "losses": losses,
        "backoff_us": None if backoff is None else parse_duration(backoff, what="backoff"),
        "concurrency": concurrency,
    }
    changes = {name: value for name, value in said.items() if value is not None}
    for word, value in changes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadInput(f"{word.removesuffix('_us')} {value!r} must be a whole number")
    check_terms(replace(QueueTerms(), **changes))
    owner = tenant or settings["tenant"]

    def opened() -> Broker:
        assert broker is not None
        return open_broker(broker, name) if isinstance(broker, str) else broker

    return Queue(
        name,
        owner,
        lambda: open_ledger(settings),
        CLOCK,
        _identity(settings),
        terms=(lambda known: replace(known, **changes)) if changes else None,
        sink=None if sink is None else open_sink(sink),
        broker=None if broker is None else opened,
        prepare=lambda: ensure_tenant(settings, open_ledger(settings), owner),
    )


def _identity(settings: Settings) -> ConsumerIdentity:
    known = processes(settings)
    space = _pid_space()

    def holder() -> Holder:
        # A contained process has a pid that means nothing outside its containment.
        found = None if contained() else known.identify(os.getpid())
        return found or Holder(host=settings["host"])

    def alive(consumer: ConsumerRecord) -> bool:
        if consumer.host != settings["host"] or not consumer.pid or consumer.pid_space != space:
            return True  # unknown here: its visibility decides
        stat = read_stat(consumer.pid)
        return stat is not None and stat.started == consumer.started and stat.state != "Z"

    return ConsumerIdentity(holder=holder, pid_space=space, alive=alive)


def _pid_space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
