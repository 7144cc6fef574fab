"""What a worker was asked to do, what it did, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sublet.core.runs.exits import Outcome
from sublet.core.values import SECOND_US, format_duration
from sublet.json_shapes import seconds

#: An idle GPU is given back after this time, or after as long as the model took to load if that is longer.
REST_US = 10 * SECOND_US


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPlan:
    """What was asked for."""

    target: str
    batch: int = 0  # 0: the target takes one item at a time, not a list
    visibility_us: int | None = None  # None: the queue's own
    until_empty: bool = False
    most: int = 0  # 0: no limit
    idle_us: int | None = None  # leave after this long without work; None: never
    rest_us: int = REST_US
    profile: str = "default"


@dataclass(slots=True)
class WorkTally:
    """What this worker did."""

    done: int = 0
    failed: int = 0
    dead: int = 0
    refused: int = 0  # results of items that another worker had by then
    given_back: int = 0
    leases: int = 0
    lost_leases: int = 0
    lost_workers: int = 0
    batches: int = 0
    work_us: int = 0

    @property
    def handled(self) -> int:
        return self.done + self.failed + self.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How a worker ended."""

    outcome: Outcome
    exit_code: int
    reason: str
    tally: WorkTally

    def to_json(self) -> dict[str, Any]:
        counts = {name: getattr(self.tally, name) for name in self.tally.__slots__ if name != "work_us"}
        return {
            "outcome": self.outcome.value,
            "exit_code": self.exit_code,
            "reason": self.reason,
            **counts,
            "work_seconds": seconds(self.tally.work_us),
        }

    def summary(self) -> str:
        """One sentence that says what was done."""
        tally = self.tally
        parts = [f"{tally.done:,} done"]
        for count, word in (
            (tally.failed, "failed"),
            (tally.dead, "of them dead"),
            (tally.refused, "refused: another worker had them"),
            (tally.given_back, "given back untouched"),
            (tally.lost_leases, "leases lost"),
            (tally.lost_workers, "workers lost"),
        ):
            if count:
                parts.append(f"{count:,} {word}")
        worked = format_duration(tally.work_us)
        return f"{', '.join(parts)}, in {worked} of work; {self.outcome.value}: {self.reason}"
