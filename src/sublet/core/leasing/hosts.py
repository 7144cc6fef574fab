"""Hosts that fall silent: what is lost with one, which devices another may take over, and when its leases are
given up.

Rules of this file:
- A silent warden may be dead, or only cut off while its holders work on. Nobody else can see which, so
  nothing of its host is ever called clean from outside.
- Three steps, each later than the one before. Its devices are granted to nobody. A device with nothing left
  on it may go to another host: a cloud gives the same GPU to the next machine, under another name. A lease
  that is not settled after long goes back unproven, and its device is withheld until its own warden is back
  and shows that nothing is left, or an operator clears it.
- The host that asks counts as heard: no host is silent to itself.
- A time in which no host was heard counts against none: the ledger was away, or was put back from a backup.
  Each then has its full time again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sublet.core.leasing.lease import LeaseRecord, LeaseState
from sublet.core.leasing.policy import Policy
from sublet.core.scheduling.device import Device, DeviceState
from sublet.core.values import SECOND_US, format_duration

#: More than two beats of a warden, whatever the policy says: what is only slow is not taken for lost.
LEAST_SILENCE_US = 12 * SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    name: str
    seen_at: int  # the ledger's clock when its warden last spoke


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoss:
    """Its ready devices are lost until its warden reports them again."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The device is another host's from now on."""

    state: DeviceState
    note: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStays:
    reason: str
    remedy: str


def silent(host: Host | None, for_us: int, now: int) -> bool:
    """`host` is None when no warden of that name was ever heard, or the host was given back."""
    return host is None or host.seen_at < now - for_us


def silence_limit_us(policy: Policy) -> int:
    return max(policy.host_silence_us, LEAST_SILENCE_US)


def common_silence_us(hosts: Iterable[Host], policy: Policy, now: int) -> int:
    """How long no host was heard, if that is longer than the pause between two beats; else 0."""
    newest = max((host.seen_at for host in hosts), default=now)
    return now - newest if newest < now - silence_limit_us(policy) else 0


def losses(hosts: Iterable[Host], asking: str, policy: Policy, now: int) -> list[HostLoss]:
    """Hosts whose devices are granted to nobody any more. Their leases run out by themselves."""
    return [
        HostLoss(host=host.name, reason="its warden is silent")
        for host in sorted(hosts, key=lambda h: h.name)
        if host.name != asking and silent(host, policy.host_silence_us, now)
    ]


def may_move(device: Device, owner: Host | None, policy: Policy, now: int) -> Moves | HostStays:
    """Decide when another host than its owner reports the device. What was withheld stays withheld."""
    unheard = silent(owner, policy.host_silence_us, now)
    if not unheard and device.state not in (DeviceState.LOST, DeviceState.TAKEN):
        return HostStays(
            reason=f"device {device.id} already belongs to host {device.host}, whose warden is running",
            remedy="give each machine its own SUBLET_HOST, and each device one",
        )
    how = "is silent" if unheard else "does not report it any more"
    if device.leases:
        return HostStays(
            reason=f"device {device.id} was on host {device.host}, which {how}, with {device.leases} "
            "lease(s) not settled yet",
            remedy="start the warden of that host again, or wait: they end at their deadlines, and a host "
            "silent for the policy's "
            "host_gone is given up",
        )
    gone = device.state in (DeviceState.LOST, DeviceState.TAKEN)
    state = DeviceState.READY if gone else device.state
    return Moves(
        state=state,
        note="" if state is DeviceState.READY else device.note,
        reason=f"host {device.host} {how}, and nothing of it is left on the device",
    )


def gone(hosts: Iterable[Host], asking: str, policy: Policy, now: int) -> list[Host]:
    """Hosts that are given up: a machine that does not come back settles nothing, and its leases would count
    against their tenants for ever."""
    return [
        host
        for host in sorted(hosts, key=lambda h: h.name)
        if host.name != asking and silent(host, policy.host_gone_us, now)
    ]


def given_up(lease: LeaseRecord, host: Host, policy: Policy, now: int) -> str:
    """Why a lease on a host that is given up goes back unproven; '' when it is not time. One that was revoked
    while its holder could not hear of it is left alone until it would have expired: so long the holder works
    by its own clock (L6)."""
    over = lease.state is LeaseState.ENDED and not lease.settled_at and lease.expires_at < now
    if not over or not silent(host, policy.host_gone_us, now):
        return ""
    return (
        f"host {host.name} has been silent for {format_duration(policy.host_gone_us)}: "
        "nobody can see whether its processes are gone"
    )


def reassess_withheld(
    device: Device, host: str, withheld_for: str, others: Sequence[str]
) -> tuple[DeviceState, str] | None:
    """The state and note of a device that was withheld because nobody could see what a lease had left there,
    after its own warden has looked: ready, or withheld for one of `others`, which are yet to be looked at.
    None when something else withholds it (an operator, or a teardown that was seen to fail), or when it is
    another host's by now."""
    if device.state is not DeviceState.QUARANTINED or device.host != host:
        return None
    if device.note != withheld_for:
        return None
    return (DeviceState.QUARANTINED, others[0]) if others else (DeviceState.READY, "")
