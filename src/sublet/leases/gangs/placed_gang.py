"""A gang whose workers are placed: asked for by name, granted anywhere, then a worker on each of its hosts.

Rules of this file:
- All members or none: a host that cannot start its worker gives the whole gang back, and it is asked for
  again.
- The ledger may take a host for alive a while longer than the placement does. Until then a new request would
  be granted the same host, so this is waited for, within a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from sublet.core.errors import NotPlaced, WorkerLost
from sublet.core.leasing.gang import Seat, seats_of
from sublet.core.scheduling.device import DeviceState
from sublet.leases.gangs.members import Members
from sublet.leases.lease import Lease
from sublet.ports.ledger import Ledger
from sublet.ports.placement import Placement
from sublet.ports.worker import LeaseHolder, Worker
from sublet.settings import Settings

LOOK_SECONDS = 0.25
#: Added to the time the policy gives a silent host: its warden's last beat, and a delay until it shows.
MARGIN_SECONDS = 15.0


def gather(
    settings: Settings,
    ledger: Ledger,
    placed: Placement,
    ask: Callable[[], Lease],
    assign_holder: Callable[[Lease, LeaseHolder], None],
) -> Lease:
    """`ask` is granted a lease, kept; `assign_holder` makes workers its holder."""
    give_up = time.monotonic() + ledger.policy().host_silence_us / 1e6 + MARGIN_SECONDS
    while True:
        lease = ask()
        try:
            hosts = {d.id: d.host for d in ledger.devices()}
            seats = ledger.seats(lease.id) or seats_of(lease.slices, hosts)
            assign_holder(lease, _seated(settings, lease, seats, ledger, placed))
            return lease
        except (NotPlaced, WorkerLost) as e:
            lease.release()
            if isinstance(e, WorkerLost) and e.begun:
                raise
            _wait_until_it_is_known(ledger, placed, give_up, e)
        except BaseException:
            lease.release()
            raise


def _seated(
    settings: Settings, lease: Lease, seats: Sequence[Seat], ledger: Ledger, placed: Placement
) -> Members:
    workers: list[tuple[Worker, Mapping[str, str]]] = []
    try:
        for seat in seats:
            if seat.host not in placed.hosts():
                raise NotPlaced(f"host {seat.host} is not up")
            workers.append((placed.start(seat.host), _of_its_own(settings, seat)))
            answer = ledger.seat(lease.key, workers[-1][0].holder)
            if len(seats) == 1:
                lease.seated(answer)
    except BaseException:
        for worker, _ in workers:
            worker.end("it was not seated")
        raise
    return Members(workers, at=placed.address(seats[0].host))


def _of_its_own(settings: Settings, seat: Seat) -> dict[str, str]:
    """The variables of this member alone: its devices, its host, and where to commit the gang's work."""
    found = {
        "CUDA_VISIBLE_DEVICES": ",".join(s.device_id for s in seat.slices if s.device_id.startswith("GPU-")),
        "SUBLET_HOST": seat.host,
        "SUBLET_LEDGER": settings["ledger"],
        "SUBLET_TENANT": settings["tenant"],
    }
    if settings.origin("store") != "default":
        found["SUBLET_STORE"] = settings["store"]
    return found


def _wait_until_it_is_known(ledger: Ledger, placed: Placement, give_up: float, why: Exception) -> None:
    """Wait until the ledger grants nothing on a host that can start no worker."""
    while time.monotonic() < give_up:
        up = placed.hosts()
        believed = {d.host for d in ledger.devices() if d.state is DeviceState.READY and d.free_bytes}
        if believed <= up:
            return
        time.sleep(LOOK_SECONDS)
    raise why
