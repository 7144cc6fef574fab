"""Teardown with a device that cannot be asked: the processes die first of all, and the device is not called clean."""

from __future__ import annotations

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sublet.core.errors import DeviceFault
from sublet.core.scheduling.device import Device, Slice
from sublet.devices.host import HostDriver
from sublet.leases.warden.teardown import DeviceMemory, Teardown
from sublet.processes.ladder import HostProcesses

DEVICE = Device(id="d", host="here", driver="host", ordinal=0, name="d", capacity_bytes=100, free_bytes=100)


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


class Slow(HostDriver):
    """One question at a time, as on a crowded machine; after so many of them it hangs."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self._left, self._one = answers, threading.Lock()

    def used_bytes(self, device_id: str, ordinal: int, besides: frozenset[int] = frozenset()) -> int | None:
        with self._one:
            if not self._left:
                time.sleep(600)
            self._left -= 1
            time.sleep(0.3)
            return 7


@pytest.mark.timeout(60)
def test_a_device_is_waited_for_while_it_answers_others() -> None:
    """K1: a clean teardown is called clean on a slow machine; a device that falls silent is given up as soon as ever."""
    memory = DeviceMemory({"host": Slow(answers=8)}, silent_after_s=1.0)

    def ask(_: int) -> int | None:
        try:
            return memory.used(DEVICE, frozenset())
        except DeviceFault:
            return None

    with ThreadPoolExecutor(9) as together:
        found = list(together.map(ask, range(9)))
    assert sorted(found, key=str) == [7] * 8 + [None]
    begun = time.monotonic()
    with pytest.raises(DeviceFault, match="within 1 s"):
        memory.used(DEVICE, frozenset())
    assert time.monotonic() - begun < 20


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["is lost", "breaks", "hangs"])
def test_a_device_that_cannot_be_asked_holds_up_no_kill(how: str) -> None:
    """K1, K2: whatever measuring does, the holder is dead in time; what could not be measured is not proven."""
    processes = HostProcesses("here")
    with subprocess.Popen(["sleep", "60"]) as child:
        holder = processes.identify(child.pid)
        assert holder is not None
        teardown = Teardown(
            processes, DeviceMemory({"host": Deaf(how)}, silent_after_s=1.0), lambda device, size: 0
        )
        begun = time.monotonic()
        receipt = teardown.run(
            holder, [Slice("d", 10)], {"d": DEVICE}, frozenset, frozenset, term_wait_us=100_000
        )
        assert child.wait(timeout=0) != 0
    assert time.monotonic() - begun < 20
    assert (receipt.proven, receipt.ladder) == (False, "unproven")
    assert child.pid in receipt.pids
    assert receipt.detail.startswith("d: ")
