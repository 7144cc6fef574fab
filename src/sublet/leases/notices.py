"""What users call: `sublet.notices()`, for programs that only want to be warned.

Rules of this file:
- It reads the arguments and opens a bus (`notice_bus.bus`).
- `sublet.train` and `sublet run` open their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from sublet.core.errors import BadInput
from sublet.core.notice import DEFAULT_GRACE
from sublet.core.values import parse_duration
from sublet.notice_bus.bus import NoticeBus
from sublet.ports.notices import NoticeSource
from sublet.settings import Settings, load_settings, variable
from sublet.wiring import CLOCK, open_notice_bus


def notices(
    *,
    grace: str | int | float | None = None,
    sources: Iterable[NoticeSource] | None = None,
    settings: Settings | None = None,
) -> NoticeBus:
    """Every warning that this process's GPU is about to go, as one Notice.

        with sublet.notices() as warned:
            for batch in batches:
                train(batch)
                if warned.notice is not None:
                    break

    It hears SIGTERM, SIGINT, SIGUSR1 and whoever SUBLET_NOTICES names: clouds, schedulers, time limits.
    `grace` is how long a signal leaves (SUBLET_GRACE_SECONDS, else `DEFAULT_GRACE`). `sources` are heard in
    place of those of the settings.
    """
    grace_us = parse_duration(grace if grace is not None else given_grace(), what="grace")
    if sources is not None:
        return NoticeBus(CLOCK, sources, grace_us=grace_us)
    return open_notice_bus(settings or load_settings(), grace_us=grace_us)


def given_grace() -> str | float:
    """The grace this process was started with, else the default."""
    said = variable("GRACE_SECONDS")
    try:
        return float(said) if said else DEFAULT_GRACE
    except ValueError:
        raise BadInput(f"SUBLET_GRACE_SECONDS={said!r} is not a number of seconds") from None
