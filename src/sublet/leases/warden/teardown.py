"""Teardown: end a lease's processes, then prove its devices clean. What cannot be proven is not called clean.

Rules of this file:
- Order: end and confirm every process, wait until the device's memory is back, overwrite it where the next
  tenant could read it.
- "Back" is measured device-wide and compared with a baseline: a dead process is in no list, but what it left
  is in the sum. What living leases hold on the same device is theirs and does not count.
- A device that cannot be asked, or does not answer, holds up nobody's death: it is then simply not proven
  clean.
- The baseline is what is in use when nothing is leased: a desktop, a driver's own share. It is only ever
  lowered.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from sublet.core.errors import DeviceFault, SubletError
from sublet.core.leasing.lease import Holder
from sublet.core.scheduling.device import Device, Slice, left_behind
from sublet.core.values import format_size
from sublet.machine.failpoints import failpoint
from sublet.ports.device import Driver
from sublet.ports.processes import Processes, Receipt

#: A driver frees a killed process's memory within this, or something holds it.
BACK_WAIT_US = 2_000_000
#: How long a device may take to report its memory: while a process still lives, and when nothing waits for it
#: any more.
ASK_BEFORE_S, ASK_AFTER_S = 0.1, 30.0
#: The total limit while it answers others: a machine on which a thousand leases end at once is slow, not
#: wedged.
ASK_IN_ALL_S = 120.0

Scrub = Callable[[Device, int], int]


@dataclass(slots=True)
class _SliceMemory:
    device: Device
    slice_bytes: int
    held_bytes: int  # when the teardown began


class DeviceMemory:
    """What is in use on this host's devices, beside what was in use before anybody leased them."""

    def __init__(self, drivers: Mapping[str, Driver], *, silent_after_s: float = ASK_AFTER_S) -> None:
        self._drivers = drivers
        self._silent_after_s = silent_after_s
        self._baseline: dict[str, int] = {}
        self._answered_at: dict[str, float] = {}  # when a device last said anything, to whomever

    def used(self, device: Device, besides: frozenset[int], *, patience_s: float | None = None) -> int | None:
        """Bytes in use. None when only process death can tell; `DeviceFault` when the device fails or
        hangs."""
        hurried = patience_s is not None
        patience_s = self._silent_after_s if patience_s is None else patience_s
        driver = self._drivers.get(device.driver)
        if driver is None:
            return None
        answers: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(driver.used_bytes(device.id, device.ordinal, besides))
                self._answered_at[device.id] = time.monotonic()
            except Exception as e:
                answers.put(e)

        # In a thread of its own: a wedged driver hangs in the kernel, where nothing can be given up.
        threading.Thread(target=ask, name="sublet-measure", daemon=True).start()
        asked_at = waits_from = time.monotonic()
        while True:
            try:
                answer = answers.get(timeout=max(0.0, waits_from + patience_s - time.monotonic()))
                break
            except queue.Empty:
                heard = self._answered_at.get(device.id, 0.0)
                if hurried or heard <= waits_from or heard - asked_at > ASK_IN_ALL_S:
                    raise DeviceFault(
                        f"it did not say within {patience_s:g} s what is in use on it"
                    ) from None
                waits_from = heard
        if isinstance(answer, SubletError):
            raise answer
        if isinstance(answer, Exception):
            raise DeviceFault(f"it cannot say what is in use on it: {answer}") from answer
        return answer

    def keeps_contents(self, device: Device) -> bool:
        driver = self._drivers.get(device.driver)
        return driver is not None and driver.capabilities(device.ordinal).keeps_contents

    def note_baseline(self, device: Device, besides: frozenset[int]) -> None:
        used = None
        with contextlib.suppress(
            DeviceFault
        ):  # it is tried again soon; until then its teardowns have no baseline
            used = self.used(device, besides)
        if used is not None:
            self._baseline[device.id] = min(used, self._baseline.get(device.id, used))

    def forget(self, device_id: str) -> None:
        """An operator has looked at the device and called it clean as it is."""
        self._baseline.pop(device_id, None)

    def held_before(self, device: Device, besides: frozenset[int]) -> int:
        """The bytes in use before, to report how many were freed. A device that cannot tell must not delay
        the kill."""
        with contextlib.suppress(DeviceFault):
            return self.used(device, besides, patience_s=ASK_BEFORE_S) or 0
        return 0

    def above_baseline(self, device: Device, used: int) -> int:
        return left_behind(used, self._baseline.get(device.id, 0))


class Teardown:
    def __init__(self, processes: Processes, memory: DeviceMemory, scrub: Scrub) -> None:
        self._processes = processes
        self._memory = memory
        self._scrub = scrub

    def run(
        self,
        holder: Holder,
        slices: Iterable[Slice],
        devices: Mapping[str, Device],
        others: Callable[[], frozenset[int]],
        former: Callable[[], frozenset[int]],
        term_wait_us: int,
        also: Iterable[Holder] = (),
    ) -> Receipt:
        """`others` are the processes of other living leases, asked anew each time: they come and go. `former`
        are those that gave their lease back and live on; asked only when something seems left."""
        begun = time.monotonic_ns()
        neighbours = others()  # a walk over every process: once before the kill, and once or more after it
        places = [
            _SliceMemory(
                devices[s.device_id],
                s.vram_bytes,
                self._memory.held_before(devices[s.device_id], neighbours),
            )
            for s in slices
            if s.device_id in devices
        ]
        receipt = self._processes.end(holder, term_wait_us, also)
        problems = [] if receipt.proven else [receipt.detail]
        freed = scrubbed = 0
        for place in places:
            if problems:
                break
            try:
                used, left = self._wait_until_back(place, others, former)
                if left:
                    problems.append(
                        f"{format_size(left)} of {place.device.id} were still in use "
                        f"{BACK_WAIT_US // 1_000_000} s after every process of the lease was gone"
                    )
                    continue
                freed += max(0, place.held_bytes - used)
                failpoint("teardown_before_scrub")
                if self._memory.keeps_contents(place.device):
                    scrubbed += self._scrub(place.device, place.slice_bytes)
            except SubletError as e:
                problems.append(f"{place.device.id}: {e.message}")
        return replace(
            receipt,
            proven=not problems,
            ladder=receipt.ladder if not problems else "unproven",
            freed_bytes=freed,
            scrubbed_bytes=scrubbed,
            duration_us=(time.monotonic_ns() - begun) // 1000,
            detail="; ".join(problems),
        )

    def _wait_until_back(
        self, place: _SliceMemory, others: Callable[[], frozenset[int]], former: Callable[[], frozenset[int]]
    ) -> tuple[int, int]:
        """Wait for the baseline, within a limit; return the bytes in use then, and those above the
        baseline."""
        give_up = time.monotonic_ns() // 1000 + BACK_WAIT_US
        alive: frozenset[int] | None = None
        while True:
            used = self._memory.used(place.device, others() | (alive or frozenset()))
            if used is None:
                return 0, 0
            left = self._memory.above_baseline(place.device, used)
            if not left or time.monotonic_ns() // 1000 >= give_up:
                return used, left
            if alive is None:
                alive = former()
                continue
            time.sleep(0.005)
