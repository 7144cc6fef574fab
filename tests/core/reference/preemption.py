"""How victims were chosen before: every device of the pool is looked at, for every waiter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sublet.core.leasing.lease import LeaseRecord
from sublet.core.leasing.policy import Policy
from sublet.core.scheduling.device import Device
from sublet.core.scheduling.preemption import Claim, Victim, room_on, work_at_risk


def choose(
    waiter: LeaseRecord, devices: Iterable[Device], leases: Sequence[LeaseRecord], policy: Policy, now: int
) -> tuple[list[Victim], list[str]] | None:
    """Victims that make room for the waiter, and the devices the room is on; None when nothing may be taken."""
    known = list(devices)
    hosts = sorted({d.host for d in known})
    shape = waiter.request.shape()
    if shape.of_any_one_host and len(hosts) > 1:
        ways = []
        for host in hosts:
            there = replace(waiter, request=replace(waiter.request, host=host))
            if (way := _options(there, known, leases, policy, now)) is not None:
                ways.append(([cost for cost, _, _ in reversed(way)], way))
        return _picked(min(ways, key=lambda w: w[0])[1]) if ways else None
    found = _options(waiter, known, leases, policy, now)
    return _picked(found) if found is not None else None


_Option = tuple[tuple[int, int, int, int, int, str], list[Victim], str]


def _options(
    waiter: LeaseRecord, devices: Iterable[Device], leases: Sequence[LeaseRecord], policy: Policy, now: int
) -> list[_Option] | None:
    on_device: dict[str, list[LeaseRecord]] = {}
    for lease in leases:
        for s in lease.slices:
            on_device.setdefault(s.device_id, []).append(lease)
    options: list[_Option] = []
    for device in devices:
        victims = room_on(device, on_device.get(device.id, []), waiter, policy, now)
        if victims is None:
            continue
        worst = max((v.claim for v in victims), default=Claim.LEAVING)
        risk = sum(work_at_risk(v.lease, policy, now) for v in victims if v.claim is Claim.LOWER_TIER)
        lower = [v.lease.request.tier.rank for v in victims if v.claim is Claim.LOWER_TIER]
        # Between devices as on one: who has been idle longest is the least likely to come back soon.
        idle_us = min((now - v.lease.active_at for v in victims if v.claim is Claim.IDLE), default=0)
        cost = (worst, -min(lower, default=0), risk, len(victims), -idle_us, device.id)
        options.append((cost, victims, device.id))
    options.sort(key=lambda option: option[0])
    picked = options[: waiter.request.count]
    return picked if len(picked) == waiter.request.count else None


def _picked(picked: list[_Option]) -> tuple[list[Victim], list[str]]:
    chosen = {v.lease.id: v for _, found, _ in picked for v in found}
    return sorted(chosen.values(), key=lambda v: v.cost), [device_id for _, _, device_id in picked]
