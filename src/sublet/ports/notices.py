"""Where warnings come from: a cloud, a scheduler, a limit. One small port, so that anybody can add one by entry point."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sublet.core.notice import Notice
from sublet.ports.clock import Clock


class NoticeSource(Protocol):
    """One source of Notices. Made by the callable its entry point names, from `Surroundings`."""

    @property
    def name(self) -> str:
        """Its entry point's: what SUBLET_NOTICES calls it."""

    @property
    def risk(self) -> str:
        """Why a loss is likelier than usual, in words; '' when it is not. Only a hint: it has no deadline, and nothing ends for it."""

    def here(self) -> bool:
        """Has it anything to say to this process? Asked once, before training; must answer within a second, from files and
        the environment where it can."""

    def watch(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        """Run until `stop`, in a thread of its own. Raise the notice when it comes, and again when its deadline comes nearer.
        Survives every network error, trying again at bounded intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a source may know of the process it speaks to."""

    clock: Clock
    environment: Mapping[str, str]
    grace_us: int  # the time a drain is given: limits known from the start are announced so long before
    started_us: int  # when this process began, on the clock's monotonic
    hostname: str
    time_limit_us: int = 0  # of this process; 0 is none


#: What an entry point of the group `sublet.notices` names.
OpenSource = Callable[[Surroundings], NoticeSource]
