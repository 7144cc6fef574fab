"""What users call: `sublet.gpu(...)`.

Rules of this file:
- It turns arguments into a request; `core.leasing.options` reads them.
- It chooses where: on this machine, or in the studio that SUBLET_URL names. And who holds the lease: the
  process itself in a script, a leased worker where the user's own process must not be killed.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sublet.core.errors import BadInput, Misconfigured, NotPlaced, WorkerLost
from sublet.core.leasing.lease import Holder, Request
from sublet.core.leasing.options import DEFAULT_TTL, DEFAULT_VRAM, Duration, GpuOptions, Size
from sublet.core.leasing.tenancy import Tenant
from sublet.core.scheduling.device import could_ever_fit, fit
from sublet.core.scheduling.spread import Spread
from sublet.leases.acquire import OnOffer, OnWait
from sublet.leases.acquire import acquire as acquire_lease
from sublet.leases.gangs.placed_gang import gather
from sublet.leases.keepers import keeper
from sublet.leases.lease import Lease
from sublet.leases.sessions import open_session
from sublet.leases.warden.warden_process import ensure_warden
from sublet.machine import lease_environment
from sublet.ports.ledger import Ledger
from sublet.ports.placement import Placement
from sublet.ports.worker import LeaseHolder
from sublet.processes.sandbox.containment import contained
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, open_ledger, placement, processes, workers

if TYPE_CHECKING:
    from sublet.client.studio import RemoteRequest, Studio


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
        start: Callable[[], LeaseHolder] | None = None,
        environment: Callable[[Lease, LeaseHolder], Mapping[str, str]] | None = None,
        still_wanted: Callable[[], None] = lambda: None,
        lease_id: str = "",
        placed: Placement | None = None,
        place: Callable[[str], LeaseHolder] | None = None,
        record_next_id: Callable[[], str] = lambda: "",
    ) -> None:
        """`placed`: its worker runs where its devices are, on whichever host; else on this one. `place`
        starts it there. `start` makes the worker that will hold it, if not one that is called; `environment`
        adds to what that one sees; `lease_id` was noted somewhere before the lease is asked for, and
        `record_next_id` records and returns the next id, if the host of the first lease cannot take it."""
        if holder not in (None, "process", "worker", "name"):
            raise BadInput(f"holder {holder!r} is unknown: use 'process', 'worker' or 'name'")
        self.request = request
        self._settings = settings
        self._spread = request.spread is Spread.OK and request.count > 1
        if self._spread and placed is None and holder in ("process", "worker"):
            raise BadInput(
                f"devices of several hosts have no {holder} here that could use them all",
                remedy="leave holder out: start a process on each host that calls sublet.join(); or set "
                "SUBLET_PLACEMENT",
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
        self._record_next_id = record_next_id
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
        if self._holder == "worker" and (contained() or lease_environment.process_lease() is not None):
            raise BadInput(
                "a leased worker cannot be started inside another, 'sublet run' or a leased kernel",
                remedy="use the lease there is: this process runs under it already (in a %%gpu cell or a "
                "leased kernel: sublet.lease())",
            )
        if self._placed is not None:
            return self._ask_placed(ledger, self._placed)
        if self._holder != "name":
            self._must_have_its_own(ledger)
        worker = self._start() if self._holder == "worker" else None
        try:
            holder = worker.holder if worker is not None else self._who()
            lease = self._granted(ledger, self.request, holder, self._lease_id)
        except BaseException:
            if worker is not None:
                worker.end("no lease was granted")
            raise
        if worker is not None:
            self._assign_holder(lease, worker)
        # The warden may have left, idle, between our look and our grant.
        ensure_warden(self._settings, wait=False)
        return lease

    def _granted(self, ledger: Ledger, request: Request, holder: Holder, lease_id: str = "") -> Lease:
        return acquire_lease(
            ledger,
            CLOCK,
            request,
            holder,
            on_wait=self._on_wait,
            on_offer=self._on_offer,
            still_wanted=self._still_wanted,
            lease_id=lease_id,
            opener=functools.partial(open_session, self._settings),
        )

    def _must_have_its_own(self, ledger: Ledger) -> None:
        """Where work is placed, a process that holds a GPU itself must be on a node that has one."""
        around = placement(self._settings)
        if around is None:
            return
        around.ready()  # if this is one of its nodes, its devices are in the ledger from here on
        if not ledger.devices(self.request.host):
            raise Misconfigured(
                f"this process would hold a GPU of the machine it runs on, and {self.request.host} is no "
                "node of the cluster with a GPU; "
                "nothing was leased: let the cluster run it, sublet run -- python train.py",
                remedy="sublet run -- python train.py; or call what needs the GPU by on_gpu or "
                "holder='worker'",
            )

    def _ask_placed(self, ledger: Ledger, placed: Placement) -> Lease:
        """Get the grant first, then start a worker where its devices are. A host that cannot start one is not
        tried again: the ledger may take it for alive a while longer than we do."""
        placed.ready()
        if self._spread:
            return gather(
                self._settings, ledger, placed, lambda: self._ask_named(ledger), self._assign_holder
            )
        request, failed = self.request, set[str]()
        down = {device.host for device in ledger.devices()} - placed.hosts()
        # One worker uses them all; and a recorded id must not be granted where it is given back at once.
        if request.count > 1 or (self._lease_id and down):
            request = replace(request, host=self._host_for(ledger, placed, failed))
        lease_id = self._lease_id
        while True:
            lease = self._granted(ledger, request, Holder(host=self._settings["host"]), lease_id)
            host = lease.hosts[0]
            try:
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
            lease_id = self._record_next_id()
            request = replace(request, host=self._host_for(ledger, placed, failed))

    def _ask_named(self, ledger: Ledger) -> Lease:
        lease = self._granted(ledger, self.request, Holder(host=self._settings["host"]))
        keeper(self._settings, ledger).keep(lease)
        return lease

    def _seat(self, lease: Lease, host: str, ledger: Ledger, placed: Placement) -> None:
        if host not in placed.hosts():
            raise NotPlaced(f"host {host} is not up")
        assert self._place is not None
        worker = self._place(host)
        try:
            lease.seated(ledger.seat(lease.key, worker.holder))
        except BaseException:
            worker.end("it was not seated")
            raise
        self._assign_holder(lease, worker)

    def _host_for(self, ledger: Ledger, placed: Placement, failed: set[str]) -> str:
        """Choose a host that is up: one where the request fits now, else one where it could."""
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
                "no node of the cluster can take "
                f"it{': tried ' + ', '.join(sorted(failed)) if failed else ''}"
            )
        return (roomy or large)[0]

    def _assign_holder(self, lease: Lease, worker: LeaseHolder) -> None:
        try:
            lease.adopt(worker, {**self._environment(lease, worker), **child_environment(lease)})
        except BaseException:
            lease.release()
            raise

    def acquire(self) -> Lease:
        """Acquire now. Outside a `with` block the lease counts as idle until it is touched or works."""
        lease = self.hold()
        lease.report(busy=False)
        return lease

    def hold(self) -> Lease:
        """Acquire now, and count as busy from the start: for whoever reports by itself when its work ends."""
        lease = self.ask()
        keeper(self._settings, open_ledger(self._settings)).keep(lease)
        return lease

    def __enter__(self) -> Lease:
        self._lease = self.hold()
        return self._lease.__enter__()

    def __exit__(self, *error: Any) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.__exit__(*error)


def gpu(
    vram: Size = DEFAULT_VRAM,
    ttl: Duration = DEFAULT_TTL,
    *,
    count: int = 1,
    exclusivity: str = "shared",
    tier: str = "interactive",
    wait: Duration | None = None,
    least: Size | None = None,
    tenant: str | None = None,
    job: str = "",
    hold_cap: Duration | None = None,
    holder: str | None = None,
    on_wait: OnWait | None = None,
    on_offer: OnOffer | None = None,
    spread: str = "no",
    settings: Settings | None = None,
) -> GpuRequest | RemoteRequest:
    """A GPU for a while: `with sublet.gpu(vram="16GB", ttl="5m") as lease: ...`

    `vram` may be a range, `"24GB..80GB"`: the most that is free in it, now. `wait` is how long to queue
    (None: as long as it takes, 0: now or `Refused`). The lease is renewed while the block runs, and released
    when it ends.

    `count` devices are of one host. With `spread="ok"` they may be of several, when no single host has them:
    a gang, all or none of it, with one epoch and one end. Its members are called by
    `lease.run_everywhere(function)` where workers are placed (SUBLET_PLACEMENT), else they are processes that
    you start on its hosts and that call `sublet.join()`.

    With SUBLET_URL and SUBLET_TOKEN set, it is a GPU of that studio: use `lease.run(function)` or
    `lease.open()` there.
    """
    settings = settings or load_settings()
    options = GpuOptions(
        vram=vram,
        ttl=ttl,
        count=count,
        exclusivity=exclusivity,
        tier=tier,
        wait=wait,
        least=least,
        tenant=tenant,
        job=job,
        hold_cap=hold_cap,
        holder=holder,
        spread=spread,
    )
    if settings["url"]:
        return studio_of(settings).lease(options, on_wait=on_wait, on_offer=on_offer)
    return local_gpu(
        options, on_wait=on_wait, on_offer=on_offer, placed=placement(settings), settings=settings
    )


def studio_of(settings: Settings) -> Studio:
    """The studio the settings name. Imported late: most programs never need one."""
    from sublet.client.studio import connected

    return connected(settings["url"], settings["token"])


def local_gpu(
    options: GpuOptions | None = None,
    *,
    on_wait: OnWait | None = None,
    on_offer: OnOffer | None = None,
    still_wanted: Callable[[], None] = lambda: None,
    pid: int = 0,
    placed: Placement | None = None,
    settings: Settings | None = None,
) -> GpuRequest:
    """A GPU of this machine, whatever SUBLET_URL and SUBLET_PLACEMENT say, for what must run where the device
    is. With `placed`, of any host of that placement. `pid` is the process that is to hold it, if not this
    one."""
    options, settings = options or GpuOptions(), settings or load_settings()
    anywhere = placed is not None and options.holder in (None, "worker")
    return GpuRequest(
        settings,
        options.request(
            tenant=settings["tenant"],
            host="" if anywhere else settings["host"],
            wants_offers=on_offer is not None,
        ),
        holder=options.holder,
        on_wait=on_wait,
        on_offer=on_offer,
        still_wanted=still_wanted,
        pid=pid,
        placed=placed,
    )


def child_environment(lease: Lease) -> dict[str, str]:
    """The environment of the lease's work. Devices it did not lease are hidden, whatever was inherited."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(d for d in lease.devices if d.startswith("GPU-")),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "SUBLET_LEASE_ID": lease.id,
        "SUBLET_EPOCH": str(lease.epoch),
        "SUBLET_EXPIRES_AT": lease.expires_at.isoformat(),
    }
