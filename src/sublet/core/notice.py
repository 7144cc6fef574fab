"""A Notice: any warning that a GPU is about to go.

Rules of this file:
- The nearest deadline wins; its reason is the one the user reads. A repeated warning changes nothing.
- Deadlines are the holder's monotonic clock in microseconds, so they can be waited for directly.
"""

from __future__ import annotations

from dataclasses import dataclass

#: From a notice to the end, unless somebody says otherwise: what Kubernetes gives a pod on a reclaimed spot
#: node. It is the default of every `--grace` and of `Policy.grace_us`, which a ledger stores when it is made.
#: The page's dialog (`studio/page/acts.js`) repeats it, and a test compares.
DEFAULT_GRACE = "15s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    source: str  # lease, keeper, signal, cloud, wall_time, ...
    reason: str
    deadline_us: int

    def seconds_left(self, now_us: int) -> float:
        return max(0, self.deadline_us - now_us) / 1e6


def merge(first: Notice | None, second: Notice) -> Notice:
    if first is None or second.deadline_us < first.deadline_us:
        return second
    return first
