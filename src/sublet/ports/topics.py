"""What a bell can be rung for: the words the ledger rings with and the runtime listens to."""

from __future__ import annotations

SCHEDULE_TOPIC = "schedule"  # somebody waits, or something may be taken: wardens run the schedule
JOURNAL_TOPIC = "journal"  # something was decided: whoever shows the journal as it grows looks again


def lease_topic(lease_id: str) -> str:
    """For the lease's holder or waiter: it was granted, offered, revoked or ended."""
    return f"lease:{lease_id}"


def host_topic(host: str) -> str:
    """For the host's warden: a lease there began or changed."""
    return f"host:{host}"


def queue_topic(queue: int) -> str:
    """For whoever waits for items of this queue: there may be one."""
    return f"queue:{queue}"


def session_topic(host: str) -> str:
    """For the host's attendant: a session there wants something else than before."""
    return f"sessions:{host}"
