"""Where leased workers run, when that is not this machine.

Rules of this port:
- A placement carries: it starts a worker on a host and takes calls there. Who holds what is the ledger's alone, and a worker dies by its own
  supervisor, at its own deadline.
- What an engine says of a node's death is a reason to stop waiting, never a proof. Only the warden of that host can prove it.
"""

from __future__ import annotations

from typing import Protocol

from sublet.ports.worker import Worker


class Placement(Protocol):
    def ready(self) -> None:
        """Called before a lease is asked for: every node that is up has its warden, and its devices are in the ledger."""

    def hosts(self) -> frozenset[str]:
        """The hosts, by their names in the ledger, on which a worker can be started now."""

    def start(self, host: str) -> Worker:
        """Called after the grant, with the host of its devices. Raises `NotPlaced` when the host is not there any more."""

    def declared(self, host: str) -> str:
        """What SUBLET_DEVICES says there."""

    def address(self, host: str) -> str:
        """How the other hosts reach it: where the members of a gang meet."""
