"""A lease that was promised less than its ttl: its holder goes by what was promised (L6). In virtual time, on a real ledger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.errors import LeaseLost
from sublet.core.scheduling.device import Exclusivity
from sublet.leases.keeper import Keeper
from sublet.leases.lease import Lease
from tests.ledger.rig import MINUTE, SECOND, Rig, sqlite_rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A tenant that has GPU time for twenty seconds."""
    rig = sqlite_rig(tmp_path)
    rig.device()
    rig.tenant("poor", gpu_us_per_day=MINUTE)
    set_left(rig, 20 * SECOND)
    yield rig
    rig.close()


def set_left(rig: Rig, us: int) -> None:
    rig.sql("UPDATE tenant SET left_us = ?, left_at = ? WHERE name = 'poor'", us, rig.ledger.now())


def take(rig: Rig) -> Lease:
    assert rig.clock is not None
    sent_at = rig.clock.monotonic_us()
    answer = rig.ask(80, tenant="poor", exclusivity=Exclusivity.DEVICE, ttl_us=10 * MINUTE)
    return Lease(rig.ledger, rig.clock, rig.secret(answer), answer, sent_at)


def test_the_holder_stops_at_four_fifths_of_what_was_promised(rig: Rig) -> None:
    lease = take(rig)
    rig.advance(16 * SECOND - 1)
    lease.check()
    rig.advance(1)
    with pytest.raises(LeaseLost):
        lease.check()


def test_the_keeper_renews_in_time_for_it(rig: Rig) -> None:
    """The time came back that another lease did not use: it would be lost at 20 s, with a first try at six minutes."""
    assert rig.clock is not None
    lease, keeper = take(rig), Keeper(rig.ledger, rig.clock)
    keeper._started = True  # no threads: this test decides when
    lease.__enter__()
    keeper.keep(lease)
    keeper._decide(rig.clock.monotonic_us())
    assert keeper._calls.empty()
    rig.advance(15 * SECOND)
    set_left(rig, 40 * SECOND)
    keeper._decide(rig.clock.monotonic_us())
    _, batch = next(call for call in iter(keeper._calls.get_nowait, None) if call[0] == "renew")
    assert [kept.lease for kept in batch] == [lease]
    keeper._renew(batch)
    assert keeper._kept[lease.id].tenure.ttl_us == 45 * SECOND
    rig.advance(36 * SECOND - 1)
    lease.check()
    rig.advance(1)
    with pytest.raises(LeaseLost):
        lease.check()
