"""Where adapters meet: settings in, working parts out.

Rules of this file:
- The only place that knows which adapter stands behind which port. Plug-ins and built-ins are found the same way, by entry
  point, so a missing extra is named with its install line.
- A ledger is opened once per process and address; the keeper and the warden are found or started on demand.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublet.core.checkpoint import ReplicaPolicy
from sublet.core.device import Device
from sublet.core.errors import DeviceFault, Misconfigured, SubletError, WardenRunning
from sublet.core.values import parse_duration
from sublet.drivers.opening import Opening, installed_drivers, open_device
from sublet.drivers.probe import find_devices
from sublet.drivers.remote import RemoteSession
from sublet.hosting.arenas import ArenaHolder, HeldArenas
from sublet.hosting.clock import HostClock
from sublet.hosting.containment import contained
from sublet.hosting.detached import last_line, spawn_detached
from sublet.hosting.processes import HostProcesses
from sublet.hosting.single import Taken, held, state_of
from sublet.plugins import installed
from sublet.ports.broker import Broker
from sublet.ports.command import Command
from sublet.ports.driver import Driver
from sublet.ports.ledger import FoundDevice, Ledger
from sublet.ports.notices import NoticeSource, OpenSource, Surroundings
from sublet.ports.placement import Placement
from sublet.ports.session import Session
from sublet.ports.sink import Sink
from sublet.ports.worker import Workers
from sublet.runs import RunFolder
from sublet.runtime.holding import Lease
from sublet.runtime.keeper import Keeper
from sublet.runtime.teardown import DeviceMemory
from sublet.runtime.warden import Warden
from sublet.settings import Settings, load_settings

if TYPE_CHECKING:
    from sublet.hosting.household import Household
    from sublet.runtime.alarms import Alarms
    from sublet.runtime.block_keeper import BlockKeeper
    from sublet.store.checkpoints import CheckpointStore
    from sublet.store.regions import DirectoryRegions

CLOCK = HostClock()
WARDEN_IDLE_EXIT_US = 60_000_000
WARDEN_START_SECONDS = 15.0
#: A start that ended before it was ready is tried again so often in all.
WARDEN_TRIES = 2
SYSTEM_RUN = Path("/run/sublet")
SCRUB_SECONDS = 60
#: For all sources of notices together to say whether they are here.
HERE_SECONDS = 1.0

_lock = threading.Lock()
_ledgers: dict[str, Ledger] = {}
_keepers: dict[str, Keeper] = {}
_block_keepers: list[BlockKeeper] = []
_placements: dict[tuple[str, str], Placement] = {}


# --- parts ---------------------------------------------------------------------------------------------------


def plug_in(group: str, name: str) -> Any:
    found = installed(group, name)
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


def opening_of(settings: Settings, lease: Lease, index: int, watchdog_us: int) -> Opening:
    """What must be known to open one of the lease's devices, wherever its work runs."""
    device_id = lease.devices[index]
    placed = placement(settings) if lease._worker is not None and not lease.here else None
    host = "" if placed is not None else settings["host"]
    device = next(d for d in open_ledger(settings).devices(host) if d.id == device_id)
    devices = placed.declared(device.host) if placed is not None else settings["devices"]
    return Opening(
        driver=device.driver,
        declared=_declared(devices, device.driver),
        host=device.host,
        device_id=device_id,
        ordinal=device.ordinal,
        quota_bytes=lease.vram_bytes,
        watchdog_us=watchdog_us,
    )


def open_session(settings: Settings, lease: Lease, index: int, watchdog_us: int) -> Session:
    """Open one of the lease's devices where the lease's work runs: here, or in its worker."""
    wanted = opening_of(settings, lease, index, watchdog_us)
    return open_device(wanted, lease) if lease._worker is None else RemoteSession(lease.run, wanted)


def _declared(spec: str, driver: str) -> str:
    parts = [p.strip().partition(":")[2] for p in spec.split(",") if p.strip().startswith(f"{driver}:")]
    return parts[0] if parts else "auto"


def workers(settings: Settings, household: Household | None = None) -> Workers:
    """Where leased workers come from; those of a tenant with its household. Imported late: most programs never need one."""
    from sublet.hosting.local import LocalWorkers

    preload = settings["preload"]
    # A module with `on_gpu` in it imports this, so every worker has it already.
    modules = "sublet.borrowing"
    if find_spec("IPython") is not None:  # a notebook's cells run in the same workers
        modules += ",sublet.notebook.inside_cell"
    if preload != "none":
        modules += f",{_installed(preload)}"
    return LocalWorkers(settings.home, settings["host"], modules, household=household)


def places(settings: Settings) -> bool:
    """Whether leased workers run elsewhere; asked without loading what places them. Inside a run or a worker everything is here."""
    return settings["placement"].strip() not in ("", "local") and not contained()


