"""The doorbell: a hint that something changed. Never the truth; the ledger is."""

from __future__ import annotations

from typing import Protocol


class Bell(Protocol):
    """One listener, waited on by one thread. Wake-ups may be spurious or lost, so every user also polls."""

    def listen(self, topic: str) -> None:
        """Start hearing a topic: `lease:ID` for its holder or waiter, `host:NAME` and `schedule` for a warden."""

    def unlisten(self, topic: str) -> None:
        """Stop hearing it."""

    def wait(self, timeout_us: int) -> bool:
        """Block until something rings or the time is over; True when it rang."""

    def close(self) -> None:
        """Let go of it. Safe to call twice."""
