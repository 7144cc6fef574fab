"""What a ledger means, said again as plainly as possible: lists, pairs, no sums, none of core's code.

The model does not know the order of the waitlist. It knows what each verb must do to its own lease, what may follow from it
by itself (a waiter granted, an overdue lease ended, a lower tier revoked), and refuses everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RANK = {"interactive": 0, "batch": 1, "spot": 2}


@dataclass
class Held:
    id: str
    tenant: str
    size: int
    kind: str  # shared, session, device
    tier: str
    count: int
    ttl: int
    state: str = "waiting"
    epoch: int = 0
    slices: list[tuple[str, int]] = field(default_factory=list)
    granted_at: int = 0
    expires_at: int = 0
    deadline_at: int = 0
    reason: str = ""
    settled: bool = False

    def overdue(self, now: int) -> bool:
        return (self.state == "active" and now >= self.expires_at) or (
            self.state == "revoking" and now >= self.deadline_at
        )


def get_along(a: Held, b: Held) -> bool:
    if "device" in (a.kind, b.kind):
        return False
    return a.tenant == b.tenant or (a.kind == "shared" and b.kind == "shared")


class Model:
    def __init__(self, devices: dict[str, int], max_leases: dict[str, int], min_run: int, claim: int) -> None:
        self.capacity = devices
        self.ready = dict.fromkeys(devices, True)
        self.max_leases = max_leases
        self.min_run, self.claim = min_run, claim
        self.leases: dict[str, Held] = {}
        self.top_epoch = 0
        self.steps: dict[str, list[str]] = {}  # job -> who committed each step
        self.job_epoch: dict[str, int] = {}

    def on(self, device: str) -> list[tuple[Held, int]]:
        return [(h, n) for h in self.leases.values() if not h.settled for d, n in h.slices if d == device]

    def room(self, new: Held, device: str) -> bool:
        here = self.on(device)
        free = self.capacity[device] - sum(n for _, n in here)
        return self.ready[device] and new.size <= free and all(get_along(new, h) for h, _ in here)

    def quota_left(self, tenant: str) -> bool:
        holding = [h for h in self.leases.values() if h.tenant == tenant and h.slices and not h.settled]
        return not self.max_leases[tenant] or len(holding) < self.max_leases[tenant]

    def fits(self, new: Held) -> bool:
        return sum(self.room(new, d) for d in self.capacity) >= new.count and self.quota_left(new.tenant)

    def waiting(self) -> list[Held]:
        return [h for h in self.leases.values() if h.state == "waiting"]

    def grant(self, h: Held, row: Held, at: int, *, claimed: bool) -> None:
        """The ledger says it granted: was it free to?"""
        assert h.state == "waiting", f"{h.id} was granted while {h.state}"
        assert row.epoch > self.top_epoch, f"L1: epoch {row.epoch} after {self.top_epoch}"
        assert self.quota_left(h.tenant), f"T2: {h.id} goes past its tenant's quota"
        assert len({d for d, _ in row.slices}) == len(row.slices) == h.count
        for device, size in row.slices:
            assert self.room(h, device), f"L2: {h.id} does not fit on {device}"
            assert size == (self.capacity[device] if h.kind == "device" else h.size)
        self.top_epoch = row.epoch
        h.state, h.epoch, h.slices, h.granted_at = "active", row.epoch, row.slices, at
        h.expires_at = at + (h.ttl if claimed else min(h.ttl, self.claim))

    def end(self, h: Held, reason: str, *, settled: bool) -> None:
        h.state, h.reason, h.settled = "ended", reason, settled or h.state == "waiting"

    def follow(self, rows: dict[str, Held], *, at: int, ticking: bool) -> None:
        """Accept what may happen by itself, in the order it happened, and nothing else."""
        assert rows.keys() == self.leases.keys()
        for lease_id, h in self.leases.items() if ticking else ():
            row = rows[lease_id]
            if h.overdue(at):
                self.end(h, h.reason if h.state == "revoking" else "expired", settled=False)
            elif h.state == "active" and row.state == "revoking":
                above = [w for w in self.waiting() if RANK[w.tier] < RANK[h.tier]]
                assert above, f"L5: {h.id} was revoked for nobody"
                assert at - h.granted_at >= self.min_run, f"L5: {h.id} was preempted too soon"
                h.state, h.reason, h.deadline_at = "revoking", "preempted", row.deadline_at
        granted = [h for h in self.waiting() if rows[h.id].state == "active"]
        for h in sorted(granted, key=lambda h: rows[h.id].epoch):
            self.grant(h, rows[h.id], rows[h.id].granted_at, claimed=False)
        for lease_id, h in self.leases.items():
            row = rows[lease_id]
            for name in ("state", "epoch", "slices", "expires_at", "deadline_at", "reason", "settled"):
                mine, theirs = getattr(h, name), getattr(row, name)
                assert mine == theirs, f"{lease_id}.{name}: the model has {mine!r}, the ledger {theirs!r}"
