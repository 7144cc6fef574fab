"""Reading the journal as a history and asking whether the lease rules held in it (L1-L5).

Rules of this file:
- It knows nothing of how decisions were made; it checks each recorded row against the rules.
- Entries come in stored order: rows of one lease, and rows of the main strand, are in the order they
  happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sublet.core.journal.chain import Entry, Fault, fields_of
from sublet.core.journal.replay import ReplayedLease
from sublet.core.scheduling.device import Exclusivity, may_join

Body = dict[str, object]
#: By device and lease: bytes, exclusivity, tenant.
Residents = dict[str, dict[str, tuple[int, str, str]]]


@dataclass(slots=True)
class _LeaseAudit:
    capacities: Mapping[str, int]
    pruned: bool = False  # the journal begins in the middle, and so may what it tells of a lease
    last_epoch: int = 0
    leases: dict[str, ReplayedLease] = field(default_factory=dict)
    residents: Residents = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def blame(self, entry: Entry, rule: str, what: str) -> None:
        self.faults.append(Fault(entry.strand, entry.seq, f"{rule}: {entry.subject}: {what}"))

    def grant(self, entry: Entry, body: Body) -> None:
        epoch = _int(body, "epoch")
        if epoch <= self.last_epoch:
            self.blame(entry, "L1", f"epoch {epoch} granted after epoch {self.last_epoch}")
        self.last_epoch = max(self.last_epoch, epoch)
        self.leases[entry.subject] = ReplayedLease(
            epoch=epoch, ttl_us=_int(body, "ttl_us"), expires_at=_int(body, "expires_at")
        )

    def place(self, entry: Entry, slices: str, exclusivity: str) -> None:
        for part in filter(None, slices.split(";")):
            device, _, size = part.rpartition("=")
            here = self.residents.setdefault(device, {})
            for other, (_, held, tenant) in here.items():
                joined = may_join(
                    _known(exclusivity), _known(held), same_tenant=tenant == entry.tenant
                ) or may_join(_known(held), _known(exclusivity), same_tenant=tenant == entry.tenant)
                if not joined:
                    self.blame(entry, "L2", f"{exclusivity} granted beside {held} of {other} on {device}")
            here[entry.subject] = (int(size), exclusivity, entry.tenant)
            used = sum(r[0] for r in here.values())
            if used > self.capacities.get(device, used):
                self.blame(entry, "L2", f"{device} is overcommitted: {used} of {self.capacities[device]}")

    def clear(self, lease_id: str) -> None:
        for here in self.residents.values():
            here.pop(lease_id, None)


def _known(exclusivity: str) -> Exclusivity | None:
    return next((e for e in Exclusivity if e.value == exclusivity), None)


def audit(entries: Iterable[Entry], capacities: Mapping[str, int], *, pruned: bool = False) -> list[Fault]:
    found = _LeaseAudit(capacities, pruned)
    for entry in entries:
        step = _STEPS.get(entry.kind)
        if step is not None:
            step(found, entry, fields_of(entry) or {})
    return found.faults


def _int(body: Body, name: str) -> int:
    value = body.get(name, 0)
    return value if isinstance(value, int) else 0


def _granted(audit: _LeaseAudit, entry: Entry, body: Body) -> None:
    if entry.subject in audit.leases:
        audit.blame(entry, "L3", "granted twice")
    audit.grant(entry, body)
    audit.clear(entry.subject)  # an accepted offer held them before
    audit.place(entry, str(body.get("slices", "")), str(body.get("exclusivity", "")))


def _offered(audit: _LeaseAudit, entry: Entry, body: Body) -> None:
    # The exclusivity of an offer is recorded when it is granted; here only its bytes count.
    for part in filter(None, str(body.get("slices", "")).split(";")):
        device, _, size = part.rpartition("=")
        here = audit.residents.setdefault(device, {})
        here[entry.subject] = (int(size), Exclusivity.SHARED.value, entry.tenant)
        if sum(r[0] for r in here.values()) > audit.capacities.get(device, 1 << 62):
            audit.blame(entry, "L2", f"{device} is overcommitted by an offer")


def _withdrawn(audit: _LeaseAudit, entry: Entry, body: Body) -> None:
    audit.clear(entry.subject)


def _renewed(audit: _LeaseAudit, entry: Entry, body: Body) -> None:
    told = audit.leases.get(entry.subject)
    if told is None:
        return None if audit.pruned else audit.blame(entry, "L3", "renewed before it was granted")
    expires_at = _int(body, "expires_at")
    for why in told.renewal_refusals(entry.at, _int(body, "epoch")):
        audit.blame(entry, "L3", why)
    if expires_at > max(entry.at + told.ttl_us, told.expires_at):
        audit.blame(entry, "L4", "extended by more than its ttl")
    if expires_at < told.expires_at:
        audit.blame(entry, "L4", "its expiry moved backwards")
    told.expires_at = expires_at
    return None


def _revoked(audit: _LeaseAudit, entry: Entry, body: Body) -> None:
    told = audit.leases.get(entry.subject)
    if told is None and audit.pruned:
        return None
    if told is None or told.ended:
        return audit.blame(entry, "L3", "revoked while it was not held")
    told.state, told.deadline_at = "revoking", _int(body, "deadline_at")
    return None


def _ended(audit: _LeaseAudit, entry: Entry, body: Body) -> None:
    told = audit.leases.get(entry.subject)
    reason = str(body.get("reason", ""))
    if told is not None:
        if told.ended:
            audit.blame(entry, "L3", "ended twice")
        told.state = "ended"
        if reason == "expired" and entry.at < told.expires_at:
            audit.blame(entry, "L5", f"expired {told.expires_at - entry.at} us early")
        if reason in ("preempted", "hold_cap", "idle") and not told.deadline_at:
            audit.blame(entry, "L5", f"ended as {reason} without a notice")
    if body.get("settled"):
        audit.clear(entry.subject)


def _settled(audit: _LeaseAudit, entry: Entry, body: Body) -> None:
    told = audit.leases.get(entry.subject)
    if told is not None and not told.ended:
        audit.blame(entry, "L5", "its slices went back before it ended")
    audit.clear(entry.subject)


def _seat_settled(audit: _LeaseAudit, entry: Entry, body: Body) -> None:
    told = audit.leases.get(entry.subject)
    if told is not None and not told.ended:
        audit.blame(entry, "L5", "the slices of a seat went back before the gang ended")
    for part in filter(None, str(body.get("slices", "")).split(";")):
        audit.residents.get(part.rpartition("=")[0], {}).pop(entry.subject, None)


# --- blocks -------------------------------------------------------------------------------------------------


def _block_granted(audit: _LeaseAudit, entry: Entry, body: Body) -> None:
    told = audit.leases.get(entry.subject)
    if told is not None and not told.ended:
        audit.blame(entry, "L2", f"attached while epoch {told.epoch} held it")
    audit.grant(entry, body)


def _block_checkpointed(audit: _LeaseAudit, entry: Entry, body: Body) -> None:
    told = audit.leases.get(entry.subject)
    if told is None and audit.pruned:
        return
    if told is None or told.ended or told.epoch != _int(body, "epoch") or entry.at >= told.expires_at:
        audit.blame(entry, "S2", f"checkpointed by epoch {_int(body, 'epoch')}, which did not hold it")


_STEPS = {
    "block.granted": _block_granted,
    "block.attached": _block_granted,
    "block.renewed": _renewed,
    "block.checkpointed": _block_checkpointed,
    "block.ended": _ended,
    "lease.granted": _granted,
    "lease.offered": _offered,
    "lease.offer_withdrawn": _withdrawn,
    "lease.renewed": _renewed,
    "lease.revoked": _revoked,
    "lease.ended": _ended,
    "lease.settled": _settled,
    "seat.settled": _seat_settled,
}
