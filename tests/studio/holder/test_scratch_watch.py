"""The disk of a session host: one tenant's files stop that tenant, and nobody else."""

from __future__ import annotations

import os

import pytest

from sublet import wiring
from tests.homes import wait_until
from tests.studio.conftest import GIB, HostedSessions
from tests.studio.line import code

MANY = (
    "import os\nfor i in range(40):\n    with open(f'f{i}', 'wb') as f:\n        f.write(b'x' * (4 << 20))\n"
)
WAITS = "import time\ntime.sleep(600)\n"


@pytest.fixture
def small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_SCRATCH_LIMIT", "64MiB")


@pytest.fixture
def large_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_DISK_RESERVE", "900TB")


def test_who_fills_the_disk_is_stopped_in_words_and_the_neighbour_is_not(
    small_scratch: None, hosted_here: HostedSessions
) -> None:
    full, near = hosted_here.open(vram=GIB), hosted_here.open("bea", vram=GIB)
    hosted_here.becomes("active", full)
    hosted_here.becomes("active", near, "bea")
    settings = hosted_here.settings
    kept = "kept = open('mine', 'wb').write(b'x' * (8 << 20)); print('kept')"
    assert code(settings, near, kept, tenant="bea").all().text() == "kept\n"
    told = code(settings, full, MANY + WAITS).all().failed
    assert told["code"] == "worker_lost"
    assert "a session may have 64MiB" in str(told["message"])
    lost = hosted_here.becomes("suspended", full)
    assert lost.lease is not None
    assert "a session may have 64MiB" in lost.lease.detail
    assert code(settings, near, "print(kept)", tenant="bea").all().text() == f"{8 << 20}\n"
    scratch = settings.home / "scratch"
    wait_until(lambda: not [name for _, _, names in os.walk(scratch) for name in names if name[0] == "f"])
    hosted_here.ledger.resume_session(full, "ann")
    hosted_here.becomes("active", full)
    assert code(settings, full, "print('again')").all().text() == "again\n"


def test_one_file_ends_at_the_limit_and_the_session_lives(
    small_scratch: None, hosted_here: HostedSessions
) -> None:
    session = hosted_here.open(vram=GIB)
    hosted_here.becomes("active", session)
    text = (
        "import os\n"
        "try:\n"
        "    with open('one', 'wb') as f:\n"
        "        for _ in range(100): f.write(b'x' * (1 << 20))\n"
        "except OSError as e:\n"
        "    print(type(e).__name__, os.path.getsize('one') >> 20)\n"
        "os.unlink('one')\n"
    )
    assert code(hosted_here.settings, session, text).all().text() == "OSError 64\n"
    assert code(hosted_here.settings, session, "print('on')").all().text() == "on\n"


def test_with_the_reserve_touched_nothing_is_opened_and_its_user_is_told_why(
    large_reserve: None, hosted_here: HostedSessions
) -> None:
    refused = hosted_here.becomes("ended", hosted_here.open(vram=GIB))
    assert refused.session.detail.startswith("refused: the disk of this host has ")
    assert "kept for the ledger" in refused.session.detail


def test_the_reserve_counts_what_is_to_be_written(hosted_here: HostedSessions) -> None:
    settings = hosted_here.settings
    assert wiring.short_of_disk(settings) == ""
    assert "were to be written" in wiring.short_of_disk(settings, 1 << 60)
