"""What the simulated worlds and the mutants found missing, each as a test of its own."""

from __future__ import annotations

from typing import Any

import pytest

from proof.deep.engine import MemoryEngine, NoBell
from sublet.core.errors import LeaseLost
from sublet.core.leasing.lease import Holder, LeaseState, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.scheduling.admission import Grant
from sublet.core.scheduling.device import Slice
from sublet.leases.acquire import acquire
from sublet.leases.lease import Lease
from sublet.leases.warden.warden import Warden, _Watched
from sublet.ledger.ledger import SqlLedger
from sublet.ledger.verbs.leasing.waitlist import apply_placement
from sublet.ports.ledger import FoundDevice
from sublet.testing.clock import VirtualClock

SECOND = 1_000_000
ME = Holder(host="here", pid=7, started=1)


def a_ledger(clock: VirtualClock) -> tuple[SqlLedger, MemoryEngine]:
    engine = MemoryEngine(clock, "0123456789abcdef")
    ledger = SqlLedger(engine)
    ledger.add_tenant(Tenant(name="ada"), actor="test")
    ledger.report_host(
        "here", [FoundDevice(id="gpu0", driver="host", ordinal=0, name="test", capacity_bytes=10)]
    )
    return ledger, engine


def a_request(**over: Any) -> Request:
    return Request(**{"tenant": "ada", "vram_bytes": 10, "ttl_us": 60 * SECOND, **over})


def test_one_backup_put_back_twice() -> None:
    """L1: the ledger between two restores of one backup grants epochs too, and none of them is granted again."""
    clock = VirtualClock()
    ledger, engine = a_ledger(clock)
    copy = engine.backup()
    seen = [ledger.acquire("before", "s", a_request(), ME).lease.epoch]
    for number in range(5):
        clock.advance(SECOND)
        engine.put_back(copy)
        ledger.mark_restored(actor="test")
        seen += [
            ledger.acquire(f"L{number}-{i}", "s", a_request(vram_bytes=1), ME).lease.epoch for i in range(3)
        ]
        copy = engine.backup() if number == 2 else copy
    assert seen == sorted(set(seen))


class _Releasing(NoBell):
    def __init__(self, release: Any) -> None:
        self._release = release

    def wait(self, timeout_us: int) -> bool:
        self._release()
        return True


def test_a_grant_that_was_waited_for_is_synced_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: somebody else's release grants it, and a release may be lost in a crash. What its new holder works under must not be."""
    clock = VirtualClock()
    ledger, engine = a_ledger(clock)
    ledger.acquire("first", "s", a_request(), ME)
    monkeypatch.setattr(engine, "bell", lambda: _Releasing(lambda: ledger.release("first", "s")))
    lease = acquire(ledger, clock, a_request(wait_us=None), ME)
    assert lease.status == "active"
    engine.crash(0)
    row = ledger.look(lease.id).lease
    assert (row.state, row.epoch) == (LeaseState.ACTIVE, lease.epoch)


def test_a_silent_ledger_does_not_hold_up_the_warden(monkeypatch: pytest.MonkeyPatch) -> None:
    """K2: at a deadline the ledger is asked once more, for a moment; without an answer the holder is ended by the warden's own clock."""
    clock = VirtualClock()
    ledger, _ = a_ledger(clock)
    lease = ledger.acquire("L1", "s", a_request(), ME).lease
    silent: Any = object()  # whatever is asked of it here would fail
    warden = Warden(silent, silent, clock, "here", list, silent, silent)
    ended: list[str] = []
    monkeypatch.setattr(warden, "_begin_ending", lambda watched: ended.append(watched.lease.id))
    watched = _Watched(lease, clock.monotonic_us() + 60 * SECOND)
    for seconds in (0, 59, 60):
        warden._enforce(watched, clock.monotonic_us() + seconds * SECOND)
        assert not ended
    warden._enforce(watched, clock.monotonic_us() + 61 * SECOND)
    assert ended == ["L1"]


def test_a_placement_decided_on_an_old_read_is_dropped() -> None:
    """L2: between deciding and writing the room may have gone to somebody else."""
    ledger, engine = a_ledger(VirtualClock())
    ledger.acquire("holder", "s", a_request(vram_bytes=6), ME)
    assert (
        ledger.acquire("waiter", "s", a_request(vram_bytes=8, wait_us=None), ME).lease.state
        is LeaseState.WAITING
    )
    stale = Grant(
        lease_id="waiter", slices=(Slice("gpu0", 8),), vram_bytes=8, reason="it fitted a moment ago"
    )
    assert engine.write(lambda tx: apply_placement(tx, stale), durable=True) is None
    assert ledger.look("waiter").lease.state is LeaseState.WAITING
    assert [d.free_bytes for d in ledger.devices()] == [4]


def test_unknown_is_not_held() -> None:
    """L7: with no word from the ledger the holder stops at 80 % of its ttl, by its own clock."""
    clock = VirtualClock()
    ledger, _ = a_ledger(clock)
    sent_at = clock.monotonic_us()
    lease = Lease(ledger, clock, "s", ledger.acquire("L1", "s", a_request(), ME), sent_at)
    clock.advance(48 * SECOND - 1)
    lease.check()
    clock.advance(1)
    with pytest.raises(LeaseLost):
        lease.check()
    assert lease.status == "ended"
