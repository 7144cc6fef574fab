"""Asking for a lease, and waiting for it.

Rules of this file:
- A waiter that is interrupted leaves the waitlist; one that dies is dropped by its warden or by its silence.
- A grant made while we waited is taken up by renewing it, so the local deadline is counted from a question
  this process really asked (L6).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

from sublet.core.errors import LeaseLost, Refused, SubletError, WaitTimedOut
from sublet.core.leasing.lease import EndReason, Holder, LeaseState, Request
from sublet.core.scheduling.admission import Wait
from sublet.leases.lease import Lease, Opener
from sublet.machine.failpoints import failpoint
from sublet.ports.bell import lease_topic
from sublet.ports.clock import Clock
from sublet.ports.ledger import Answer, LeaseKey, Ledger

ATTEND_EVERY_US = 1_000_000
EXPLAIN_EVERY_US = 5_000_000

OnWait = Callable[[Wait], None]
OnOffer = Callable[[Answer], bool]


def new_id() -> str:
    return "L" + secrets.token_hex(10)


def new_secret() -> str:
    return secrets.token_urlsafe(24)


def acquire(
    ledger: Ledger,
    clock: Clock,
    request: Request,
    holder: Holder,
    *,
    on_wait: OnWait | None = None,
    on_offer: OnOffer | None = None,
    still_wanted: Callable[[], None] = lambda: None,
    lease_id: str = "",
    opener: Opener | None = None,
) -> Lease:
    """`still_wanted` is called now and then while it waits, and raises when nobody wants the lease any more.
    `lease_id` is an id the caller has recorded already; without it a new one is made."""
    lease_id, secret = lease_id or new_id(), new_secret()
    failpoint("before_acquire_commit")
    sent_at = clock.monotonic_us()
    try:
        answer = ledger.acquire(lease_id, secret, request, holder)
    except (KeyboardInterrupt, SystemExit):  # the request may have arrived, and may even have been granted
        with contextlib.suppress(SubletError):
            ledger.release(lease_id, secret)
        raise
    failpoint("after_acquire_commit")
    try:
        if answer.lease.state is LeaseState.WAITING:
            answer, sent_at = _wait(ledger, clock, secret, answer, on_wait, on_offer, still_wanted)
        hosts = () if holder.pid else _hosts_of(ledger, answer)
    except BaseException:
        with contextlib.suppress(SubletError):
            ledger.release(lease_id, secret)
        raise
    return Lease(ledger, clock, secret, answer, sent_at, opener=opener, hosts=hosts)


def _hosts_of(ledger: Ledger, answer: Answer) -> tuple[str, ...]:
    """Return the hosts, by rank, of a lease that no process holds yet."""
    hosts = {device.id: device.host for device in ledger.devices()}
    return tuple(dict.fromkeys(hosts[part.device_id] for part in answer.lease.slices))


def _wait(
    ledger: Ledger,
    clock: Clock,
    secret: str,
    answer: Answer,
    on_wait: OnWait | None,
    on_offer: OnOffer | None,
    still_wanted: Callable[[], None],
) -> tuple[Answer, int]:
    lease_id = answer.lease.id
    bell = ledger.bell()
    explained_at = clock.monotonic_us()
    try:
        bell.listen(lease_topic(lease_id))
        if on_wait is not None and answer.wait is None:  # to compare an offer with
            answer = ledger.attend(lease_id, secret)
        while True:
            still_wanted()
            if on_wait is not None and answer.wait is not None:
                on_wait(answer.wait)
            lease = answer.lease
            if lease.state in (LeaseState.ACTIVE, LeaseState.REVOKING):
                sent_at = clock.monotonic_us()
                answer = ledger.renew(LeaseKey(lease_id, lease.epoch, secret))
                return answer, sent_at
            if lease.state is LeaseState.ENDED:
                raise _refusal(answer)
            if lease.slices and lease.offer_until > answer.at:
                sent_at = clock.monotonic_us()
                if on_offer is not None and on_offer(answer):
                    return ledger.accept(lease_id, secret), sent_at
                answer = ledger.decline(lease_id, secret)
                continue
            left = lease.wait_until - answer.at if lease.wait_until else ATTEND_EVERY_US
            bell.wait(max(1000, min(ATTEND_EVERY_US, left)))
            now = clock.monotonic_us()
            explain = on_wait is not None and now - explained_at >= EXPLAIN_EVERY_US
            if explain:
                explained_at = now
            answer = ledger.attend(lease_id, secret, explain=explain)
            overdue = answer.lease.wait_until and answer.at >= answer.lease.wait_until
            if overdue and answer.lease.state is LeaseState.WAITING:
                raise WaitTimedOut(f"no GPU became free in time: {answer.lease.detail}")
    finally:
        bell.close()


def _refusal(answer: Answer) -> SubletError:
    reason, detail = answer.lease.reason, answer.lease.detail
    if reason is EndReason.REFUSED:
        return WaitTimedOut(f"no GPU became free in time: {detail}")
    if reason in (EndReason.RELEASED, EndReason.REVOKED):
        return Refused(f"the request was withdrawn: {detail}")
    # We were silent for too long, or took the grant up too late: a caller that still wants it asks again.
    return LeaseLost(f"the request ended before it was served: {detail}")
