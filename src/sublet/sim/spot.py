"""Training on nodes that are taken away: how their time is spent, by how often the state is saved.

Rules of this file:
- Each node runs one job. A job whose node was taken goes on the next node that comes, before any new job
  begins; so a job has a history of losses, and `every=auto` learns from it what `core.progress.cadence` would
  learn.
- Every microsecond of a node is in exactly one part: useful, starting, saving, lost, or left over. Useful is
  steps that a durable save contains.
- A save stops training for `stall_us`, and is durable `save_us` after it began; until then the one before it
  counts. Saves begin between steps.
- With a notice the job ends its step, saves if there is time for it, and stops: what is left of the node's
  time is left over.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from sublet.core.progress.cadence import Cost, Losses, best_interval
from sublet.core.values import HOUR_US, MINUTE_US, SECOND_US, format_duration
from sublet.sim.traces import Availability, NodeSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The costs of a job."""

    step_us: int = SECOND_US
    stall_us: int = SECOND_US // 10
    save_us: int = SECOND_US
    restart_us: int = 60 * SECOND_US  # from a node to the first step on it


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """When to save: at a fixed interval, as `core.progress.cadence` says (None), or never (0)."""

    name: str
    every_us: int | None
    notice_us: int = 0


AUTO = SavePlan(name="every=auto", every_us=None)


def fixed(every_us: int, notice_us: int = 0) -> SavePlan:
    says = "never" if not every_us else f"every {format_duration(every_us)}"
    told = f" + {format_duration(notice_us)} notice" if notice_us else ""
    return SavePlan(name=says + told, every_us=every_us, notice_us=notice_us)


