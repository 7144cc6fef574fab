"""Sessions in the hands of a real session host, with a real warden and real workers."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import threading

import pytest

from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.studio.session import SessionStatus
from sublet.studio.holder import finding
from tests.homes import process_is_gone, wait_until
from tests.studio.conftest import GIB, SECOND, HostedSessions


def test_a_session_becomes_active_and_ends(hosted: HostedSessions) -> None:
    opened = hosted.open()
    found = hosted.becomes("active", opened)
    assert found.lease is not None
    assert found.lease.holder.pid
    assert found.session.leases == 1
    supervisor = found.lease.holder.pid
    hosted.ledger.end_session(opened, "ann", detail="its user ended it", actor="ann")
    assert hosted.status(opened) is SessionStatus.ENDED
    wait_until(lambda: hosted.ledger.look(found.lease.id).lease.settled_at)
    assert hosted.ledger.look(found.lease.id).lease.reason is EndReason.RELEASED
    assert process_is_gone(supervisor)


def test_who_waits_starts_when_the_first_is_revoked(hosted: HostedSessions) -> None:
    first = hosted.open(vram=12 * GIB)
    had = hosted.becomes("active", first).lease
    second = hosted.open("bea", vram=12 * GIB)
    hosted.becomes("waiting", second, "bea")
    assert had is not None
    hosted.ledger.revoke(had.id, reason=EndReason.REVOKED, detail="maintenance", grace_us=0, actor="op")
    hosted.becomes("active", second, "bea")
    lost = hosted.becomes("suspended", first)
    assert lost.lease is not None
    assert lost.lease.reason is EndReason.REVOKED
    hosted.ledger.resume_session(first, "ann")
    again = hosted.becomes("waiting", first)
    assert again.session.leases == 2
    hosted.ledger.end_session(second, "bea", detail="done", actor="bea")
    hosted.becomes("active", first)


def test_a_session_nobody_uses_is_suspended_and_its_touches_keep_it(hosted: HostedSessions) -> None:
    idle = hosted.open(vram=GIB, ttl_us=2 * SECOND)
    used = hosted.open("bea", vram=GIB, ttl_us=2 * SECOND)
    hosted.becomes("active", idle)
    hosted.becomes("active", used, "bea")

    def touched() -> bool:
        hosted.ledger.touch_sessions([(used, "bea")])
        return hosted.status(idle) is SessionStatus.SUSPENDED

    wait_until(touched)
    assert hosted.status(used, "bea") is SessionStatus.ACTIVE


def test_a_refused_session_says_why(hosted: HostedSessions) -> None:
    never = hosted.open(vram=64 * GIB)
    found = hosted.becomes("ended", never)
    assert found.session.detail.startswith("never_fits: ")
    full = hosted.open(vram=16 * GIB)
    hosted.becomes("active", full)
    now = hosted.open("bea", vram=16 * GIB, wait_us=0)
    assert hosted.becomes("ended", now, "bea").session.detail.partition(":")[0] == "no_capacity"


def test_an_offer_is_held_until_it_is_answered(hosted: HostedSessions) -> None:
    hosted.becomes("active", hosted.open(vram=10 * GIB))
    asked = hosted.open("bea", vram=12 * GIB, offers=True)
    offered = hosted.becomes("offered", asked, "bea")
    assert offered.lease is not None
    size = offered.lease.slices[0].vram_bytes
    assert 0 < size <= 6 * GIB
    hosted.ledger.answer_offer(asked, "bea", accept=True)
    taken = hosted.becomes("active", asked, "bea")
    assert taken.lease is not None
    assert taken.lease.vram_bytes == size
    other = hosted.open("cem", vram=12 * GIB, offers=True)
    wait_until(lambda: hosted.status(other, "cem").value in ("waiting", "offered"))


def test_a_declined_offer_keeps_the_place(hosted: HostedSessions) -> None:
    first = hosted.open(vram=10 * GIB)
    hosted.becomes("active", first)
    asked = hosted.open("bea", vram=12 * GIB, offers=True)
    hosted.becomes("offered", asked, "bea")
    hosted.ledger.answer_offer(asked, "bea", accept=False)
    hosted.becomes("waiting", asked, "bea")
    hosted.ledger.end_session(first, "ann", detail="done", actor="ann")
    taken = hosted.becomes("active", asked, "bea")
    assert taken.lease is not None
    assert taken.lease.vram_bytes == 12 * GIB


def test_a_session_that_ends_while_it_waits_leaves_the_waitlist(hosted: HostedSessions) -> None:
    hosted.becomes("active", hosted.open(vram=16 * GIB))
    waiter = hosted.open("bea", vram=16 * GIB)
    lease = hosted.becomes("waiting", waiter, "bea").lease
    assert lease is not None
    hosted.ledger.end_session(waiter, "bea", detail="changed her mind", actor="bea")
    wait_until(lambda: hosted.ledger.look(lease.id).lease.state is LeaseState.ENDED)
    wait_until(lambda: process_is_gone(lease.holder.pid))


def test_with_the_session_host_its_workers_go_and_its_waiters_wait_again(hosted: HostedSessions) -> None:
    """K3: what the rows say is what lives, and orphans are gone within a sweep."""
    active = hosted.open(vram=12 * GIB)
    held = hosted.becomes("active", active).lease
    waiter = hosted.open("bea", vram=12 * GIB)
    hosted.becomes("waiting", waiter, "bea")
    assert held is not None
    hosted.kill_session_host()
    wait_until(lambda: process_is_gone(held.holder.pid))
    finding.ensure_session_host(hosted.settings)
    lost = hosted.becomes("suspended", active)
    assert lost.lease is not None
    assert lost.lease.reason is EndReason.HOLDER_LOST

    def lives() -> bool:
        """The slice may have gone to the request of the dead before anybody saw that: that one is given up
        after the time to claim it, and whoever asks in that moment is served first."""
        found = hosted.becomes("active", waiter, "bea").lease
        return found is not None and not process_is_gone(found.holder.pid)

    wait_until(lives)
    hosted.ledger.resume_session(active, "ann")
    hosted.becomes("waiting", active)


@pytest.mark.parametrize("waited_for", [True, False], ids=["gone", "a zombie"])
def test_a_lock_that_outlived_its_session_host_is_waited_for(
    hosted_here: HostedSessions, waited_for: bool
) -> None:
    """K3: killed while it started a process, it leaves its lock with that one for a moment. Another is
    started when that is over."""
    settings = hosted_here.settings
    dead = hosted_here.kill_session_host()
    fd = os.open(finding.lock_path(settings), os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert os.pread(fd, 100, 0).split()[:2] == [str(dead).encode(), b"ready"]
    if not waited_for:
        ended = subprocess.Popen(["true"])
        wait_until(lambda: process_is_gone(ended.pid))
        os.pwrite(fd, f"{ended.pid} ready\n".encode(), 0)
    assert not finding.session_host_alive(settings)
    later = threading.Timer(0.5, os.close, (fd,))
    later.start()
    finding.ensure_session_host(settings)
    assert not later.is_alive()
    assert finding.session_host_pid(settings) not in (0, dead)
    assert finding.session_host_alive(settings)


def test_there_is_one_session_host_and_sigterm_ends_it(hosted_here: HostedSessions) -> None:
    pid = finding.session_host_pid(hosted_here.settings)
    finding.ensure_session_host(hosted_here.settings)
    assert finding.session_host_pid(hosted_here.settings) == pid
    assert finding.session_host_alive(hosted_here.settings)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: process_is_gone(pid))
    assert not finding.session_host_alive(hosted_here.settings)


def test_a_log_that_can_never_be_written_stops_nothing(hosted_here: HostedSessions) -> None:
    """On a full disk the session host died of its own log."""
    hosted_here.kill_session_host()
    log = hosted_here.settings.home / "session-host.log"
    log.unlink()
    log.symlink_to("/dev/full")
    finding.ensure_session_host(hosted_here.settings)
    session = hosted_here.open()
    hosted_here.becomes("active", session)
    assert finding.session_host_health(hosted_here.settings).problem == ""


def test_a_session_host_whose_home_was_deleted_ends(hosted_here: HostedSessions) -> None:
    pid = finding.session_host_pid(hosted_here.settings)
    shutil.rmtree(hosted_here.settings.home)
    wait_until(lambda: process_is_gone(pid))