def placement(settings: Settings) -> Placement | None:
    """Where leased workers run, if not here. Opened once per process and address."""
    if not places(settings):
        return None
    where = settings["placement"].strip()
    scheme = where.partition(":")[0]
    key = (where, settings["ledger"])
    with _lock:
        found = _placements.get(key)
    if found is None:
        opened = plug_in("sublet.placements", scheme)(where, settings["ledger"])
        with _lock:
            found = _placements.setdefault(key, opened)
    return found


def tenant_workers(settings: Settings, number: int) -> Workers:
    """Where the workers of a studio's tenant come from: with nothing of ours around them."""
    from sublet.hosting.household import Household

    hidden = [
        url.partition(":")[2].partition("@")[0]
        for url in settings["store"].split(",")
        if url.strip().startswith("dir:")
    ]
    if settings["ledger"].startswith("sqlite:"):
        hidden.append(str(Path(settings["ledger"].partition(":")[2]).parent))
    beside = sorted({str(Path(place).absolute()) for place in hidden if place})
    return workers(settings, Household(number=number, hide=tuple(beside)))


def _installed(modules: str) -> str:
    """Those of them this Python has."""
    names = [name.strip() for name in modules.split(",") if name.strip()]
    return ",".join(name for name in names if find_spec(name.partition(".")[0]) is not None)


def checkpoints(
    *urls: str, policy: ReplicaPolicy | None = None, settings: Settings | None = None
) -> CheckpointStore:
    """The checkpoint store: `sublet.checkpoints()` from the settings, or of these replicas: `sublet.checkpoints("dir:/a", "dir:/b@rack2")`.

    A save counts when a majority of the replicas, in distinct failure domains, has it durably. Folders on one disk are one domain
    unless you say otherwise with '@'.
    """
    from concurrent.futures import ThreadPoolExecutor

    from sublet.store.checkpoints import CheckpointStore
    from sublet.store.opening import open_replica
    from sublet.store.replicas import Replicas

    settings = settings or load_settings()
    wanted = urls or tuple(filter(None, (part.strip() for part in settings["store"].split(","))))
    replicas = [open_replica(url) for url in wanted]
    if policy is None:
        policy = ReplicaPolicy(replicas=len(replicas), domains=tuple(r.domain for r in replicas))
    if len(replicas) == 1:
        replicas[0].check()
    else:
        with ThreadPoolExecutor(len(replicas)) as pool:  # one that is away must not hold up the others
            list(pool.map(lambda replica: replica.check(), replicas))
    memory = HeldArenas(settings.home / "run", _arenas_name(settings))
    return CheckpointStore(
        Replicas(replicas, policy, here=settings["domain"]), lambda: open_ledger(settings), memory
    )


def _arenas_name(settings: Settings) -> str:
    return f"{warden_lock_path(settings).stem}.arenas"


def hold_arenas(settings: Settings, log: Callable[[str], None]) -> ArenaHolder:
    """The memory tier, for as long as a warden serves."""
    return ArenaHolder(settings.home / "run", _arenas_name(settings), log=log)


def regions(settings: Settings) -> DirectoryRegions:
    """Where block leases lie. Imported late: most programs never need one."""
    from sublet.store.regions import DirectoryRegions

    return DirectoryRegions(settings.home / "blocks")


def open_broker(url: str, queue: str) -> Broker:
    """Where a queue's items come from, by the address's scheme."""
    scheme, colon, _ = url.partition("://")
    if not colon:
        raise Misconfigured(
            f"the broker's address {url[:40]!r} has no scheme",
            remedy="write amqp://…, redis://…, sqs://… or pubsub://…",
        )
    return plug_in("sublet.brokers", scheme)(url, queue)  # type: ignore[no-any-return]


def open_sink(what: str | Sink | Callable[..., Any]) -> Sink:
    """Where a queue's results go. Imported late: most queues keep them in the ledger."""
    from sublet.sinks.opening import open_sink as opened

    return opened(what)


def block_keeper(settings: Settings) -> BlockKeeper:
    """The process's, for all its ledgers: a block knows its own."""
    from sublet.runtime.block_keeper import BlockKeeper

    with _lock:
        if not _block_keepers or _block_keepers[-1].pid != os.getpid():
            _block_keepers.append(BlockKeeper(CLOCK))
        return _block_keepers[-1]


def start_command(
    settings: Settings,
    run: RunFolder,
    executable: str,
    command: Sequence[str],
    grace_us: int,
    **more: Any,
) -> Command:
    """A command in its containment, waiting for its lease. Imported late: only `sublet run` and a leased kernel need it."""
    from sublet.hosting.command import LocalCommand

    return LocalCommand(run, settings.home / "run", settings["host"], executable, command, grace_us, **more)


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


def alarms(settings: Settings, *, grace_us: int) -> Alarms:
    """The Notice bus of this process. Imported late: only whoever can drain needs one."""
    from sublet.runtime.alarms import Alarms

    return Alarms(CLOCK, notice_sources(settings, grace_us=grace_us), grace_us=grace_us)


