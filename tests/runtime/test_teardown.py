"""Teardown with a device that cannot be asked: the processes die first of all, and the device is not called clean."""

from __future__ import annotations

import subprocess
import time

import pytest

from sublet.core.device import Device, Slice
from sublet.core.errors import DeviceFault
from sublet.drivers.host import HostDriver
from sublet.hosting.processes import HostProcesses
from sublet.runtime.teardown import DeviceMemory, Teardown


class Deaf(HostDriver):
    """A GPU that fell off the bus, or whose driver hangs in the kernel."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def used_bytes(self, device_id: str, ordinal: int, besides: frozenset[int] = frozenset()) -> int | None:
        if self._how == "hangs":
            time.sleep(600)
        if self._how == "breaks":
            raise RuntimeError("a bug in a plug-in")
        raise DeviceFault("the GPU is lost")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["is lost", "breaks", "hangs"])
def test_a_device_that_cannot_be_asked_holds_up_no_kill(how: str) -> None:
    """K1, K2: whatever measuring does, the holder is dead in time; what could not be measured is not proven."""
    processes = HostProcesses("here")
    device = Device(
        id="d", host="here", driver="host", ordinal=0, name="d", capacity_bytes=100, free_bytes=100
    )
    with subprocess.Popen(["sleep", "60"]) as child:
        holder = processes.identify(child.pid)
        assert holder is not None
        teardown = Teardown(processes, DeviceMemory({"host": Deaf(how)}), lambda device, size: 0)
        begun = time.monotonic()
        receipt = teardown.run(
            holder, [Slice("d", 10)], {"d": device}, frozenset, frozenset, term_wait_us=100_000
        )
        assert child.wait(timeout=0) != 0
    assert time.monotonic() - begun < 20
    assert (receipt.proven, receipt.ladder) == (False, "unproven")
    assert child.pid in receipt.pids
    assert receipt.detail.startswith("d: ")
