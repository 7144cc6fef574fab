"""Reading the journal as a history and asking whether the lease rules held in it (L1-L5).

Rules of this file:
- It knows nothing of how decisions were made; it only replays what was recorded and checks each row against the rules.
- Entries come in stored order. Rows of one lease are in the order they happened, and so are the rows of the main strand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sublet.core.device import Exclusivity, may_join
from sublet.core.journal import Entry, Fault

Residents = dict[str, dict[str, tuple[int, str, str]]]


@dataclass(slots=True)
class _Told:
    """What the journal has told of one lease so far."""

    epoch: int = 0
    ttl_us: int = 0
    expires_at: int = 0
    deadline_at: int = 0
    exclusivity: str = ""
    ended: bool = False


@dataclass(slots=True)
class _Replay:
    capacities: Mapping[str, int]
    pruned: bool = False  # what came before is not here: of some leases only the rest is told
    last_epoch: int = 0
    leases: dict[str, _Told] = field(default_factory=dict)
    residents: Residents = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def blame(self, entry: Entry, rule: str, what: str) -> None:
        self.faults.append(Fault(entry.strand, entry.seq, f"{rule}: {entry.subject}: {what}"))

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
    replay = _Replay(capacities, pruned)
    for entry in entries:
        step = _STEPS.get(entry.kind)
        if step is not None:
            step(replay, entry, json.loads(entry.body))
    return replay.faults


Body = dict[str, object]


def _int(body: Body, name: str) -> int:
    value = body.get(name, 0)
    return value if isinstance(value, int) else 0


def _granted(replay: _Replay, entry: Entry, body: Body) -> None:
    epoch = _int(body, "epoch")
    if epoch <= replay.last_epoch:
        replay.blame(entry, "L1", f"epoch {epoch} granted after epoch {replay.last_epoch}")
    replay.last_epoch = max(replay.last_epoch, epoch)
    if entry.subject in replay.leases:
        replay.blame(entry, "L3", "granted twice")
    replay.leases[entry.subject] = _Told(
        epoch=epoch,
        ttl_us=_int(body, "ttl_us"),
        expires_at=_int(body, "expires_at"),
        exclusivity=str(body.get("exclusivity", "")),
    )
    replay.clear(entry.subject)  # an accepted offer held them before
    replay.place(entry, str(body.get("slices", "")), str(body.get("exclusivity", "")))


def _offered(replay: _Replay, entry: Entry, body: Body) -> None:
    # What kind of company an offer keeps is told when it is granted; here only its bytes count.
    for part in filter(None, str(body.get("slices", "")).split(";")):
        device, _, size = part.rpartition("=")
        here = replay.residents.setdefault(device, {})
        here[entry.subject] = (int(size), Exclusivity.SHARED.value, entry.tenant)
        if sum(r[0] for r in here.values()) > replay.capacities.get(device, 1 << 62):
            replay.blame(entry, "L2", f"{device} is overcommitted by an offer")


def _withdrawn(replay: _Replay, entry: Entry, body: Body) -> None:
    replay.clear(entry.subject)


def _renewed(replay: _Replay, entry: Entry, body: Body) -> None:
    told = replay.leases.get(entry.subject)
    if told is None:
        return None if replay.pruned else replay.blame(entry, "L3", "renewed before it was granted")
    expires_at = _int(body, "expires_at")
    if told.ended:
        replay.blame(entry, "L3", "renewed after it ended")
    if told.deadline_at:
        replay.blame(entry, "L3", "renewed while it was being revoked")
    if _int(body, "epoch") != told.epoch:
        replay.blame(entry, "L3", f"renewed by epoch {_int(body, 'epoch')}, its epoch is {told.epoch}")
    if entry.at >= told.expires_at:
        replay.blame(entry, "L3", f"renewed {entry.at - told.expires_at} us after it expired")
    if expires_at > max(entry.at + told.ttl_us, told.expires_at):
        replay.blame(entry, "L4", "extended by more than its ttl")
    if expires_at < told.expires_at:
        replay.blame(entry, "L4", "its expiry moved backwards")
    told.expires_at = expires_at
    return None


def _revoked(replay: _Replay, entry: Entry, body: Body) -> None:
    told = replay.leases.get(entry.subject)
    if told is None and replay.pruned:
        return None
    if told is None or told.ended:
        return replay.blame(entry, "L3", "revoked while it was not held")
    told.deadline_at = _int(body, "deadline_at")
    return None


def _ended(replay: _Replay, entry: Entry, body: Body) -> None:
    told = replay.leases.get(entry.subject)
    reason = str(body.get("reason", ""))
    if told is not None:
        if told.ended:
            replay.blame(entry, "L3", "ended twice")
        told.ended = True
        if reason == "expired" and entry.at < told.expires_at:
            replay.blame(entry, "L5", f"expired {told.expires_at - entry.at} us early")
        if reason in ("preempted", "hold_cap", "idle") and not told.deadline_at:
            replay.blame(entry, "L5", f"ended as {reason} without a notice")
    if body.get("settled"):
        replay.clear(entry.subject)


def _settled(replay: _Replay, entry: Entry, body: Body) -> None:
    told = replay.leases.get(entry.subject)
    if told is not None and not told.ended:
        replay.blame(entry, "L5", "its slices went back before it ended")
    replay.clear(entry.subject)


def _seat_settled(replay: _Replay, entry: Entry, body: Body) -> None:
    told = replay.leases.get(entry.subject)
    if told is not None and not told.ended:
        replay.blame(entry, "L5", "the slices of a seat went back before the gang ended")
    for part in filter(None, str(body.get("slices", "")).split(";")):
        replay.residents.get(part.rpartition("=")[0], {}).pop(entry.subject, None)


# --- blocks --------------------------------------------------------------------------------------------------


def _block_granted(replay: _Replay, entry: Entry, body: Body) -> None:
    epoch = _int(body, "epoch")
    if epoch <= replay.last_epoch:
        replay.blame(entry, "L1", f"epoch {epoch} granted after epoch {replay.last_epoch}")
    replay.last_epoch = max(replay.last_epoch, epoch)
    told = replay.leases.get(entry.subject)
    if told is not None and not told.ended:
        replay.blame(entry, "L2", f"attached while epoch {told.epoch} held it")
    replay.leases[entry.subject] = _Told(
        epoch=epoch, ttl_us=_int(body, "ttl_us"), expires_at=_int(body, "expires_at")
    )


def _block_checkpointed(replay: _Replay, entry: Entry, body: Body) -> None:
    told = replay.leases.get(entry.subject)
    if told is None and replay.pruned:
        return
    if told is None or told.ended or told.epoch != _int(body, "epoch") or entry.at >= told.expires_at:
        replay.blame(entry, "S2", f"checkpointed by epoch {_int(body, 'epoch')}, which did not hold it")


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
