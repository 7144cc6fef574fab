"""Processes of this host, as the warden sees them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from sublet.core.leasing.lease import Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Proof of teardown: what ended, how, how long it took."""

    proven: bool
    ladder: str  # 'gone', 'term', 'kill', or 'unproven'
    containment: str
    pids: tuple[int, ...] = ()
    freed_bytes: int = 0  # device memory the lease held when its teardown began
    scrubbed_bytes: int = 0
    duration_us: int = 0
    detail: str = ""


class Processes(Protocol):
    def identify(self, pid: int) -> Holder | None:
        """Called by a process that is about to hold a lease, for its own pid or one it was given."""

    def watch(self, holder: Holder) -> int | None:
        """A descriptor that becomes readable when the process ends; None when it is already gone."""

    def trees(self, holders: Iterable[Holder]) -> dict[Holder, tuple[Holder, ...]]:
        """Each of them that lives, with everything below it, itself first."""

    def sweep(self) -> list[int]:
        """Called by a warden when it starts and now and then: end what outlived its supervisor, and return
        the pids."""

    def end(self, holder: Holder, term_wait_us: int, also: Iterable[Holder] = ()) -> Receipt:
        """Called by the warden at a deadline: TERM, then KILL, for the process, all below it, and `also`; and
        wait."""

    def forget(self, holder: Holder) -> None:
        """Called when the Receipt is in the ledger, to drop what was kept about the holder."""