def notice_sources(
    settings: Settings,
    *,
    grace_us: int,
    environment: Mapping[str, str] | None = None,
    known: Mapping[str, OpenSource] | None = None,
) -> list[NoticeSource]:
    """Who SUBLET_NOTICES lets warn this process: with `auto` whoever is here, by name whoever is named, asked or not."""
    wanted = [part.strip() for part in settings["notices"].split(",") if part.strip()]
    if wanted == ["none"]:
        return []
    limit = settings["time_limit"]
    around = Surroundings(
        clock=CLOCK,
        environment=os.environ if environment is None else environment,
        grace_us=grace_us,
        started_us=_started_us(),
        hostname=socket.gethostname(),
        time_limit_us=parse_duration(limit, what="time limit") if limit else 0,
    )
    if wanted and wanted != ["auto"]:
        return [(known[name] if known else plug_in("sublet.notices", name))(around) for name in wanted]
    return _those_here(known or {e.name: _loaded_when_called(e) for e in installed("sublet.notices")}, around)


def _loaded_when_called(entry: EntryPoint) -> OpenSource:
    def opened(around: Surroundings) -> NoticeSource:
        return entry.load()(around)  # type: ignore[no-any-return]

    return opened


def _those_here(known: Mapping[str, OpenSource], around: Surroundings) -> list[NoticeSource]:
    """Asked all at once, within a second: a source that hangs or breaks is left out, and training begins without it."""
    found: dict[str, NoticeSource] = {}

    def ask(name: str, opened: OpenSource) -> None:
        try:
            source = opened(around)
            if source.here():
                found[name] = source
        except Exception as e:
            warnings.warn(f"no notices from {name}: {type(e).__name__}: {e}", RuntimeWarning, stacklevel=2)

    asked = [threading.Thread(target=ask, args=pair, daemon=True) for pair in known.items()]
    for thread in asked:
        thread.start()
    deadline = time.monotonic() + HERE_SECONDS
    for thread in asked:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [source for _, source in sorted(found.items())]


def _started_us() -> int:
    """When this process began, on the monotonic clock."""
    now_us = CLOCK.monotonic_us()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return now_us
    return now_us - max(0, CLOCK.boot_us() - ticks * 1_000_000 // os.sysconf("SC_CLK_TCK"))


# --- the warden ----------------------------------------------------------------------------------------------


def warden_lock_path(settings: Settings) -> Path:
    """One warden per host, ledger and home."""
    name = hashlib.sha256(f"{settings['ledger']}|{settings['host']}".encode()).hexdigest()[:12]
    return settings.home / f"warden-{name}.lock"


def system_lock_path(settings: Settings) -> Path:
    """Where the machine's own warden, if it has one, says so to every user of it: whoever they are to the ledger's server."""
    scheme, _, rest = settings["ledger"].rpartition("@")[2].rpartition("://")
    address = f"{scheme}{rest}|{settings['host']}"
    return SYSTEM_RUN / f"warden-{hashlib.sha256(address.encode()).hexdigest()[:12]}.lock"


def warden_state(settings: Settings) -> tuple[bool, bool, int]:
    """Is one running, is it ready, and its pid. The machine's own counts as everybody's."""
    system = system_lock_path(settings)
    return state_of(system if system.exists() else warden_lock_path(settings))


def ensure_warden(settings: Settings, *, wait: bool = True, for_pid: int = 0) -> None:
    """Start a warden for this host unless one runs; wait until it has reported its devices. With `for_pid` it stays while that process lives,
    leased or not. Where work is placed elsewhere, the wardens there are looked after by whoever places it."""
    if places(settings):
        return
    deadline = time.monotonic() + WARDEN_START_SECONDS
    started, tries = 0, 0
    while True:
        running, ready, _ = warden_state(settings)
        if ready:
            return
        if contained():
            # A warden started in here would see none of the host's processes, and take every holder for dead. The run outside
            # looks after it at each renewal.
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
                    remedy="'systemctl start sublet-warden'; if it has none any more, remove its file in /run/sublet",
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


def resolved_environment(settings: Settings, names: Sequence[str]) -> dict[str, str]:
    """For a process of ours that outlives this one: these settings, as they were resolved here, and nothing else of ours."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
    for name in names:
        environment[f"SUBLET_{name.upper()}"] = settings[name]
    return environment


@contextlib.contextmanager
def single_warden(settings: Settings, *, system: bool = False) -> Iterator[int]:
    """Hold the host's warden lock, or with `system` the machine's. Its descriptor is given so that readiness can be written into the file."""
    try:
        with held(system_lock_path(settings) if system else warden_lock_path(settings)) as fd:
            yield fd
    except Taken as e:
        raise WardenRunning(f"a warden already runs on this host (pid {e.pid})") from None


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


def make_warden(
    settings: Settings, *, idle_exit_us: int | None, log: Any, needed: Callable[[], bool] = lambda: False
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
        log=log,
    )


def close_all() -> None:
    """Close every ledger this process opened; for tests and for the end of a command."""
    with _lock:
        for ledger in _ledgers.values():
            with contextlib.suppress(SubletError):
                ledger.close()
        _ledgers.clear()
        _keepers.clear()
