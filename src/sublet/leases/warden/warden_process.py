"""The host's warden as a process: finding it, starting it, being the only one, and what it is made of.

Rules of this file:
- One warden per host, ledger and home, told by a lock file; the machine's own, if it has one, counts as
  everybody's.
- What a warden does is `leases.warden.warden`; this file decides only whether one runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sublet.core.errors import DeviceFault, Misconfigured, WardenRunning
from sublet.core.scheduling.device import Device
from sublet.devices.opening import installed_drivers
from sublet.leases.warden.teardown import DeviceMemory
from sublet.leases.warden.warden import Warden
from sublet.processes.daemonize import last_line, spawn_detached
from sublet.processes.loop_watch import LoopBeats, LoopWatch, ProcessHealth, process_health
from sublet.processes.pid_lock import LockTaken, held, state_of
from sublet.processes.sandbox.containment import contained
from sublet.settings import Settings
from sublet.wiring import (
    CLOCK,
    device_locks,
    find_host_devices,
    open_ledger,
    places,
    processes,
    resolved_environment,
    warden_lock_path,
)

WARDEN_IDLE_EXIT_US = 60_000_000
WARDEN_START_SECONDS = 15.0
#: How many times a start that ends before it is ready is tried in all.
WARDEN_TRIES = 2
SYSTEM_RUN = Path("/run/sublet")
SCRUB_SECONDS = 60


def system_lock_path(settings: Settings) -> Path:
    """The file by which the machine's own warden, if it has one, is known to every user, whatever their name
    at the ledger's server."""
    scheme, _, rest = settings["ledger"].rpartition("@")[2].rpartition("://")
    address = f"{scheme}{rest}|{settings['host']}"
    return SYSTEM_RUN / f"warden-{hashlib.sha256(address.encode()).hexdigest()[:12]}.lock"


def _lock_path(settings: Settings) -> Path:
    """The machine's own warden counts as everybody's."""
    system = system_lock_path(settings)
    return system if system.exists() else warden_lock_path(settings)


def warden_state(settings: Settings) -> tuple[bool, bool, int]:
    """Whether one is running, whether it is ready, and its pid."""
    return state_of(_lock_path(settings))


def warden_health(settings: Settings) -> ProcessHealth:
    return process_health(_lock_path(settings), CLOCK)


def ensure_warden(settings: Settings, *, wait: bool = True, for_pid: int = 0) -> None:
    """Start a warden for this host unless one runs; wait until it has reported its devices. With `for_pid` it
    stays while that process lives, leased or not. Where work is placed elsewhere, the wardens there are
    looked after by whoever places it."""
    if places(settings):
        return
    deadline = time.monotonic() + WARDEN_START_SECONDS
    started, tries = 0, 0
    while True:
        running, ready, _ = warden_state(settings)
        if ready:
            return
        if contained():
            # A warden started in here would see none of the host's processes, and take every holder for dead.
            # The run outside looks after it at each renewal.
            return
        if not running and started and not os.path.exists(f"/proc/{started}"):
            if warden_state(settings)[0]:
                continue  # another process's start won, and its warden is on its way
            if tries < WARDEN_TRIES:
                started = 0  # somebody may have killed it: only one that ends each time cannot start
                continue
            raise Misconfigured(
                f"the warden could not start: {last_line(settings.home / 'warden.log')}",
                remedy="run 'sublet warden' to see why",
            )
        if system_lock_path(settings).exists():
            # One of ours could not end what other users hold: better none, until the machine's own is back.
            if wait and time.monotonic() > deadline:
                raise Misconfigured(
                    "this machine's own warden is not running",
                    remedy="'systemctl start sublet-warden'; if it has none any more, remove its file in "
                    "/run/sublet",
                )
        elif not running and not started:
            started, tries = _spawn_warden(settings, for_pid), tries + 1
        if not wait:
            return
        if time.monotonic() > deadline:
            raise Misconfigured("the warden did not become ready", remedy="run 'sublet warden' to see why")
        time.sleep(0.01)


def _spawn_warden(settings: Settings, for_pid: int) -> int:
    idle = f"{WARDEN_IDLE_EXIT_US // 1_000_000}s"
    command = [sys.executable, "-m", "sublet", "warden", "--idle-exit", idle]
    if for_pid:
        command += ["--for-pid", str(for_pid)]
    names = ("home", "ledger", "devices", "host", "tenant")
    return spawn_detached(command, resolved_environment(settings, names), settings.home / "warden.log")


@contextlib.contextmanager
def single_warden(settings: Settings, *, system: bool = False) -> Iterator[int]:
    """Hold the host's warden lock, or with `system` the machine's. Its descriptor is given so that readiness
    can be written into the file."""
    try:
        path = system_lock_path(settings) if system else warden_lock_path(settings)
        with held(path, public=system) as fd:
            yield fd
    except LockTaken as e:
        raise WardenRunning(f"a warden already runs on this host (pid {e.pid})") from None


def scrub(device: Device, size: int) -> int:
    """Overwrite its memory in a process of its own: see `devices/scrub_main.py`."""
    command = [
        sys.executable,
        "-m",
        "sublet.devices.scrub_main",
        device.driver,
        device.id,
        str(device.ordinal),
        str(size),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCRUB_SECONDS, check=False)
    except subprocess.TimeoutExpired as e:
        raise DeviceFault(f"overwriting its memory took longer than {SCRUB_SECONDS} s") from e
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or ["no message"]
        raise DeviceFault(f"its memory could not be overwritten: {words[-1][-300:]}")
    return int(done.stdout)


def watch_loops(
    settings: Settings,
    lock: int,
    beats: LoopBeats,
    log: Callable[[str], None],
    has_deadlines: Callable[[], bool],
    *,
    system: bool,
) -> LoopWatch:
    path = system_lock_path(settings) if system else warden_lock_path(settings)
    return LoopWatch(beats, lock, path, settings.home, log, has_deadlines=has_deadlines)


def make_warden(
    settings: Settings,
    *,
    idle_exit_us: int | None,
    log: Callable[[str], None],
    needed: Callable[[], bool] = lambda: False,
    beats: LoopBeats | None = None,
) -> Warden:
    return Warden(
        open_ledger(settings),
        processes(settings),
        CLOCK,
        settings["host"],
        lambda: find_host_devices(settings),
        DeviceMemory(installed_drivers()),
        scrub,
        idle_exit_us=idle_exit_us,
        needed=needed,
        beats=beats,
        claims=device_locks(settings, log),
        log=log,
    )
