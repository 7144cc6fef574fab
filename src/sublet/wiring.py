"""Where adapters meet: settings in, working parts out.

Rules of this file:
- The only place that knows which adapter stands behind which port. Plug-ins and built-ins are found the same
  way, by entry point, so a missing extra is named with its install line.
- A ledger is opened once per process and address.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.core.errors import BadInput, Misconfigured, NotIsolated, SubletError
from sublet.core.leasing.device_claim import DeviceClaim
from sublet.core.studio.isolation import HostIsolation, parse_mode, words_of
from sublet.core.studio.network_policy import network_policy
from sublet.core.studio.scratch_quota import scratch_limit
from sublet.core.studio.worker_limits import DEFAULT_LIMITS, WorkerLimits, parse_limits
from sublet.core.values import parse_duration
from sublet.devices.device_locks import DeviceLocks, user_name
from sublet.devices.opening import installed_drivers
from sublet.devices.probe import find_devices
from sublet.machine.disk_space import DiskReserve
from sublet.machine.plugins import installed
from sublet.machine.private_files import make_private_folder, tighten_home
from sublet.machine.run_folder import RunFolder
from sublet.machine.spill import SpillRoom
from sublet.ports.broker import Broker, OpenBroker
from sublet.ports.device import Driver
from sublet.ports.ledger import FoundDevice, Ledger
from sublet.ports.notices import NoticeSource, OpenSource, Surroundings
from sublet.ports.placement import Placement
from sublet.ports.store import Replica
from sublet.ports.worker import Command, Workers
from sublet.processes.arenas import ArenaHolder, HeldArenas
from sublet.processes.clock import HostClock
from sublet.processes.ladder import HostProcesses
from sublet.processes.loop_watch import LoopBeats
from sublet.processes.sandbox.containment import contained
from sublet.processes.sandbox.limits import machine_memory
from sublet.settings import Settings, load_settings

if TYPE_CHECKING:
    from sublet.notice_bus.bus import NoticeBus
    from sublet.processes.sandbox.tenant_sandbox import TenantSandbox
    from sublet.store.checkpoints import CheckpointStore
    from sublet.store.regions import DirectoryRegions

CLOCK = HostClock()
#: For all sources of notices together to say whether they are here.
HERE_SECONDS = 1.0
#: Tenants' numbers begin at 1.
NOBODYS_NUMBER = 0
#: Of answers and questions of one tenant's worker that wait on disk.
ANSWERS_MOST_BYTES = 6 << 30

_lock = threading.Lock()
_ledgers: dict[str, Ledger] = {}
_placements: dict[tuple[str, str], Placement] = {}


# --- parts --------------------------------------------------------------------------------------------------


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
            tighten_home(settings.home)
            name = {"postgres": "postgresql"}.get(scheme, scheme)
            found = plug_in("sublet.ledgers", name)(url, CLOCK)
            found.keep_stamp(settings.home)
            _ledgers[url] = found
        return found


def migrate_ledger(settings: Settings) -> list[str]:
    """Bring the ledger to this version's schema; the names of what was applied."""
    url = settings["ledger"]
    if not url.startswith("sqlite:"):
        from sublet.ledger.engines.postgres.engine import apply_migrations as apply_on_postgres

        return apply_on_postgres(url)
    from sublet.ledger.engines.sqlite.engine import apply_migrations

    path = sqlite_path(settings)
    make_private_folder(path.parent)
    return apply_migrations(path, CLOCK)


def copy_ledger(settings: Settings, target: Path) -> None:
    """A consistent copy of a live ledger, in a new file."""
    from sublet.ledger.engines.sqlite.engine import backup

    backup(sqlite_path(settings), target)


def sqlite_path(settings: Settings) -> Path:
    if not settings["ledger"].startswith("sqlite:"):
        raise BadInput(
            "this ledger is a PostgreSQL database, and its own tools copy it",
            remedy="use pg_dump and pg_restore, then 'sublet migrate --restored'",
        )
    return Path(settings["ledger"].removeprefix("sqlite:")).expanduser()


