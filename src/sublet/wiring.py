"""Where adapters meet: settings in, working parts out.

Rules of this file:
- The only place that knows which adapter stands behind which port. Plug-ins and built-ins are found the same way, by entry
  point, so a missing extra is named with its install line.
- A ledger is opened once per process and address; the keeper and the warden are found or started on demand.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

from sublet.core.device import Device, parse_exclusivity
from sublet.core.errors import BadInput, DeviceFault, Misconfigured, SubletError, WardenRunning
from sublet.core.lease import Holder, Request, parse_tier
from sublet.core.tenancy import Tenant
from sublet.core.values import check_job, parse_duration, parse_size, parse_size_range
from sublet.drivers.opening import Opening, installed_drivers, open_device
from sublet.drivers.probe import find_devices
from sublet.drivers.remote import RemoteSession
from sublet.hosting.clock import HostClock
from sublet.hosting.detached import last_line, spawn_detached
from sublet.hosting.processes import HostProcesses
from sublet.ports.driver import Driver
from sublet.ports.ledger import FoundDevice, Ledger
from sublet.ports.session import Session
from sublet.ports.worker import Worker, Workers
from sublet.runtime.acquire import OnOffer, OnWait
from sublet.runtime.acquire import acquire as acquire_lease
from sublet.runtime.holding import Lease
from sublet.runtime.keeper import Keeper
from sublet.runtime.on_gpu import OnGpu, Warm
from sublet.runtime.teardown import DeviceMemory
from sublet.runtime.warden import Warden
from sublet.settings import Settings, load_settings

CLOCK = HostClock()
DEFAULT_VRAM = "1GiB"
DEFAULT_TTL = "5m"
WARDEN_IDLE_EXIT_US = 60_000_000
WARDEN_START_SECONDS = 15.0
SCRUB_SECONDS = 60

_lock = threading.Lock()
_ledgers: dict[str, Ledger] = {}
_keepers: dict[str, Keeper] = {}


# --- parts ---------------------------------------------------------------------------------------------------


def plug_in(group: str, name: str) -> Any:
    found = entry_points(group=group)
    if name not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise Misconfigured(
            f"there is no {group.removeprefix('sublet.')[:-1]} named {name[:40]!r}", remedy=f"known: {known}"
        )
    return found[name].load()


def open_ledger(settings: Settings) -> Ledger:
    """The process's ledger for this address, opened once."""
    url = settings["ledger"]
    with _lock:
        found = _ledgers.get(url)
        if found is None:
            scheme = url.split(":", 1)[0]
            if ":" not in url:
                raise Misconfigured(
                    f"SUBLET_LEDGER {url[:60]!r} has no scheme", remedy="write sqlite:PATH or postgresql://…"
                )
            name = {"postgres": "postgresql"}.get(scheme, scheme)
            found = _ledgers[url] = plug_in("sublet.ledgers", name)(url, CLOCK)
        return found


def find_host_devices(settings: Settings, known: Mapping[str, Driver] | None = None) -> list[FoundDevice]:
    """What SUBLET_DEVICES names here. `known` drivers have then been told what is declared about their devices."""
    probes = {name: driver.probe for name, driver in (known or installed_drivers()).items()}
    return find_devices(settings["devices"], settings["host"], probes)


def open_session(settings: Settings, lease: Lease, index: int, watchdog_us: int) -> Session:
    """Open one of the lease's devices where the lease's work runs: here, or in its worker."""
    device_id = lease.devices[index]
    device = next(d for d in open_ledger(settings).devices(settings["host"]) if d.id == device_id)
    wanted = Opening(
        driver=device.driver,
        declared=_declared(settings["devices"], device.driver),
        host=settings["host"],
        device_id=device_id,
        ordinal=device.ordinal,
        quota_bytes=lease.vram_bytes,
        watchdog_us=watchdog_us,
    )
    return open_device(wanted, lease) if lease._worker is None else RemoteSession(lease.run, wanted)


def _declared(spec: str, driver: str) -> str:
    parts = [p.strip().partition(":")[2] for p in spec.split(",") if p.strip().startswith(f"{driver}:")]
    return parts[0] if parts else "auto"


