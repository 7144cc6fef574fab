"""The doorbell: a hint that something changed. The truth is in the ledger."""

from __future__ import annotations

from typing import Protocol


class Bell(Protocol):
    """One listener, waited on by one thread. Wake-ups may be spurious or lost, so every user also polls."""

    def listen(self, topic: str) -> None:
        """Start hearing a topic; the functions below name them."""

    def unlisten(self, topic: str) -> None:
        """Stop hearing it."""

    def wait(self, timeout_us: int) -> bool:
        """Block until something rings or the time is over; True when it rang."""

    def close(self) -> None:
        """Safe to call twice."""


# --- topics: what a bell is rung for ------------------------------------------------------------------

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
    """For the host's session host: a session there wants something else than before."""
    return f"sessions:{host}"
