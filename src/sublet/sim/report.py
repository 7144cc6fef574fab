"""The figures of a replay. Pure.

Rules of this file:
- A percentile is the smallest value that at least so many percent of the requests did not exceed: a wait that
  really happened, nothing between two.
- A tenant's served share is its work over its work and its waits: 1 for who never waited. Jain's index over
  these shares is 1 when all tenants fared alike, and 1/n when one of n got everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sublet.core.values import SECOND_US
from sublet.sim.engine import ReplayOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    p50_us: int
    p95_us: int
    p99_us: int
    most_us: int
    mean_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    scheme: str
    says: str
    gpus: int
    requests: int
    tenants: int
    wait: Waits  # from arrival to the start of the run that ended
    turn: Waits  # of that, from when the tenant's own earlier requests were done: what sharing cost
    worst_tenant: str
    worst_tenant_mean_us: int
    jain: float
    held_us: int
    worked_us: int
    restored_us: int
    lost_us: int
    lost_runs: int
    grants: int
    ends: dict[str, int]
    utilisation: float  # of all GPUs from the first arrival to the last end
    used_of_held: float
    ended_at: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def percentile(ordered: Sequence[int], percent: int) -> int:
    """`ordered` rises and is not empty."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def waits_of(waits: Sequence[int]) -> Waits:
    ordered = sorted(waits)
    return Waits(
        p50_us=percentile(ordered, 50),
        p95_us=percentile(ordered, 95),
        p99_us=percentile(ordered, 99),
        most_us=ordered[-1],
        mean_us=sum(ordered) // len(ordered),
    )


def jain(shares: Sequence[float]) -> float:
    """(Σx)² / (n Σx²)."""
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def figures(outcome: ReplayOutcome) -> Figures:
    by_tenant: dict[str, list[tuple[int, int]]] = {}
    for s in outcome.served:
        by_tenant.setdefault(s.tenant, []).append((s.wait_us, s.ended_at - s.began_at))
    means = {name: sum(w for w, _ in found) // len(found) for name, found in by_tenant.items()}
    worst = min(means, key=lambda name: (-means[name], name))
    shares: list[float] = []
    for name in sorted(by_tenant):
        work = sum(r for _, r in by_tenant[name])
        shares.append(work / (work + sum(w for w, _ in by_tenant[name])))
    span = outcome.ended_at - min(s.arrived_at for s in outcome.served)
    return Figures(
        scheme=outcome.scheme.name,
        says=outcome.scheme.says,
        gpus=outcome.gpus,
        requests=len(outcome.served),
        tenants=len(by_tenant),
        wait=waits_of([s.wait_us for s in outcome.served]),
        turn=waits_of([s.began_at - s.alone_at for s in outcome.served]),
        worst_tenant=worst,
        worst_tenant_mean_us=means[worst],
        jain=jain(shares),
        held_us=outcome.held_us,
        worked_us=outcome.worked_us,
        restored_us=outcome.restored_us,
        lost_us=outcome.lost_us,
        lost_runs=sum(s.lost_runs for s in outcome.served),
        grants=outcome.grants,
        ends=outcome.ends,
        utilisation=outcome.worked_us / (outcome.gpus * span),
        used_of_held=outcome.worked_us / outcome.held_us,
        ended_at=outcome.ended_at,
    )


def seconds(us: int) -> str:
    """Seconds as a table shows them: '28.6', '19,183'."""
    value = us / SECOND_US
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