def workers(settings: Settings) -> Workers:
    """Where leased workers come from. Imported late: most programs never need one."""
    from sublet.hosting.local import LocalWorkers

    preload = settings["preload"]
    # A module with `on_gpu` in it imports this one, so every worker has it already.
    modules = "sublet.wiring" if preload == "none" else f"sublet.wiring,{_installed(preload)}"
    return LocalWorkers(settings.home, settings["host"], modules)


def _installed(modules: str) -> str:
    """Those of them this Python has."""
    names = [name.strip() for name in modules.split(",") if name.strip()]
    return ",".join(name for name in names if find_spec(name.partition(".")[0]) is not None)


def processes(settings: Settings) -> HostProcesses:
    return HostProcesses(settings["host"], settings.home / "run")


def keeper(settings: Settings, ledger: Ledger) -> Keeper:
    with _lock:
        found = _keepers.get(settings["ledger"])
        if found is None or found.pid != os.getpid():
            found = _keepers[settings["ledger"]] = Keeper(
                ledger, CLOCK, before_renew=lambda: ensure_warden(settings, wait=False)
            )
        return found


# --- the warden ----------------------------------------------------------------------------------------------


def warden_lock_path(settings: Settings) -> Path:
    """One warden per host, ledger and home."""
    name = hashlib.sha256(f"{settings['ledger']}|{settings['host']}".encode()).hexdigest()[:12]
    return settings.home / f"warden-{name}.lock"


def warden_state(settings: Settings) -> tuple[bool, bool, int]:
    """Is one running, is it ready, and its pid."""
    path = warden_lock_path(settings)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False, False, 0
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 100, 0).decode(errors="replace").split()
            pid = int(text[0]) if text and text[0].isdigit() else 0
            return True, "ready" in text, pid
        return False, False, 0
    finally:
        os.close(fd)


def ensure_warden(settings: Settings, *, wait: bool = True) -> None:
    """Start a warden for this host unless one runs; wait until it has reported its devices."""
    deadline = time.monotonic() + WARDEN_START_SECONDS
    started = 0
    while True:
        running, ready, _ = warden_state(settings)
        if ready:
            return
        if not running and started and not os.path.exists(f"/proc/{started}"):
            if warden_state(settings)[0]:
                continue  # another process's start won, and its warden is on its way
            raise Misconfigured(
                f"the warden could not start: {last_line(settings.home / 'warden.log')}",
                remedy="run 'sublet warden' to see why",
            )
        if not running and not started:
            started = _spawn_warden(settings)
        if not wait:
            return
        if time.monotonic() > deadline:
            raise Misconfigured("the warden did not become ready", remedy="run 'sublet warden' to see why")
        time.sleep(0.01)


def _spawn_warden(settings: Settings) -> int:
    """With the resolved settings, and nothing else of ours."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
    for name in ("home", "ledger", "devices", "host", "tenant"):
        environment[f"SUBLET_{name.upper()}"] = settings[name]
    idle = f"{WARDEN_IDLE_EXIT_US // 1_000_000}s"
    command = [sys.executable, "-m", "sublet", "warden", "--idle-exit", idle]
    return spawn_detached(command, environment, settings.home / "warden.log")


@contextlib.contextmanager
def single_warden(settings: Settings) -> Iterator[int]:
    """Hold the host's warden lock. Its descriptor is given so that readiness can be written into the file."""
    settings.home.mkdir(parents=True, exist_ok=True)
    fd = os.open(warden_lock_path(settings), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        for _ in range(50):
            # A process that only looks holds the lock for a moment.
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.004)
        else:
            pid = os.pread(fd, 20, 0).decode(errors="replace").split()[:1]
            raise WardenRunning(f"a warden already runs on this host (pid {pid[0] if pid else '?'})")
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} starting\n".encode(), 0)
        yield fd
    finally:
        os.close(fd)


