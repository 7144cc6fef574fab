"""The parts of a training run, how far it has come and what it logged, shared by its loop and its saves."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sublet.core.progress.cadence import Losses
from sublet.core.progress.effect import MOST_TEXT
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


class LoggedValues:
    """The last value under each name. A tensor is read only when somebody looks, so that logging does not
    wait for the device; its graph is released."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._values[name] = value.detach() if getattr(value, "requires_grad", False) else value

    def numbers(self) -> dict[str, float]:
        """The values that can be shown as numbers."""
        return {
            name: number for name, value in self._values.items() if (number := _number(value)) is not None
        }

    def stored(self) -> dict[str, float | str]:
        """As many values as an outcome has room for: too much logged must not keep steps from being
        committed."""
        stored: dict[str, float | str] = {}
        room = MOST_TEXT - 1024
        for name, value in self.numbers().items():
            room -= len(json.dumps(name)) + 32
            if room < 0:
                break
            stored[name] = value if math.isfinite(value) else str(value)
        return stored


def _number(value: Any) -> float | None:
    if hasattr(value, "item"):
        with contextlib.suppress(Exception):
            value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