def find_host_devices(settings: Settings, known: Mapping[str, Driver] | None = None) -> list[FoundDevice]:
    """What SUBLET_DEVICES names here. `known` drivers have then been told what is declared about their
    devices."""
    probes = {name: driver.probe for name, driver in (known or installed_drivers()).items()}
    return find_devices(settings["devices"], settings["host"], probes)


def device_locks(settings: Settings, log: Callable[[str], None] = lambda line: None) -> DeviceLocks:
    """The locks on this machine's physical devices, for the ledger of these settings. A copied file has the
    id of the one it was copied from, so a file is also known by its place."""
    known_as = open_ledger(settings).identity().id
    if settings["ledger"].startswith("sqlite:"):
        known_as += f"|{sqlite_path(settings).resolve()}"
    mark = hashlib.sha256(known_as.encode()).hexdigest()[:16]
    mine = DeviceClaim(ledger=mark, user=user_name(), home=str(settings.home), pid=os.getpid())
    return DeviceLocks(mine, log)


def workers(
    settings: Settings, sandbox: TenantSandbox | None = None, limits: WorkerLimits = DEFAULT_LIMITS
) -> Workers:
    """Where leased workers come from; a tenant's with its sandbox. Imported late: most programs never need
    one."""
    from sublet.processes.worker.workers import LocalWorkers

    preload = settings["preload"]
    # A module with `on_gpu` in it imports this, so every worker has it already.
    modules = "sublet.functions.on_gpu"
    if find_spec("IPython") is not None:  # a notebook's cells run in the same workers
        modules += ",sublet.notebook.cells.inside_cell"
    if preload != "none":
        modules += f",{_installed(preload)}"
    room = spill_room(settings, ANSWERS_MOST_BYTES) if sandbox is not None else None
    return LocalWorkers(settings.home, settings["host"], modules, sandbox=sandbox, limits=limits, room=room)


def disk_reserve(settings: Settings) -> DiskReserve:
    return DiskReserve(settings["disk_reserve"])


def short_of_disk(settings: Settings, more_bytes: int = 0) -> str:
    """Why tenants may not write so much more on this host, or ''. Its disks are those of the home, the ledger
    and the checkpoints, where they are here."""
    return disk_reserve(settings).short_of([settings.home, *map(Path, _beside_home(settings))], more_bytes)


def spill_room(settings: Settings, most_bytes: int) -> SpillRoom:
    """Where bytes of one session wait that are too many for memory."""
    return SpillRoom(settings.home / "run" / "spill", most_bytes, disk_reserve(settings))


def places(settings: Settings) -> bool:
    """Whether leased workers run elsewhere; asked without loading what places them. Inside a run or a worker
    everything is here."""
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


def _beside_home(settings: Settings) -> list[str]:
    """Folders of this host's checkpoints and ledger."""
    found = [
        url.partition(":")[2].partition("@")[0]
        for url in settings["store"].split(",")
        if url.strip().startswith("dir:")
    ]
    if settings["ledger"].startswith("sqlite:"):
        found.append(str(Path(settings["ledger"].partition(":")[2]).parent))
    return sorted({str(Path(place).absolute()) for place in found if place})


def tenant_workers(settings: Settings, number: int) -> Workers:
    """Where the workers of a studio's tenant come from: with nothing of ours around them."""
    from sublet.processes.sandbox.tenant_sandbox import TenantSandbox

    sandbox = TenantSandbox(
        number=number,
        hide=tuple(_beside_home(settings)),
        file_bytes=scratch_limit(settings["scratch_limit"]),
        network=network_policy(settings["tenant_network"]),
    )
    return workers(settings, sandbox, worker_limits(settings))


def worker_limits(settings: Settings) -> WorkerLimits:
    """What one worker of a tenant may use here."""
    return parse_limits(
        memory=settings["worker_memory"],
        processes=settings["worker_processes"],
        cpu_weight=settings["worker_cpu_weight"],
        machine_bytes=machine_memory(),
    )


