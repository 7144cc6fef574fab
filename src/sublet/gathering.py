"""A gang whose workers are placed: asked for by name, granted anywhere, then a worker on each of its hosts.

Rules of this file:
- All members or none: a host that cannot start its worker gives the whole gang back, and it is asked for again.
- The ledger may believe in a host a while longer than whoever places workers does. Until it does not any more, asking again would be granted the
  same: so that is waited for, and not for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from sublet.core.device import DeviceState
from sublet.core.errors import NotPlaced, WorkerLost
from sublet.core.gang import Seat, seats_of
from sublet.ports.ledger import Ledger
from sublet.ports.placement import Placement
from sublet.ports.worker import Worker
from sublet.runtime.holding import Lease
from sublet.runtime.members import Members
from sublet.settings import Settings

LOOK_SECONDS = 0.25
#: Beyond what the policy gives a silent host: for its warden's last beat, and for somebody to notice.
MARGIN_SECONDS = 15.0


def gather(
    settings: Settings,
    ledger: Ledger,
    placed: Placement,
    ask: Callable[[], Lease],
    move_in: Callable[[Lease, Worker], None],
) -> Lease:
    """`ask` is granted a lease, kept; `move_in` makes workers its holder."""
    give_up = time.monotonic() + ledger.policy().host_silence_us / 1e6 + MARGIN_SECONDS
    while True:
        lease = ask()
        try:
            hosts = {d.id: d.host for d in ledger.devices()}
            seats = ledger.seats(lease.id) or seats_of(lease._row.slices, hosts)
            lease._hosts = tuple(seat.host for seat in seats)
            move_in(lease, _seated(settings, lease, seats, ledger, placed))
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
) -> Worker:
    workers: list[tuple[Worker, Mapping[str, str]]] = []
    try:
        for seat in seats:
            if seat.host not in placed.hosts():
                raise NotPlaced(f"host {seat.host} is not up")
            workers.append((placed.start(seat.host), _of_its_own(settings, seat)))
            answer = ledger.seat(lease.key, workers[-1][0].holder)
            if len(seats) == 1:
                lease._seated(answer)
    except BaseException:
        for worker, _ in workers:
            worker.end("it was not seated")
        raise
    return Members(workers, at=placed.address(seats[0].host))


def _of_its_own(settings: Settings, seat: Seat) -> dict[str, str]:
    """What only this member sees: its devices, its host; and where to commit what the gang has done."""
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
    """That a host which places nothing grants nothing either."""
    while time.monotonic() < give_up:
        up = placed.hosts()
        believed = {d.host for d in ledger.devices() if d.state is DeviceState.READY and d.free_bytes}
        if believed <= up:
            return
        time.sleep(LOOK_SECONDS)
    raise why
