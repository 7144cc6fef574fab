"""How many GPUs a studio's workload needs, and which ttl: found by replaying it.

Rules of this file:
- Only the scheme 'ours' is replayed. The fewest GPUs are found by doubling and halving with the default ttl;
  then a shorter and a longer ttl are tried with them.
- A ttl is better if p95 stays within the target and fewer GPU-hours are held; what was tried is said.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sublet.core.errors import BadInput
from sublet.core.values import HOUR_US, MINUTE_US, format_duration
from sublet.sim.engine import MOST_GPUS, replay
from sublet.sim.report import Figures, figures, seconds
from sublet.sim.schemes import OURS, TTL_US, with_ttl
from sublet.sim.workload import Workload

TTLS = (MINUTE_US, TTL_US, 15 * MINUTE_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingAdvice:
    gpus: int
    ttl_us: int
    p95_us: int
    reasons: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def advise(workload: Workload, target_us: int, restore_us: int) -> SizingAdvice:
    if target_us < restore_us:
        raise BadInput(
            f"a p95 wait below the restore of {format_duration(restore_us)} cannot be had: who comes anew "
            "waits for that"
        )
    tried: dict[tuple[int, int], Figures] = {}

    def p95(gpus: int, ttl_us: int = TTL_US) -> int:
        if (gpus, ttl_us) not in tried:
            outcome = replay(workload, with_ttl(OURS, ttl_us), gpus=gpus, restore_us=restore_us)
            tried[(gpus, ttl_us)] = figures(outcome)
        return tried[(gpus, ttl_us)].wait.p95_us

    low, high = 0, 1
    while p95(high) > target_us:
        low, high = high, high * 2
        if high > min(MOST_GPUS, 2 * workload.tenants):
            raise BadInput(
                "no number of GPUs has such waits: tenants wait behind their own requests for longer"
            )
    while high - low > 1:
        middle = (low + high) // 2
        if p95(middle) <= target_us:
            high = middle
        else:
            low = middle
    for ttl_us in TTLS:
        p95(high, ttl_us)
    good = {ttl: f for (n, ttl), f in tried.items() if n == high and f.wait.p95_us <= target_us}
    best = min(good, key=lambda ttl: (good[ttl].held_us, ttl))
    by_size = ", ".join(
        f"{n}: {seconds(f.wait.p95_us)}" for (n, ttl), f in sorted(tried.items()) if ttl == TTL_US
    )
    by_ttl = ", ".join(
        f"{format_duration(ttl)}: {seconds(f.wait.p95_us)} and {f.held_us / HOUR_US:,.0f}h"
        for (n, ttl), f in sorted(tried.items())
        if n == high
    )
    return SizingAdvice(
        gpus=high,
        ttl_us=best,
        p95_us=good[best].wait.p95_us,
        reasons=(
            f"p95 waits in seconds by number of GPUs, ttl {format_duration(TTL_US)}: {by_size}; {high} is "
            f"the first within {format_duration(target_us)}",
            f"with {high} GPUs by ttl, p95 wait in seconds and GPU-hours held: {by_ttl}; a shorter ttl frees "
            "GPUs nobody asked for, and makes people restore who need not have",
            f"of that a restore is {seconds(restore_us)}: nobody who comes to a new GPU waits less",
        ),
    )