def try_isolation(settings: Settings) -> HostIsolation:
    """What keeps tenants apart on this host, found out by a worker made as a tenant's is, for nobody."""
    mode = parse_mode(settings["isolation"])
    if places(settings):
        return HostIsolation(mode=mode, elsewhere=True)
    try:
        worker = tenant_workers(settings, NOBODYS_NUMBER).start()
    except NotIsolated as e:
        return HostIsolation(mode=mode, refused=e.message, remedy=e.remedy)
    except (SubletError, OSError) as e:  # it may be able to later
        return HostIsolation(mode=mode, refused="no worker could be started to try it", remedy=str(e))
    try:
        return HostIsolation(mode=mode, words=tuple(words_of(worker.containment)))
    finally:
        worker.end("it was a trial")


def _installed(modules: str) -> str:
    """Those of them this Python has."""
    names = [name.strip() for name in modules.split(",") if name.strip()]
    return ",".join(name for name in names if find_spec(name.partition(".")[0]) is not None)


def checkpoints(
    *urls: str, policy: ReplicaPolicy | None = None, settings: Settings | None = None
) -> CheckpointStore:
    """The checkpoint store: `sublet.checkpoints()` from the settings, or of these replicas:
    `sublet.checkpoints("dir:/a", "dir:/b@rack2")`.

    A save counts when a majority of the replicas, in distinct failure domains, has it durably. Folders on one
    disk are one domain unless you say otherwise with '@'.
    """
    from concurrent.futures import ThreadPoolExecutor

    from sublet.store.checkpoints import CheckpointStore
    from sublet.store.replicas.quorum import Replicas

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


def open_replica(url: str) -> Replica:
    """One copy of the store, by its address."""
    from sublet.store.replicas import opening

    return opening.open_replica(url)


def _arenas_name(settings: Settings) -> str:
    return f"{warden_lock_path(settings).stem}.arenas"


def hold_arenas(settings: Settings, log: Callable[[str], None], beats: LoopBeats) -> ArenaHolder:
    """The memory tier, for as long as a warden serves."""
    return ArenaHolder(settings.home / "run", _arenas_name(settings), log=log, beats=beats)


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
    opens: OpenBroker = plug_in("sublet.brokers", scheme)
    return opens(url, queue)


def start_command(
    settings: Settings,
    run: RunFolder,
    executable: str,
    command: Sequence[str],
    grace_us: int,
    **more: Any,
) -> Command:
    """A command in its containment, waiting for its lease. Imported late: only `sublet run` and a leased
    kernel need it."""
    from sublet.processes.supervisor.command import LocalCommand

    return LocalCommand(run, settings.home / "run", settings["host"], executable, command, grace_us, **more)


def processes(settings: Settings) -> HostProcesses:
    return HostProcesses(settings["host"], settings.home / "run")


def open_notice_bus(settings: Settings, *, grace_us: int) -> NoticeBus:
    """The Notice bus of this process. Imported late: only whoever can drain needs one."""
    from sublet.notice_bus.bus import NoticeBus

    return NoticeBus(CLOCK, notice_sources(settings, grace_us=grace_us), grace_us=grace_us)


def notice_sources(
    settings: Settings,
    *,
    grace_us: int,
    environment: Mapping[str, str] | None = None,
    known: Mapping[str, OpenSource] | None = None,
) -> list[NoticeSource]:
    """Who SUBLET_NOTICES lets warn this process: with `auto` whoever is here, by name whoever is named, asked
    or not."""
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
    """Asked all at once, within a second: a source that hangs or breaks is left out, and training begins
    without it."""
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


def warden_lock_path(settings: Settings) -> Path:
    """One warden per host, ledger and home."""
    name = hashlib.sha256(f"{settings['ledger']}|{settings['host']}".encode()).hexdigest()[:12]
    return settings.home / f"warden-{name}.lock"


def resolved_environment(settings: Settings, names: Sequence[str]) -> dict[str, str]:
    """For a process of ours that outlives this one: these settings, as they were resolved here, and nothing
    else of ours."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
    for name in names:
        environment[f"SUBLET_{name.upper()}"] = settings[name]
    return environment


def close_all() -> None:
    """Close every ledger this process opened; for tests and for the end of a command."""
    with _lock:
        for ledger in _ledgers.values():
            with contextlib.suppress(SubletError):
                ledger.close()
        _ledgers.clear()
