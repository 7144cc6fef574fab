"""Which replica is read first, how long it is waited for while others could be asked, and what a quorum costs
and survives.

Rules of this file:
- What the operator said comes before what was measured: a replica on this machine, then one in this machine's
  own domain.
- Among the others the one that would have the bytes here soonest; one that was never measured comes after all
  that were.
- A reader that can ask elsewhere does not wait long: a multiple of the usual time, and at least some seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sublet.core.values import SECOND_US

#: The least time a read is waited for while another replica could be asked.
LEAST_PATIENCE_US = 3 * SECOND_US
#: The most; a reader that can ask no other is as patient as the replica's own settings say.
MOST_PATIENCE_US = 30 * SECOND_US
_PATIENT = 8
#: Reads of fewer bytes tell how far away a replica is, larger ones how wide the way is.
SMALL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Measurements of one replica from this process."""

    latency_us: int | None = None
    bytes_per_second: int | None = None

    def after(self, size: int, took_us: int) -> Reach:
        """Average old and new evenly: one slow answer must not send every read elsewhere."""
        if size <= SMALL_BYTES or self.latency_us is None:
            latency = took_us if self.latency_us is None else (self.latency_us + took_us) // 2
            return replace(self, latency_us=latency)
        speed = size * SECOND_US // max(1, took_us - self.latency_us)
        if self.bytes_per_second is not None:
            speed = (self.bytes_per_second + speed) // 2
        return replace(self, bytes_per_second=max(1, speed))

    def estimate_us(self, size: int) -> int | None:
        if self.latency_us is None:
            return None
        way = size * SECOND_US // self.bytes_per_second if self.bytes_per_second else 0
        return self.latency_us + way


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A replica, as a reader sees it."""

    name: str
    near: bool  # on this machine
    domain: str
    reach: Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    name: str
    reason: str


def reading_order(replicas: Sequence[Known], *, here: str, size: int) -> list[Choice]:
    """The nearest first, each with the reason for its place. Equals stay in the order they are listed in."""
    ranked: list[tuple[int, int, Choice]] = []
    for replica in replicas:
        estimate = replica.reach.estimate_us(size)
        if replica.near:
            rank, reason = 0, "on this machine"
        elif here and replica.domain == here:
            rank, reason = 1, f"in this machine's domain, {here}"
        elif estimate is not None:
            rank, reason = 2, f"measured: {estimate / 1000:.3g} ms"
        else:
            rank, reason = 3, "not measured yet"
        way = estimate if rank == 2 and estimate is not None else 0
        ranked.append((rank, way, Choice(name=replica.name, reason=reason)))
    return [choice for _, _, choice in sorted(ranked, key=lambda r: r[:2])]


def hurried_us(reach: Reach, size: int) -> int:
    """How long a read that can ask another replica waits for this one."""
    usual = reach.estimate_us(size) or 0
    return min(MOST_PATIENCE_US, max(LEAST_PATIENCE_US, _PATIENT * usual))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumCost:
    """What a write quorum waits for, and which losses it survives."""

    waits_us: int  # for a small object: until the quorum has it
    slowest_us: int  # until the last one has it
    waits_for: tuple[str, ...]  # domains, the soonest first
    survives: int  # how many domains may be lost after a save returned
    reason: str


def quorum_cost(writes: Sequence[tuple[str, int]], quorum: int) -> QuorumCost | None:
    """From each replica's domain and the microseconds of a small write. None if there are too few domains."""
    soonest: dict[str, int] = {}
    for domain, took in writes:
        soonest[domain] = min(took, soonest.get(domain, took))
    order = sorted(soonest.items(), key=lambda d: (d[1], d[0]))
    if not 0 < quorum <= len(order):
        return None
    waits, slowest = order[quorum - 1][1], max(took for _, took in writes)
    domains = tuple(domain for domain, _ in order[:quorum])
    said = " and ".join(domains) if len(domains) < 3 else ", ".join(domains)
    lost = quorum - 1
    outlives = (
        "of one domain: if that is lost, so is what the others did not have yet"
        if lost == 0
        else f"of {quorum} domains: {lost} of them may be lost with nothing lost"
    )
    return QuorumCost(
        waits_us=waits,
        slowest_us=slowest,
        waits_for=domains,
        survives=lost,
        reason=(
            f"a save waits for {said}: {waits / 1000:.1f} ms for a small object; the slowest has it after "
            f"{slowest / 1000:.1f} ms, behind. It is then in the hands {outlives}"
        ),
    )
