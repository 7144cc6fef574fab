"""Where leased workers and commands run, when that is not this machine.

Rules of this port:
- A placement starts a worker on a host and takes calls there. Who holds what is the ledger's alone,
  and a worker dies by its own supervisor, at its own deadline.
- What an engine says of a node's death is a reason to stop waiting, never a proof. Only the warden of that
  host can prove it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sublet.ports.worker import Command, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOrder:
    """A command, as whoever typed it means it; the host finds the folder, the program and the variables there
    where it has them."""

    command: tuple[str, ...]
    folder: str
    path: str  # where its program is looked for, before the host's own
    named: Mapping[str, str]  # variables given for this command
    grace_us: int


class Placement(Protocol):
    def ready(self) -> None:
        """Called before a lease is asked for: every node that is up has its warden, and its devices are in
        the ledger."""

    def hosts(self) -> frozenset[str]:
        """The hosts, by their names in the ledger, on which a worker can be started now."""

    def start(self, host: str, tenant: str = "") -> Worker:
        """Called after the grant, with the host of its devices. Raises `NotPlaced` when the host is not there
        any more. One of a studio's tenant is kept apart from the others' there, and sees nothing of whoever
        asked for it."""

    def start_command(self, host: str, order: CommandOrder) -> Command:
        """As `start`, for a command that runs there; its standard streams end here."""

    def declared(self, host: str) -> str:
        """What SUBLET_DEVICES says there."""

    def address(self, host: str) -> str:
        """How the other hosts reach it: where the members of a gang meet."""
