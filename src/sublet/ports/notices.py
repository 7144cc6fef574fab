"""Where warnings come from: a cloud, a scheduler, a limit. It is small, so that anybody can add one by entry
point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sublet.core.notice import Notice
from sublet.ports.clock import Clock


class NoticeSource(Protocol):
    """One source of Notices, made from `Surroundings` by the callable that its entry point names."""

    @property
    def name(self) -> str:
        """Its entry point's name, as SUBLET_NOTICES calls it."""

    @property
    def risk(self) -> str:
        """Why a loss is likelier than usual, or ''. Only a hint: it has no deadline, and nothing ends for
        it."""

    def here(self) -> bool:
        """Whether it applies to this process. Asked once, before training; must answer within a second, from
        files and the environment where it can."""

    def watch(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        """Run until `stop`, in a thread of its own. Raise the notice when it comes, and again when its
        deadline moves nearer. Survives every network error, retrying at bounded intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a source may know of its process."""

    clock: Clock
    environment: Mapping[str, str]
    grace_us: int  # the time a drain is given: limits known from the start are announced so long before
    started_us: int  # when this process began, on the clock's monotonic
    hostname: str
    time_limit_us: int = 0  # of this process; 0 is none


#: What an entry point of the group `sublet.notices` names.
OpenSource = Callable[[Surroundings], NoticeSource]
