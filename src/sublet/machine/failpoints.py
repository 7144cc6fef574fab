"""Named places where a test may make the program die, pause, raise or lose its connection.

Rules of this file:
- `failpoint(name)` costs one global read when nothing is armed. Each of `NAMES` stands once in the
  source, and arming an unknown one is an error.
- `SUBLET_FAILPOINTS="name=action[@n][,…]"` arms a child process; action is kill, pause, raise or drop, n is
  the n-th hit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

NAMES = frozenset(
    [
        "before_acquire_commit",
        "after_acquire_commit",
        "before_begin",
        "after_lock",
        "after_fence_check",
        "after_cas",
        "after_effect",
        "before_commit",
        "after_commit_before_reply",
        "after_items_published",
        "after_items_done",
        "before_renew",
        "after_renew_reply",
        "reaper_after_read",
        "reaper_before_write",
        "teardown_after_kill",
        "teardown_before_scrub",
        "after_chunk_write",
        "after_chunk_fsync",
        "after_publish",
        "between_replicas",
        "before_manifest",
        "after_quorum",
        "after_slot_write",
        "after_slot_fsync",
        "before_region_link",
        "after_region_link",
        "adopt_before_head",
        "sweep_after_mark",
        "sweep_before_delete",
        "sweep_between_deletes",
    ]
)


class FailpointHit(RuntimeError):
    """Raised by an armed failpoint: a bug in the middle of a verb."""


class ConnectionDropped(ConnectionError):
    """Raised by an armed failpoint: the engine's connection is gone."""


_armed: dict[str, tuple[Callable[[], None], int]] = {}
_hits: dict[str, int] = {}


def failpoint(name: str) -> None:
    if not _armed:
        return
    found = _armed.get(name)
    if found is None:
        return
    action, nth = found
    _hits[name] = _hits.get(name, 0) + 1
    if nth in (0, _hits[name]):
        action()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise FailpointHit("armed failpoint")


def _drop() -> None:
    raise ConnectionDropped("armed failpoint")


def _pause() -> None:
    time.sleep(float(os.environ.get("SUBLET_FAILPOINT_PAUSE", "1")))


_ACTIONS: dict[str, Callable[[], None]] = {"kill": _kill, "raise": _raise, "drop": _drop, "pause": _pause}


def arm(name: str, action: str | Callable[[], None], *, nth: int = 0) -> None:
    if name not in NAMES:
        raise ValueError(f"unknown failpoint {name}")
    _armed[name] = (_ACTIONS[action] if isinstance(action, str) else action, nth)
    _hits.pop(name, None)


def disarm() -> None:
    _armed.clear()
    _hits.clear()


def arm_from_environment() -> None:
    for part in filter(None, os.environ.get("SUBLET_FAILPOINTS", "").split(",")):
        name, _, action = part.partition("=")
        action, _, nth = action.partition("@")
        arm(name, action, nth=int(nth or 0))


arm_from_environment()
