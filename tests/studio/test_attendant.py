"""Sessions in the hands of a real attendant, with a real warden and real workers."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading

import pytest

from sublet.core.lease import EndReason, LeaseState
from sublet.core.session import SessionStatus
from sublet.studio.attendant import finding
from tests.runtime.conftest import process_is_gone, wait_until
from tests.studio.conftest import GIB, SECOND, Attended


def test_a_session_becomes_active_and_ends(attended: Attended) -> None:
    opened = attended.open()
    found = attended.becomes("active", opened)
    assert found.lease is not None
    assert found.lease.holder.pid
    assert found.session.leases == 1
    supervisor = found.lease.holder.pid
    attended.ledger.end_session(opened, "ann", detail="its user ended it", actor="ann")
    assert attended.status(opened) is SessionStatus.ENDED
    wait_until(lambda: attended.ledger.look(found.lease.id).lease.settled_at)
    assert attended.ledger.look(found.lease.id).lease.reason is EndReason.RELEASED
    assert process_is_gone(supervisor)


def test_who_waits_starts_when_the_first_is_revoked(attended: Attended) -> None:
    first = attended.open(vram=12 * GIB)
    had = attended.becomes("active", first).lease
    second = attended.open("bea", vram=12 * GIB)
    attended.becomes("waiting", second, "bea")
    assert had is not None
    attended.ledger.revoke(had.id, reason=EndReason.REVOKED, detail="maintenance", grace_us=0, actor="op")
    attended.becomes("active", second, "bea")
    lost = attended.becomes("suspended", first)
    assert lost.lease is not None
    assert lost.lease.reason is EndReason.REVOKED
    attended.ledger.resume_session(first, "ann")
    again = attended.becomes("waiting", first)
    assert again.session.leases == 2
    attended.ledger.end_session(second, "bea", detail="done", actor="bea")
    attended.becomes("active", first)


def test_a_session_nobody_uses_is_suspended_and_its_touches_keep_it(attended: Attended) -> None:
    idle = attended.open(vram=GIB, ttl_us=2 * SECOND)
    used = attended.open("bea", vram=GIB, ttl_us=2 * SECOND)
    attended.becomes("active", idle)
    attended.becomes("active", used, "bea")

    def touched() -> bool:
        attended.ledger.touch_sessions([(used, "bea")])
        return attended.status(idle) is SessionStatus.SUSPENDED

    wait_until(touched)
    assert attended.status(used, "bea") is SessionStatus.ACTIVE


def test_a_refused_session_says_why(attended: Attended) -> None:
    never = attended.open(vram=64 * GIB)
    found = attended.becomes("ended", never)
    assert found.session.detail.startswith("never_fits: ")
    full = attended.open(vram=16 * GIB)
    attended.becomes("active", full)
    now = attended.open("bea", vram=16 * GIB, wait_us=0)
    assert attended.becomes("ended", now, "bea").session.detail.partition(":")[0] == "no_capacity"


def test_an_offer_is_held_until_it_is_answered(attended: Attended) -> None:
    attended.becomes("active", attended.open(vram=10 * GIB))
    asked = attended.open("bea", vram=12 * GIB, offers=True)
    offered = attended.becomes("offered", asked, "bea")
    assert offered.lease is not None
    size = offered.lease.slices[0].vram_bytes
    assert 0 < size <= 6 * GIB
    attended.ledger.answer_offer(asked, "bea", accept=True)
    taken = attended.becomes("active", asked, "bea")
    assert taken.lease is not None
    assert taken.lease.vram_bytes == size
    other = attended.open("cem", vram=12 * GIB, offers=True)
    wait_until(lambda: attended.status(other, "cem").value in ("waiting", "offered"))


def test_a_declined_offer_keeps_the_place(attended: Attended) -> None:
    first = attended.open(vram=10 * GIB)
    attended.becomes("active", first)
    asked = attended.open("bea", vram=12 * GIB, offers=True)
    attended.becomes("offered", asked, "bea")
    attended.ledger.answer_offer(asked, "bea", accept=False)
    attended.becomes("waiting", asked, "bea")
    attended.ledger.end_session(first, "ann", detail="done", actor="ann")
    taken = attended.becomes("active", asked, "bea")
    assert taken.lease is not None
    assert taken.lease.vram_bytes == 12 * GIB


def test_a_session_that_ends_while_it_waits_leaves_the_waitlist(attended: Attended) -> None:
    attended.becomes("active", attended.open(vram=16 * GIB))
    waiter = attended.open("bea", vram=16 * GIB)
    lease = attended.becomes("waiting", waiter, "bea").lease
    assert lease is not None
    attended.ledger.end_session(waiter, "bea", detail="changed her mind", actor="bea")
    wait_until(lambda: attended.ledger.look(lease.id).lease.state is LeaseState.ENDED)
    wait_until(lambda: process_is_gone(lease.holder.pid))


def test_with_the_attendant_its_workers_go_and_its_waiters_wait_again(attended: Attended) -> None:
    """K3: what the rows say is what lives, and orphans are gone within a sweep."""
    active = attended.open(vram=12 * GIB)
    held = attended.becomes("active", active).lease
    waiter = attended.open("bea", vram=12 * GIB)
    attended.becomes("waiting", waiter, "bea")
    assert held is not None
    attended.kill_attendant()
    wait_until(lambda: process_is_gone(held.holder.pid))
    finding.ensure_attendant(attended.settings)
    lost = attended.becomes("suspended", active)
    assert lost.lease is not None
    assert lost.lease.reason is EndReason.HOLDER_LOST

    def lives() -> bool:
        """The slice may have gone to the request of the dead before anybody saw that: that one is given up after the time to claim it,
        and whoever asks in that moment is served first."""
        found = attended.becomes("active", waiter, "bea").lease
        return found is not None and not process_is_gone(found.holder.pid)

    wait_until(lives)
    attended.ledger.resume_session(active, "ann")
    attended.becomes("waiting", active)


@pytest.mark.parametrize("waited_for", [True, False], ids=["gone", "a zombie"])
def test_a_lock_that_outlived_its_attendant_is_waited_for(attended_here: Attended, waited_for: bool) -> None:
    """K3: killed while it started a process, it leaves its lock with that one for a moment. Another is started when that is over."""
    settings = attended_here.settings
    dead = attended_here.kill_attendant()
    fd = os.open(finding.lock_path(settings), os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert os.pread(fd, 100, 0).split() == [str(dead).encode(), b"ready"]
    if not waited_for:
        ended = subprocess.Popen(["true"])
        wait_until(lambda: process_is_gone(ended.pid))
        os.pwrite(fd, f"{ended.pid} ready\n".encode(), 0)
    assert not finding.attendant_alive(settings)
    later = threading.Timer(0.5, os.close, (fd,))
    later.start()
    finding.ensure_attendant(settings)
    assert not later.is_alive()
    assert finding.attendant_pid(settings) not in (0, dead)
    assert finding.attendant_alive(settings)


def test_there_is_one_attendant_and_sigterm_ends_it(attended_here: Attended) -> None:
    pid = finding.attendant_pid(attended_here.settings)
    finding.ensure_attendant(attended_here.settings)
    assert finding.attendant_pid(attended_here.settings) == pid
    assert finding.attendant_alive(attended_here.settings)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: process_is_gone(pid))
    assert not finding.attendant_alive(attended_here.settings)
