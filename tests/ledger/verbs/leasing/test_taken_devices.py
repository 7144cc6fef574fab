"""Devices that another ledger of the machine grants: known, shown with who has them, and granted to nobody here."""

from __future__ import annotations

import pytest

from sublet.core.errors import DeviceTaken
from sublet.core.leasing.lease import LeaseState
from sublet.core.scheduling.device import Device, DeviceState
from sublet.ports.ledger import FoundDevice
from tests.ledger.rig import HERE, Rig

WORDS = "gpu0 is granted by another ledger of this machine: user ben"
GPU = FoundDevice(id="gpu0", driver="host", ordinal=0, name="", capacity_bytes=80)
SMALL = FoundDevice(id="gpu1", driver="host", ordinal=1, name="", capacity_bytes=10)


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.tenant("ada")
    return rig


def only(pool: Rig, name: str = "gpu0") -> Device:
    return next(d for d in pool.ledger.devices() if d.id == name)


@pytest.mark.parametrize("wait_us", [0, None])
def test_a_taken_device_is_refused_with_who_has_it_and_not_waited_for(pool: Rig, wait_us: int | None) -> None:
    """I3: whether it was ever ours before or not."""
    for before in ([], [GPU]):
        pool.ledger.report_host(HERE, before)
        pool.ledger.report_host(HERE, [GPU, SMALL], taken={"gpu0": WORDS})
        assert (only(pool).state, only(pool).note) == (DeviceState.TAKEN, WORDS)
        with pytest.raises(DeviceTaken, match="user ben") as refused:
            pool.ask(80, wait_us=wait_us)
        assert "SUBLET_LEDGER" in refused.value.remedy
    answer = pool.ask(10)
    assert answer.lease.slices[0].device_id == "gpu1"
    assert not pool.faults()


def test_it_is_granted_when_it_is_ours_again(pool: Rig) -> None:
    pool.ledger.report_host(HERE, [GPU], taken={"gpu0": WORDS})
    pool.ledger.report_host(HERE, [GPU])
    assert (only(pool).state, only(pool).note) == (DeviceState.READY, "")
    assert pool.ask(80).lease.state is LeaseState.ACTIVE


def test_what_it_said_is_written_once_and_goes_with_the_device(pool: Rig) -> None:
    pool.ledger.report_host(HERE, [GPU], taken={"gpu0": WORDS})
    rows = len(pool.kinds(HERE))
    pool.ledger.report_host(HERE, [GPU], taken={"gpu0": WORDS})
    assert len(pool.kinds(HERE)) == rows > 0
    pool.ledger.report_host(HERE, [])
    assert only(pool).state is DeviceState.LOST
    pool.ledger.report_host("node-b", [GPU])
    assert (only(pool).host, only(pool).state) == ("node-b", DeviceState.READY)


def test_an_operator_cannot_clear_it_and_what_they_withheld_stays_so(pool: Rig) -> None:
    """I3: nobody here can know that the other ledger has let it go, except its lock."""
    pool.ledger.report_host(HERE, [GPU], taken={"gpu0": WORDS})
    with pytest.raises(DeviceTaken, match="user ben"):
        pool.ledger.set_device("gpu0", state="ready", note="", actor="root")
    pool.ledger.set_device("gpu0", state="quarantined", note="it smells", actor="root")
    for taken in ({"gpu0": WORDS}, {}):
        pool.ledger.report_host(HERE, [GPU], taken=taken)
        assert (only(pool).state, only(pool).note) == (DeviceState.QUARANTINED, "it smells")
