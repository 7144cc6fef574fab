"""Builds the worker of `sublet work` from what was typed: its queues, its lease and its notices.

Rules of this file:
- Everything that can be refused is refused before a lease is asked for: sizes, durations, names, a missing
  target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sublet.core.errors import BadInput
from sublet.core.leasing.options import BATCH_GPU, GpuOptions
from sublet.core.notice import DEFAULT_GRACE
from sublet.core.queues.items import check_visibility
from sublet.core.runs.exits import check_profile
from sublet.core.scheduling.admission import Wait
from sublet.core.values import parse_duration
from sublet.leases.lease import Lease
from sublet.leases.progress_line import WorkLine
from sublet.leases.request import GpuRequest, local_gpu
from sublet.processes.sandbox.containment import contained
from sublet.processes.worker.target import check_target
from sublet.queues.opening import queue
from sublet.queues.patience import WorkerNotices
from sublet.queues.queue import Queue
from sublet.queues.tally import REST_US, WorkerExit, WorkPlan
from sublet.queues.worker import QueueWorker
from sublet.settings import Settings
from sublet.wiring import CLOCK, open_ledger, open_notice_bus, placement

MOST_BATCH = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    """What was typed, in words."""

    queues: str
    target: str
    gpu: GpuOptions = BATCH_GPU
    grace: str = DEFAULT_GRACE
    batch: int | None = None
    visibility: str | None = None
    until_empty: bool = False
    most: int | None = None
    idle: str | None = None
    rest_us: int = REST_US
    sink: str | None = None
    broker: str | None = None
    profile: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedWorker:
    """Checked options: only the ledger, and the target when it is loaded, can still refuse something."""

    settings: Settings
    queues: tuple[Queue, ...]
    request: GpuRequest | None  # None: nothing is leased, the target is called in this process
    plan: WorkPlan
    grace_us: int


def prepare(options: WorkOptions, settings: Settings) -> PreparedWorker:
    check_profile(options.profile)
    names = [name.strip() for name in options.queues.split(",")]
    if len(set(names)) < len(names):
        raise BadInput(
            f"a queue is named twice in {options.queues[:200]!r}: name each once, it gets one turn in each "
            "round anyway"
        )
    for option, number in (("--batch", options.batch), ("--most", options.most)):
        if number is not None and number < 1:
            raise BadInput(f"{option} must be a whole number, at least 1; leave the option out for no limit")
    if options.batch is not None and options.batch > MOST_BATCH:
        raise BadInput(f"--batch is at most {MOST_BATCH}")
    plan = WorkPlan(
        target=check_target(options.target),
        batch=options.batch or 0,
        visibility_us=None
        if options.visibility is None
        else check_visibility(parse_duration(options.visibility, what="visibility")),
        until_empty=options.until_empty,
        most=options.most or 0,
        idle_us=None if options.idle is None else parse_duration(options.idle, what="idle"),
        rest_us=options.rest_us,
        profile=options.profile,
    )
    request = local_gpu(replace(options.gpu, holder="worker"), placed=placement(settings), settings=settings)
    return PreparedWorker(
        settings=settings,
        queues=tuple(
            queue(
                name, sink=options.sink, broker=options.broker, tenant=options.gpu.tenant, settings=settings
            )
            for name in names
        ),
        # Inside `sublet run` the process has its GPU already, and is contained like a worker.
        request=None if settings.disabled or contained() else request,
        plan=plan,
        grace_us=parse_duration(options.grace, what="grace"),
    )


def go(prepared: PreparedWorker, line: WorkLine) -> WorkerExit:
    """Work, in this process, until there is a reason to leave."""
    with open_notice_bus(prepared.settings, grace_us=prepared.grace_us) as notices:
        return worker(prepared, notices, line).go()


def worker(prepared: PreparedWorker, notices: WorkerNotices, line: WorkLine) -> QueueWorker:
    settings, request = prepared.settings, prepared.request
    waiting = ""

    def on_wait(wait: Wait) -> None:
        nonlocal waiting
        sentence = f"waiting for a GPU, at place {wait.position}: {wait.reason}"
        if sentence != waiting:
            waiting = sentence
            line.say(sentence)

    def acquire_lease(still_wanted: Callable[[], None]) -> Lease:
        assert request is not None
        asked = GpuRequest(
            settings,
            request.request,
            holder="worker",
            on_wait=on_wait,
            on_offer=None,
            still_wanted=still_wanted,
            placed=placement(settings),
        )
        # Not in a `with` block: while there is nothing to do it counts as idle, and a waiter may get it.
        return asked.hold()

    return QueueWorker(
        prepared.queues,
        prepared.plan,
        None if request is None else acquire_lease,
        lambda: open_ledger(settings),
        notices,
        CLOCK,
        line,
    )
