"""The parts of a training run and how far it has come, shared by its loop and its saves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sublet.core.progress.cadence import Losses
from sublet.leases.progress_line import ProgressLine
from sublet.notice_bus.bus import NoticeBus
from sublet.ports.clock import Clock
from sublet.ports.ledger import LeaseKey, Ledger
from sublet.ports.store import Checkpoints
from sublet.training.ranks import Ranks


class RunLease(Protocol):
    """What a run needs of a lease, its own or the one it was started under."""

    @property
    def id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def key(self) -> LeaseKey: ...
    @property
    def seconds_left(self) -> float: ...
    def check(self) -> None: ...
    def working(self) -> contextlib.AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a run. Ranks other than 0 have no lease: rank 0 commits for all."""

    ledger: Ledger
    store: Checkpoints
    clock: Clock
    notice_bus: NoticeBus
    ranks: Ranks
    line: ProgressLine
    lease: RunLease | None
    losses: Losses = field(default_factory=Losses)
    report: Callable[..., None] = lambda working_on, committed, unfinished=False: None
    report_away: Callable[[str], None] = lambda reason: None  # why saves wait, or '' again
    release: Callable[[], None] = lambda: None  # the store and the lease, where they are the run's own


@dataclass(slots=True)
class RunPosition:
    step: int = 0  # the last one whose body came to its end
    committed: int = 0  # the last one that is safe
    version: int = 0
    committed_at: int | None = None
    useful_us: int = 0  # spent in steps that are committed