#: The plans compared unless others are named.
WAYS = tuple(fixed(us) for us in (10 * SECOND_US, MINUTE_US, 10 * MINUTE_US, HOUR_US, 3 * HOUR_US, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotResult:
    saving: SavePlan
    node_us: int
    useful_us: int = 0
    starting_us: int = 0
    saving_us: int = 0
    lost_us: int = 0
    left_over_us: int = 0
    losses: int = 0
    saves: int = 0
    jobs: int = 0
    last_every_us: int = 0  # of every=auto: what it had come to

    @property
    def goodput(self) -> float:
        return self.useful_us / self.node_us

    def as_json(self, price_micro: int = 0) -> dict[str, object]:
        found = asdict(self) | {"name": self.saving.name, "goodput": round(self.goodput, 6)}
        found.pop("saving")
        if price_micro:
            found["cost_per_useful_hour_micro"] = cost_per_useful_hour(self, price_micro)
        return found


def cost_per_useful_hour(result: SpotResult, price_micro: int) -> int:
    """What an hour of committed work costs when an hour of a node costs `price_micro`."""
    return price_micro * result.node_us // max(1, result.useful_us)


@dataclass(slots=True)
class _Life:
    """A job: the losses it has seen, and the work that no loss has taken."""

    losses: Losses
    every_us: int = 0


def replay(trace: Availability, training: Training, saving: SavePlan) -> SpotResult:
    homeless: deque[tuple[int, _Life]] = deque()
    total = SpotResult(saving=saving, node_us=trace.node_us)
    jobs = 0
    # A job is free again when its node is lost: sorted in by that instant.
    ending: list[tuple[int, int, _Life]] = []
    for number, span in enumerate(trace.spans):
        for entry in sorted(e for e in ending if e[0] <= span.since):
            ending.remove(entry)
            homeless.append((entry[0], entry[2]))
        if homeless:
            life = homeless.popleft()[1]
        else:
            life = _Life(Losses())
            jobs += 1
        total = _added(total, _on_a_node(span, training, saving, life))
        if span.lost:
            unwarned = 0 if saving.notice_us else 1
            seen = life.losses
            life.losses = Losses(count=seen.count + unwarned, held_us=seen.held_us + span.until - span.since)
            ending.append((span.until, number, life))
    return replace(total, jobs=jobs)


def _added(a: SpotResult, b: SpotResult) -> SpotResult:
    return replace(
        a,
        useful_us=a.useful_us + b.useful_us,
        starting_us=a.starting_us + b.starting_us,
        saving_us=a.saving_us + b.saving_us,
        lost_us=a.lost_us + b.lost_us,
        left_over_us=a.left_over_us + b.left_over_us,
        losses=a.losses + b.losses,
        saves=a.saves + b.saves,
        last_every_us=b.last_every_us or a.last_every_us,
    )


def _on_a_node(span: NodeSpan, training: Training, saving: SavePlan, life: _Life) -> SpotResult:
    """One stay, from the node's first microsecond to its last."""
    step, stall = training.step_us, training.stall_us
    end = span.until
    told_at = end - saving.notice_us if saving.notice_us and span.lost else end
    now = min(end, span.since + training.restart_us)
    starting = now - span.since
    work = durable = pending = 0  # done since the start; of it in a durable save; of it in one on its way
    pending_at: int | None = None
    saved = saves = every = 0
    first = saving.every_us is None
    while now < told_at:
        if saving.every_us is None:
            cost = None if first else Cost(stall_us=stall, save_us=training.save_us)
            held = life.losses.held_us + now - span.since
            every = best_interval(cost, replace(life.losses, held_us=held)).us
            first = False
        else:
            every = saving.every_us
        # Steps until the next save is due; a save in flight is waited for.
        steps = max(1, -(-every // step)) if every else max(1, (told_at - now) // step + 1)
        if pending_at is not None and now + steps * step < pending_at:
            steps = -(-(pending_at - now) // step)
        whole = min(steps, max(0, (told_at - now) // step))
        now += whole * step
        work += whole * step
        if pending_at is not None and pending_at <= now:
            durable, pending_at = pending, None
        if whole < steps:
            break  # the end, or the notice, comes in the middle of a step
        if every and now < told_at:
            paused = min(stall, end - now)
            saves += 1
            pending, pending_at = work, now + training.save_us
            saved += paused
            now += paused
    lost_step = 0
    if now < end and told_at < end:  # told: end the step, save, stop
        if now + step <= end:
            now += step
            work += step
        if now + training.save_us <= end:
            saves += 1
            saved += min(stall, end - now)
            now += min(stall, end - now)
            durable, pending_at = work, None
    elif not span.lost:
        durable, pending_at = work, None  # the trace is over, and not the node: what was done counts
    if pending_at is not None and pending_at <= end:
        durable = pending
    if now < end and told_at == end:
        lost_step = end - now  # cut off in a step
    left = end - span.since - starting - saved - work - lost_step
    return SpotResult(
        saving=saving,
        node_us=span.until - span.since,
        useful_us=durable,
        starting_us=starting,
        saving_us=saved,
        lost_us=work - durable + (lost_step if span.lost else 0),
        left_over_us=left + (0 if span.lost else lost_step),
        losses=int(span.lost),
        saves=saves,
        last_every_us=every if saving.every_us is None else 0,
    )


# --- what follows -------------------------------------------------------------------------------------------

#: Intervals tried beside Young's: from a second to three hours, eight to each tenfold.
GRID = tuple(round(SECOND_US * 10 ** (i / 8)) for i in range(33))
#: A renewal is one transaction of the ledger.
RENEWAL_US = 5_000
LEAST_TTL_US = 10 * SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAdvice:
    every_us: int
    goodput: float
    auto_goodput: float
    ttl_us: int
    reasons: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def advise(traces: Sequence[Availability], training: Training, *, notice_us: int = 0) -> SaveAdvice:
    node_us = sum(t.node_us for t in traces)
    losses = sum(t.losses for t in traces)
    apart = node_us // max(1, losses)
    young = math.isqrt(2 * max(1, training.stall_us) * apart)

    def over_all(saving: SavePlan) -> float:
        return sum(replay(t, training, saving).useful_us for t in traces) / node_us

    tried = {us: over_all(fixed(us, notice_us)) for us in sorted({*GRID, max(SECOND_US, young)})}
    best = max(tried, key=lambda us: (tried[us], -us))
    auto = over_all(replace(AUTO, notice_us=notice_us))
    ttl = max(LEAST_TTL_US, math.isqrt(RENEWAL_US * apart * 1000 // 435))  # 0.65 and 0.67: see the reason
    reasons = [
        f"a node was lost {losses:,} times in {node_us / HOUR_US:,.0f} node-hours: one every "
        f"{format_duration(apart)}",
        f"a save stops training for {training.stall_us / SECOND_US:g}s, so Young's rule gives sqrt(2 × "
        f"{training.stall_us / SECOND_US:g}s × {format_duration(apart)}) = {_span(young)}; of {len(tried)} "
        f"intervals replayed, {_span(best)} kept most of the time: {tried[best]:.2%}",
        f"every=auto learns it from its own losses and reaches {auto:.2%}, {auto / tried[best]:.2%} of that",
        f"ttl {format_duration(ttl)}: a node that dies in silence keeps its lease for two thirds of a ttl on "
        f"average; a renewal costs a few milliseconds each 0.65 ttl; below {format_duration(LEAST_TTL_US)} a "
        "pause of the network would end leases",
    ]
    return SaveAdvice(
        every_us=best, goodput=tried[best], auto_goodput=auto, ttl_us=ttl, reasons=tuple(reasons)
    )


def _span(us: int) -> str:
    return f"{us / SECOND_US:.3g}s" if us < MINUTE_US else format_duration(us)
