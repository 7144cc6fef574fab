"""What `sublet work` is made of: words in, a worker with its queues, its lease and its alarms out.

Rules of this file:
- Everything that can be refused is refused before a lease is asked for: sizes, durations, names, a target that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sublet.borrowing import GpuRequest, local_gpu
from sublet.core.admission import Wait
from sublet.core.errors import BadInput
from sublet.core.exits import check_profile
from sublet.core.items import check_visibility
from sublet.core.values import format_duration, parse_duration
from sublet.hosting.containment import contained
from sublet.queueing import queue
from sublet.runtime.holding import Lease
from sublet.runtime.progress_line import WorkLine
from sublet.runtime.queues import Queue
from sublet.runtime.target import check_target
from sublet.runtime.work import REST_US, Left, Terms, Warnings, Work
from sublet.settings import Settings
from sublet.wiring import CLOCK, alarms, open_ledger, placement

DEFAULT_GRACE = "15s"
MOST_BATCH = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What was typed, in words."""

    queues: str
    target: str
    vram: str = "1GiB"
    count: int = 1
    tier: str = "batch"
    ttl: str = "5m"
    wait: str | None = None
    tenant: str | None = None
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
class Prepared:
    """Checked: nothing of it can be refused any more but by the ledger, and by the target when it is loaded."""

    settings: Settings
    queues: tuple[Queue, ...]
    request: GpuRequest | None  # None: nothing is leased, the target is called in this process
    terms: Terms
    grace_us: int


def prepare(wish: Wish, settings: Settings) -> Prepared:
    check_profile(wish.profile)
    names = [name.strip() for name in wish.queues.split(",")]
    if len(set(names)) < len(names):
        raise BadInput(
            f"a queue is named twice in {wish.queues[:200]!r}: it gets one turn in each round anyway"
        )
    for option, number in (("--batch", wish.batch), ("--most", wish.most)):
        if number is not None and number < 1:
            raise BadInput(f"{option} must be a whole number, at least 1; leave it out for none")
    if wish.batch is not None and wish.batch > MOST_BATCH:
        raise BadInput(f"--batch is at most {MOST_BATCH}")
    terms = Terms(
        target=check_target(wish.target),
        batch=wish.batch or 0,
        visibility_us=None
        if wish.visibility is None
        else check_visibility(parse_duration(wish.visibility, what="visibility")),
        until_empty=wish.until_empty,
        most=wish.most or 0,
        idle_us=None if wish.idle is None else parse_duration(wish.idle, what="idle"),
        rest_us=wish.rest_us,
        profile=wish.profile,
    )
    request = local_gpu(
        wish.vram,
        wish.ttl,
        count=wish.count,
        tier=wish.tier,
        wait=wish.wait,
        tenant=wish.tenant,
        holder="worker",
        placed=placement(settings),
        settings=settings,
    )
    return Prepared(
        settings=settings,
        queues=tuple(
            queue(name, sink=wish.sink, broker=wish.broker, tenant=wish.tenant, settings=settings)
            for name in names
        ),
        # Inside `sublet run` the process has its GPU already, and is contained like a worker.
        request=None if settings.disabled or contained() else request,
        terms=terms,
        grace_us=parse_duration(wish.grace, what="grace"),
    )


def go(prepared: Prepared, line: WorkLine) -> Left:
    """Work, in this process, until there is a reason to leave."""
    with alarms(prepared.settings, grace_us=prepared.grace_us) as told:
        return worker(prepared, told, line).go()


def worker(prepared: Prepared, told: Warnings, line: WorkLine) -> Work:
    settings, request = prepared.settings, prepared.request
    waiting = ""

    def on_wait(wait: Wait) -> None:
        nonlocal waiting
        told = f"waiting for a GPU, at place {wait.position}: {wait.reason}"
        if told != waiting:
            waiting = told
            line.say(told)

    def borrow(still_wanted: Callable[[], None]) -> Lease:
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
        # Not in a `with` block: while there is nothing to do it counts as idle, and may be taken by who has something.
        return asked._keep()

    return Work(
        prepared.queues,
        prepared.terms,
        None if request is None else borrow,
        lambda: open_ledger(settings),
        told,
        CLOCK,
        line,
    )


def summary(left: Left) -> str:
    """One sentence of what was done."""
    tally = left.tally
    parts = [f"{tally.done:,} done"]
    for count, word in (
        (tally.failed, "failed"),
        (tally.dead, "of them dead"),
        (tally.refused, "refused: somebody else had them"),
        (tally.given_back, "given back untouched"),
        (tally.lost_leases, "leases lost"),
        (tally.lost_workers, "workers lost"),
    ):
        if count:
            parts.append(f"{count:,} {word}")
    return f"{', '.join(parts)}, in {format_duration(tally.work_us)} of work; {left.outcome.value}: {left.reason}"
