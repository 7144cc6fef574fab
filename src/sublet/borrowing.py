"""What users call: `sublet.gpu(...)` and `@sublet.on_gpu(...)`.

Rules of this file:
- Words in, a checked request out: sizes, durations and tiers are read here and nowhere deeper.
- It chooses where: on this machine, or in the studio that SUBLET_URL names. And
  who holds the lease: the process itself in a script, a leased worker where the user's own process must not be killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from sublet import inside
from sublet.core.device import could_ever_fit, fit, parse_exclusivity
from sublet.core.errors import BadInput, Misconfigured, NotPlaced, SubletError, WorkerLost
from sublet.core.lease import Holder, Request, parse_tier
from sublet.core.spread import Spread, parse_spread
from sublet.core.tenancy import Tenant
from sublet.core.values import check_job, parse_duration, parse_size, parse_size_range
from sublet.gathering import gather
from sublet.hosting.containment import contained
from sublet.ports.held import HeldLease
from sublet.ports.ledger import Ledger
from sublet.ports.placement import Placement
from sublet.ports.worker import Worker
from sublet.runtime.acquire import OnOffer, OnWait
from sublet.runtime.acquire import acquire as acquire_lease
from sublet.runtime.holding import Lease
from sublet.runtime.on_gpu import Duration, OnGpu, Warm, on_gpu_decorator
from sublet.settings import Settings, load_settings, switched_on
from sublet.wiring import (
    CLOCK,
    ensure_warden,
    keeper,
    open_ledger,
    open_session,
    placement,
    processes,
    workers,
)

if TYPE_CHECKING:
    from sublet.remote.studio import RemoteRequest, Studio

DEFAULT_VRAM = "1GiB"
DEFAULT_TTL = "5m"


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
        start: Callable[[], Worker] | None = None,
        environment: Callable[[Lease, Worker], Mapping[str, str]] | None = None,
        still_wanted: Callable[[], None] = lambda: None,
        lease_id: str = "",
        placed: Placement | None = None,
        place: Callable[[str], Worker] | None = None,
        note_again: Callable[[], str] = lambda: "",
    ) -> None:
        """`placed`: its worker runs where its devices are, on whichever host; else on this one. `place` starts it there. `start` makes the worker that will hold it, if not one that is called; `environment` adds to what that one sees; `lease_id` was
        noted somewhere before the lease is asked for, and `note_again` is where the next one is, if the host of the first cannot take it."""
        if holder not in (None, "process", "worker", "name"):
            raise BadInput(f"holder {holder!r} is unknown: use 'process', 'worker' or 'name'")
        self.request = request
        self._settings = settings
        self._spread = request.spread is Spread.OK and request.count > 1
        if self._spread and placed is None and holder in ("process", "worker"):
            raise BadInput(
                f"devices of several hosts have no {holder} here that could use them all",
                remedy="leave holder out: start a process on each host that calls sublet.join(); or set SUBLET_PLACEMENT",
            )
        usual = "name" if self._spread else "process"
        self._holder = holder or (
            "worker" if placed is not None or (_in_notebook() and not self._spread) else usual
        )
        self._placed = placed if self._holder == "worker" else None
        self._place = place or (placed.start if placed is not None else None)
        self._on_wait = on_wait
        self._on_offer = on_offer
        self._pid = pid or os.getpid()
        self._start = start or (lambda: workers(settings).start())
        self._environment = environment or (lambda lease, worker: {})
        self._still_wanted = still_wanted
        self._lease_id = lease_id
        self._note_again = note_again
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
        if self._holder == "worker" and (contained() or inside.tenancy() is not None):
            raise BadInput(
                "a leased worker cannot be started inside another, 'sublet run' or a leased kernel",
                remedy="use the lease there is: this process runs under it already (in a %%gpu cell or a leased kernel: sublet.lease())",
            )
        if self._placed is not None:
            return self._ask_placed(ledger, self._placed)
        if self._holder != "name":
            self._must_have_its_own(ledger)
        worker = self._start() if self._holder == "worker" else None
        try:
            holder = worker.holder if worker is not None else self._who()
            lease = acquire_lease(
                ledger,
                CLOCK,
                self.request,
                holder,
                on_wait=self._on_wait,
                on_offer=self._on_offer,
                still_wanted=self._still_wanted,
                lease_id=self._lease_id,
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
        if self._holder == "name":
            where = {d.id: d.host for d in ledger.devices()}
            lease._hosts = tuple(dict.fromkeys(where[device] for device in lease.devices))
        # It may have left, idle, between our look and our grant.
        ensure_warden(self._settings, wait=False)
        return lease

    def _must_have_its_own(self, ledger: Ledger) -> None:
        """Where work is placed, a process that holds a GPU itself must be on a node that has one."""
        around = placement(self._settings)
        if around is None:
            return
        around.ready()  # if this is one of its nodes, its devices are in the ledger from here on
        if not ledger.devices(self.request.host):
            raise Misconfigured(
                f"this process would hold a GPU of the machine it runs on, and {self.request.host} is no node of the cluster with a GPU; "
                "nothing was leased: let the cluster run it, sublet run -- python train.py",
                remedy="sublet run -- python train.py; or call what needs the GPU by on_gpu or holder='worker'",
            )

    def _ask_placed(self, ledger: Ledger, placed: Placement) -> Lease:
        """The grant first, then a worker where its devices are. A host that cannot start one is not asked again: the ledger may believe
        in it a while longer than we do."""
        placed.ready()
        _release_before_it_leaves()
        if self._spread:
            return gather(
                self._settings, ledger, placed, lambda: self._ask_named(ledger), self._open_and_move_in
            )
        request, failed = self.request, set[str]()
        down = {device.host for device in ledger.devices()} - placed.hosts()
        # One worker uses them all; and what is noted somewhere is not to be granted where it is given back at once.
        if request.count > 1 or (self._lease_id and down):
            request = replace(request, host=self._host_for(ledger, placed, failed))
        lease_id = self._lease_id
        while True:
            lease = acquire_lease(
                ledger,
                CLOCK,
                request,
                Holder(host=self._settings["host"]),
                on_wait=self._on_wait,
                on_offer=self._on_offer,
                still_wanted=self._still_wanted,
                lease_id=lease_id,
            )
            host = ""
            try:
                host = next(d.host for d in ledger.devices() if d.id in lease.devices)
                # To start a worker may take longer than its lease: it is kept meanwhile.
                keeper(self._settings, ledger).keep(lease)
                self._seat(lease, host, ledger, placed)
                return lease
            except (NotPlaced, WorkerLost) as e:
                lease.release()
                failed.add(host)
                if isinstance(e, WorkerLost) and e.begun:
                    raise
            except BaseException:
                lease.release()
                raise
            lease_id = self._note_again()
            request = replace(request, host=self._host_for(ledger, placed, failed))

    def _ask_named(self, ledger: Ledger) -> Lease:
        lease = acquire_lease(
            ledger,
            CLOCK,
            self.request,
            Holder(host=self._settings["host"]),
            on_wait=self._on_wait,
            on_offer=self._on_offer,
            still_wanted=self._still_wanted,
        )
        keeper(self._settings, ledger).keep(lease)
        return lease

    def _open_and_move_in(self, lease: Lease, worker: Worker) -> None:
        lease._opener = lambda held, device, watchdog_us: open_session(
            self._settings, held, device, watchdog_us
        )
        self._move_in(lease, worker)

    def _seat(self, lease: Lease, host: str, ledger: Ledger, placed: Placement) -> None:
        if host not in placed.hosts():
            raise NotPlaced(f"host {host} is not up")
        assert self._place is not None
        worker = self._place(host)
        try:
            lease._seated(ledger.seat(lease.key, worker.holder))
        except BaseException:
            worker.end("it was not seated")
            raise
        lease._opener = lambda held, device, watchdog_us: open_session(
            self._settings, held, device, watchdog_us
        )
        self._move_in(lease, worker)

    def _host_for(self, ledger: Ledger, placed: Placement, failed: set[str]) -> str:
        """One that is up: where it fits now, else where it could."""
        devices = [d for d in ledger.devices() if d.host in placed.hosts() - failed]
        hosts = sorted(
            {d.host for d in devices}, key=lambda h: -sum(d.free_bytes for d in devices if d.host == h)
        )
        shape = self.request.shape()
        roomy = [h for h in hosts if fit(shape, [d for d in devices if d.host == h]) is not None]
        large = [
            h for h in hosts if could_ever_fit(shape, [(h, d.capacity_bytes) for d in devices if d.host == h])
        ]
        if not (roomy or large):
            raise NotPlaced(
                f"no node of the cluster can take it{': tried ' + ', '.join(sorted(failed)) if failed else ''}"
            )
        return (roomy or large)[0]

    def _move_in(self, lease: Lease, worker: Worker) -> None:
        try:
            lease._adopt(worker, {**self._environment(lease, worker), **child_environment(lease)})
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
    spread: str = "no",
    settings: Settings | None = None,
) -> GpuRequest | RemoteRequest:
    """A GPU for a while: `with sublet.gpu(vram="16GB", ttl="5m") as lease: ...`

    `vram` may be a range, `"24GB..80GB"`: the most that is free in it, now. `wait` is how long to queue (None: as long as
    it takes, 0: now or `Refused`). The lease is renewed while the block runs, and released when it ends.

    `count` devices are of one host. With `spread="ok"` they may be of several, when no single host has them: a gang, all or none of it, with one
    epoch and one end. Its members are called by `lease.run_everywhere(function)` where workers are placed (SUBLET_PLACEMENT), else they
    are processes that you start on its hosts and that call `sublet.join()`.

    With SUBLET_URL and SUBLET_TOKEN set, it is a GPU of that studio: use `lease.run(function)` or `lease.open()` there.
    """
    settings = settings or load_settings()
    words: dict[str, Any] = {
        "count": count,
        "exclusivity": exclusivity,
        "tier": tier,
        "wait": wait,
        "least": least,
        "tenant": tenant,
        "job": job,
        "hold_cap": hold_cap,
        "holder": holder,
        "on_wait": on_wait,
        "on_offer": on_offer,
    }
    if settings["url"]:
        if parse_spread(spread) is Spread.OK:
            raise BadInput("a studio's leases are of one machine", remedy="leave spread out, or SUBLET_URL")
        return studio_of(settings).gpu(vram, ttl, **words)
    return local_gpu(vram, ttl, **words, spread=spread, settings=settings, placed=placement(settings))


def studio_of(settings: Settings) -> Studio:
    """The studio the settings name. Imported late: most programs never need one."""
    from sublet.remote.studio import connected

    return connected(settings["url"], settings["token"])


def local_gpu(
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
    spread: str = "no",
    placed: Placement | None = None,
    settings: Settings | None = None,
) -> GpuRequest:
    """As `gpu`, of this machine, whatever SUBLET_URL and SUBLET_PLACEMENT say: for everything that must be where the device is. With `placed`,
    of any host of that placement."""
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
    if placed is not None and holder in (None, "worker"):
        request = replace(request, host="")
    if parse_spread(spread) is Spread.OK and count > 1:
        request = replace(request, host="", spread=Spread.OK)
    return GpuRequest(settings, request, holder=holder, on_wait=on_wait, on_offer=on_offer, placed=placed)


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

_lock = threading.Lock()
_warm: dict[tuple[object, ...], Warm] = {}

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _disabled_by_file() -> bool:
    return load_settings().disabled


def _disabled() -> bool:
    """The variable counts at every call, as tests and debuggers set it; the file is read once, as a call must not cost that. Inside
    `sublet run` the process has its GPU already, and is contained like a worker."""
    if contained():
        return True
    said = os.environ.get("SUBLET_DISABLE")
    return switched_on(said) if said else _disabled_by_file()


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

    def acquire(ttl_us: int) -> HeldLease:
        return gpu(vram, ttl_us / 1e6, holder="worker", **options)._keep()

    def warm() -> Warm:
        # Also where it is leased: with another SUBLET_URL it is another GPU.
        where = tuple(os.environ.get(f"SUBLET_{name}", "") for name in ("URL", "TOKEN", "PLACEMENT"))
        key = (vram, where, *sorted((name, str(value)) for name, value in options.items()))
        with _lock:
            return _warm.setdefault(key, Warm(acquire))

    return on_gpu_decorator(function, warm, ttl, batch=batch, options=options, known=gpu, plainly=_disabled)


def release_warm() -> None:
    """Give back every GPU kept warm for `on_gpu`."""
    with _lock:
        kept = list(_warm.values())
    for warm in kept:
        with warm.lock, contextlib.suppress(SubletError):
            warm.release()


atexit.register(release_warm)


@functools.cache
def _release_before_it_leaves() -> None:
    """What places workers takes its leave at the end of the process too, and what was registered last is done first."""
    atexit.register(release_warm)
