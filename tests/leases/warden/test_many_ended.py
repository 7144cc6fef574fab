"""Many leases of one device ended at once: each is proven, and the machine is not read once for each of them."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.leasing.lease import Holder
from sublet.core.scheduling.device import Device, Slice
from sublet.devices.host import HostDriver, memory_name
from sublet.leases.warden.teardown import DeviceMemory, Teardown
from sublet.ports.processes import Receipt
from sublet.processes.ladder import HostProcesses

LEASES = int(os.environ.get("SUBLET_ENDED_AT_ONCE", "150"))
#: More than the usual coming and going on a device, so that one of them left behind would show. Never touched: it costs no memory.
EACH_BYTES = 32 << 20


@pytest.fixture
def device() -> Device:
    name = f"crowd-{os.getpid()}"
    return Device(
        id=name, host="here", driver="host", ordinal=0, name="", capacity_bytes=1 << 40, free_bytes=0
    )


@pytest.fixture
def holders(device: Device) -> Iterator[list[Holder]]:
    """Each with memory of the device that only it holds."""
    processes = HostProcesses("here")
    children = []
    try:
        for _ in range(LEASES):
            memory = os.memfd_create(memory_name(device.id), 0)
            os.ftruncate(memory, EACH_BYTES)
            children.append(subprocess.Popen(["sleep", "600"], pass_fds=[memory]))
            os.close(memory)
        found = [processes.identify(child.pid) for child in children]
        assert None not in found
        yield [holder for holder in found if holder is not None]
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


class Reads:
    """How often all of /proc was gone through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._lock = threading.Lock()
        known = os.listdir

        def listdir(path: str | Path = ".") -> list[str]:
            if str(path) == "/proc":
                with self._lock:
                    self.count += 1
            return known(path)

        monkeypatch.setattr(os, "listdir", listdir)


def ended_at_once(holders: list[Holder], device: Device, memory: DeviceMemory) -> list[Receipt]:
    """As a warden does it: a thread for each, which asks for the processes of the others before and after."""
    processes = HostProcesses("here")
    teardown = Teardown(processes, memory, lambda device, size: 0)
    receipts: dict[int, Receipt] = {}
    together = threading.Barrier(len(holders))

    def end(number: int) -> None:
        def others() -> frozenset[int]:
            trees = processes.trees(h for i, h in enumerate(holders) if i != number)
            return frozenset(process.pid for tree in trees.values() for process in tree)

        together.wait()
        receipts[number] = teardown.run(
            holders[number],
            [Slice(device.id, EACH_BYTES)],
            {device.id: device},
            others,
            frozenset,
            term_wait_us=10_000_000,
        )

    threads = [threading.Thread(target=end, args=(number,)) for number in range(len(holders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [receipts[number] for number in range(len(holders))]


@pytest.mark.timeout(300)
def test_every_one_is_proven_and_the_machine_is_read_a_few_times(
    holders: list[Holder], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K1: a clean teardown is called clean, however many there are; a device is withheld only when something is left on it."""
    memory = DeviceMemory({"host": HostDriver()})
    memory.note_baseline(device, frozenset(h.pid for h in holders))
    reads = Reads(monkeypatch)
    before = resource.getrusage(resource.RUSAGE_SELF)
    receipts = ended_at_once(holders, device, memory)
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{LEASES} ended at once: /proc read {reads.count} times, {spent_s:.1f} s of CPU")
    assert [r.detail for r in receipts if not r.proven] == []
    assert reads.count < LEASES // 2


@pytest.mark.timeout(300)
def test_what_one_of_many_leaves_is_seen(holders: list[Holder], device: Device) -> None:
    """K1: sharing a look hides nothing: memory that stays is in every look that began after the kill of who held it."""
    some = holders[:20]
    memory = DeviceMemory({"host": HostDriver()})
    memory.note_baseline(device, frozenset(h.pid for h in holders))
    kept = os.open(f"/proc/{some[0].pid}/fd/{_memory_of(some[0], device)}", os.O_RDONLY)  # as a leak would
    try:
        receipts = ended_at_once(some, device, _Besides(memory, frozenset(h.pid for h in holders[20:])))
    finally:
        os.close(kept)
    # The others may have been looked at while it lived: then it was a living lease's.
    assert not receipts[0].proven
    assert "still in use" in receipts[0].detail


def _memory_of(holder: Holder, device: Device) -> str:
    return next(
        fd
        for fd in os.listdir(f"/proc/{holder.pid}/fd")
        if memory_name(device.id) in os.readlink(f"/proc/{holder.pid}/fd/{fd}")
    )


class _Besides(DeviceMemory):
    """Beside leases that are not being ended."""

    def __init__(self, memory: DeviceMemory, theirs: frozenset[int]) -> None:
        self._drivers, self._baseline, self._theirs = memory._drivers, memory._baseline, theirs

    def used(self, device: Device, besides: frozenset[int], *, patience_s: float = 60.0) -> int | None:
        return super().used(device, besides | self._theirs, patience_s=60.0)
