"""`sublet.notices()`: what a script hears that only wants to be warned."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

import sublet


class Told:
    """A source that warns at once, of a loss in a minute."""

    name, risk = "told", ""

    def here(self) -> bool:
        return True

    def watch(self, raise_notice: Callable[[sublet.Notice], None], stop: threading.Event) -> None:
        raise_notice(sublet.Notice(source=self.name, reason="soon", deadline_us=10**18))
        stop.wait()


def test_a_signal_is_a_notice_with_its_grace() -> None:
    with sublet.notices(grace="40s", sources=()) as warned:
        assert (warned.notice, warned.seconds_left) == (None, None)
        os.kill(os.getpid(), signal.SIGUSR1)
        notice = warned.wait(30)
        assert notice is not None
        assert notice.source == "signal"
        assert warned.seconds_left is not None
        assert 0 < warned.seconds_left <= 40


def test_a_source_of_the_callers_own_is_heard() -> None:
    with sublet.notices(sources=[Told()]) as warned:
        notice = warned.wait(30)
    assert notice is not None
    assert (notice.source, notice.reason) == ("told", "soon")


def test_the_grace_is_the_one_this_process_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_GRACE_SECONDS", "600")
    with sublet.notices(sources=()) as warned:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert warned.wait(30) is not None
        assert warned.seconds_left is not None
        assert 15 < warned.seconds_left <= 600
    monkeypatch.setenv("SUBLET_GRACE_SECONDS", "soon")
    with pytest.raises(
        sublet.errors.BadInput, match="SUBLET_GRACE_SECONDS='soon' is not a number of seconds"
    ):
        sublet.notices()


def test_the_settings_say_who_may_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_NOTICES", "wall_time")
    monkeypatch.setenv("SUBLET_TIME_LIMIT", "1s")
    with sublet.notices() as warned:
        notice = warned.wait(30)
    assert notice is not None
    assert notice.source == "wall_time"