def scrub(device: Device, size: int) -> int:
    """In a process of its own: see `drivers/scrub_main.py`."""
    command = [
        sys.executable,
        "-m",
        "sublet.drivers.scrub_main",
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


def make_warden(settings: Settings, *, idle_exit_us: int | None, log: Any) -> Warden:
    return Warden(
        open_ledger(settings),
        processes(settings),
        CLOCK,
        settings["host"],
        lambda: find_host_devices(settings),
        DeviceMemory(installed_drivers()),
        scrub,
        idle_exit_us=idle_exit_us,
        log=log,
    )


# --- asking for a GPU ----------------------------------------------------------------------------------------


def ensure_tenant(settings: Settings, ledger: Ledger, name: str) -> None:
    """The user's own tenant is made on first use; one named on purpose must exist."""
    if name == settings["tenant"] and settings.origin("tenant") == "default":
        ledger.add_tenant(Tenant(name=name), actor="first use", exist_ok=True)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


class GpuRequest:
    """What `sublet.gpu(...)` returns. Nothing is asked for until `with` or `.acquire()`."""

    def __init__(
        self,
        settings: Settings,
        request: Request,
        *,
        holder: str | None,
        on_wait: OnWait | None,
        on_offer: OnOffer | None,
        pid: int = 0,
    ) -> None:
        if holder not in (None, "process", "worker", "name"):
            raise BadInput(f"holder {holder!r} is unknown: use 'process', 'worker' or 'name'")
        self.request = request
        self._settings = settings
        self._holder = holder or ("worker" if _in_notebook() else "process")
        self._on_wait = on_wait
        self._on_offer = on_offer
        self._pid = pid or os.getpid()
        self._lease: Lease | None = None

    def _who(self) -> Holder:
        if self._holder == "name":
            return Holder(host=self._settings["host"])
        found = processes(self._settings).identify(self._pid)
        if found is None:
            raise BadInput(f"there is no process {self._pid}")
        return found

    def ask(self) -> Lease:
        """Acquire without keeping: for a command that prints the lease and leaves."""
        ledger = open_ledger(self._settings)
        ensure_tenant(self._settings, ledger, self.request.tenant)
        ensure_warden(self._settings)
        worker = workers(self._settings).start() if self._holder == "worker" else None
        try:
            holder = worker.holder if worker is not None else self._who()
            lease = acquire_lease(
                ledger, CLOCK, self.request, holder, on_wait=self._on_wait, on_offer=self._on_offer
            )
        except BaseException:
            if worker is not None:
                worker.end("no lease was granted")
            raise
        lease._opener = lambda held, device, watchdog_us: open_session(
            self._settings, held, device, watchdog_us
        )
        if worker is not None:
            self._move_in(lease, worker)
        # It may have left, idle, between our look and our grant.
        ensure_warden(self._settings, wait=False)
        return lease

    def _move_in(self, lease: Lease, worker: Worker) -> None:
        try:
            lease._adopt(worker, child_environment(lease))
        except BaseException:
            lease.release()
            raise

    def acquire(self) -> Lease:
        """Acquire now. Outside a `with` block the lease counts as idle until it is touched or works."""
        lease = self._keep()
        lease._report(busy=False)
        return lease

    def _keep(self) -> Lease:
        lease = self.ask()
        keeper(self._settings, open_ledger(self._settings)).keep(lease)
        return lease

    def __enter__(self) -> Lease:
        self._lease = self._keep()
        return self._lease.__enter__()

    def __exit__(self, *error: Any) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.__exit__(*error)


def gpu(
    vram: str | int = DEFAULT_VRAM,
    ttl: str | int | float = DEFAULT_TTL,
    *,
    count: int = 1,
    exclusivity: str = "shared",
    tier: str = "interactive",
    wait: str | int | float | None = None,
    least: str | int | None = None,
    tenant: str | None = None,
    job: str = "",
    hold_cap: str | int | float | None = None,
    holder: str | None = None,
    on_wait: OnWait | None = None,
    on_offer: OnOffer | None = None,
    settings: Settings | None = None,
) -> GpuRequest:
    """A GPU for a while: `with sublet.gpu(vram="16GB", ttl="5m") as lease: ...`

    `vram` may be a range, `"24GB..80GB"`: the most that is free in it, now. `wait` is how long to queue (None: as long as
    it takes, 0: now or `Refused`). The lease is renewed while the block runs, and released when it ends.
    """
    settings = settings or load_settings()
    span = parse_size_range(vram, what="vram")
    least_bytes = parse_size(least, what="least") if least is not None else 0
    if span.least != span.most:
        least_bytes = least_bytes or span.least
    if isinstance(count, bool) or not isinstance(count, int):
        raise BadInput(f"count {count!r} must be a whole number")
    request = Request(
        tenant=tenant or settings["tenant"],
        vram_bytes=span.most,
        ttl_us=parse_duration(ttl, what="ttl"),
        count=count,
        least_bytes=least_bytes,
        wants_offers=on_offer is not None,
        exclusivity=parse_exclusivity(exclusivity),
        tier=parse_tier(tier),
        wait_us=None if wait is None else parse_duration(wait, what="wait"),
        hold_cap_us=None if hold_cap is None else parse_duration(hold_cap, what="hold_cap"),
        host=settings["host"],
        job=check_job(job) if job else "",
    )
    return GpuRequest(settings, request, holder=holder, on_wait=on_wait, on_offer=on_offer)


def child_environment(lease: Lease) -> dict[str, str]:
    """What the lease's work sees of it. Devices it did not lease are hidden, whatever was inherited."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(d for d in lease.devices if d.startswith("GPU-")),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "SUBLET_LEASE_ID": lease.id,
        "SUBLET_EPOCH": str(lease.epoch),
        "SUBLET_EXPIRES_AT": lease.expires_at.isoformat(),
    }


# --- functions on a GPU --------------------------------------------------------------------------------------

_warm: dict[tuple[object, ...], Warm] = {}

P = ParamSpec("P")
R = TypeVar("R")
Duration = str | int | float


def _disabled() -> bool:
    return os.environ.get("SUBLET_DISABLE", "").lower() not in ("", "0", "false", "no")


@overload
def on_gpu(function: Callable[P, R], /) -> OnGpu[P, R]: ...
@overload
def on_gpu(
    function: None = None,
    /,
    *,
    vram: str | int = ...,
    ttl: Duration | Callable[..., Duration] = ...,
    batch: int = ...,
    **options: Any,
) -> Callable[[Callable[P, R]], OnGpu[P, R]]: ...
def on_gpu(
    function: Callable[..., Any] | None = None,
    /,
    *,
    vram: str | int = DEFAULT_VRAM,
    ttl: Duration | Callable[..., Duration] = DEFAULT_TTL,
    batch: int = 1,
    **options: Any,
) -> Any:
    """Run a function in a leased worker: `@sublet.on_gpu(vram="8GB", ttl="2m")`.

    The worker is kept warm between calls until the ttl runs out, and renewed while a call runs. `ttl` may be a function of the
    call's own arguments. `batch` sends up to so many calls in one trip, from `.map(items)` or from several threads. The other
    options are those of `sublet.gpu`. With SUBLET_DISABLE=1 it is a plain call.
    """
    if function is not None and not callable(function):
        raise BadInput("write @sublet.on_gpu or @sublet.on_gpu(vram=..., ttl=...) above a function")
    fixed_us = None if callable(ttl) else parse_duration(ttl, what="ttl")
    unknown = set(options) - {
        *(
            "count",
            "exclusivity",
            "tier",
            "wait",
            "least",
            "tenant",
            "job",
            "hold_cap",
            "on_wait",
            "on_offer",
        ),
        "settings",
    }
    if unknown:
        raise BadInput(f"on_gpu does not know {', '.join(sorted(unknown))}")

    def acquire(ttl_us: int) -> Lease:
        return gpu(vram, ttl_us / 1e6, holder="worker", **options)._keep()

    def warm() -> Warm:
        key = (vram, *sorted((name, str(value)) for name, value in options.items()))
        with _lock:
            return _warm.setdefault(key, Warm(acquire))

    def ttl_us(*args: Any, **kwargs: Any) -> int:
        return fixed_us if fixed_us is not None else parse_duration(ttl(*args, **kwargs), what="ttl")  # type: ignore[operator]

    def decorate(decorated: Callable[..., Any]) -> OnGpu[..., Any]:
        return OnGpu(decorated, warm, ttl_us, batch=batch, plainly=_disabled)

    return decorate if function is None else decorate(function)


def release_warm() -> None:
    """Give back every GPU kept warm for `on_gpu`."""
    with _lock:
        kept = list(_warm.values())
    for warm in kept:
        with warm.lock, contextlib.suppress(SubletError):
            warm.release()


atexit.register(release_warm)


def close_all() -> None:
    """Close every ledger this process opened; for tests and for the end of a command."""
    release_warm()
    with _lock:
        for ledger in _ledgers.values():
            with contextlib.suppress(SubletError):
                ledger.close()
        _ledgers.clear()
        _keepers.clear()
