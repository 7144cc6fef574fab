"""One runner at a time: a job is reserved under the lease of whoever trains it, before anything of it is
restored (S2)."""

from __future__ import annotations

from sublet.core.errors import EffectBusy, NotFound
from sublet.core.leasing.lease import fence
from sublet.core.notice import Notice
from sublet.core.values import SECOND_US, format_duration
from sublet.training.run_parts import Parts, RunLease

#: How long to wait for the end of a predecessor on this host. A warden sees the death of a process in
#: milliseconds.
PREDECESSOR_US = 5 * SECOND_US
RUNNER = "one runner at a time"


def become_the_runner(job: str, lease: RunLease, parts: Parts) -> Notice | None:
    """Reserve the job for this lease. Returns a warning instead if one came while the predecessor was waited
    for; then nothing was begun."""
    effect = f"train {job}"  # no job's name has a space in it, and so no step's key or effect's
    notice = _see_it_free(effect, lease, parts)
    if notice is not None:
        return notice
    try:
        parts.ledger.reserve(lease.key, effect=effect, job=job, fingerprint=RUNNER)
    except EffectBusy as busy:
        raise EffectBusy(
            f"job {job} is being trained by another process ({busy.message}); nothing was started here",
            remedy="wait for it, end it with 'sublet revoke', or train under another name",
        ) from busy
    return None


def _see_it_free(effect: str, lease: RunLease, parts: Parts) -> Notice | None:
    """A predecessor that was just killed is believed alive until somebody has seen its end: its host's warden
    in a moment, or the end of its ttl when that host is gone too. Wait for it. One that renews meanwhile is
    alive."""
    ledger, clock = parts.ledger, parts.clock
    until, first = clock.monotonic_us() + PREDECESSOR_US, None
    while True:
        found = ledger.effect(effect)
        if found is None or found.owner == lease.id:
            return None
        try:
            owner = ledger.look(found.owner)
        except NotFound:
            return None
        if fence(owner.lease, found.epoch, owner.at):
            return None
        if first is None:
            first = owner.lease
            if first.holder.host != ledger.look(lease.id).lease.holder.host:
                left = first.ends_at - owner.at
                until = clock.monotonic_us() + left + SECOND_US
                parts.line.say(
                    f"waits for lease {first.id} of its predecessor on {first.holder.host} to end, within "
                    f"{format_duration(left)}"
                )
        if owner.lease.expires_at > first.expires_at or clock.monotonic_us() >= until:
            return None
        notice = parts.notice_bus.wait(0.02)
        if notice is not None:
            return notice
