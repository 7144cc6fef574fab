"""`sublet doctor` on placement: where leased workers run, and whether they can.

Rules of this file:
- `local` is this machine, and checked with it. Anything else is a plug-in of `sublet.placements`, by the
  address's scheme: it is opened with the address and the ledger's, made ready, and asked for its hosts.
- A host counts when its devices are in the ledger that this machine looks at: one whose warden reports
  elsewhere is of no use here.
"""

from __future__ import annotations

from collections.abc import Iterator

from sublet.cli.doctor.checks import Check, fail, failed, ok, warn
from sublet.core.errors import SubletError
from sublet.core.scheduling.device import DeviceState
from sublet.core.values import format_size
from sublet.settings import Settings
from sublet.wiring import open_ledger, plug_in


def placed_here(settings: Settings) -> bool:
    return settings["placement"].strip() in ("", "local")


def check_placement(settings: Settings) -> Iterator[Check]:
    if placed_here(settings):
        yield ok("placement", "workers run on this machine")
        return
    where = settings["placement"].strip()
    scheme = where.partition(":")[0]
    if settings["ledger"].startswith("sqlite:"):
        yield fail(
            "placement",
            f"workers run on {scheme}, and the ledger is a file of this machine",
            "set SUBLET_LEDGER=postgresql://…, which every node reaches",
        )
        return
    try:
        placement = plug_in("sublet.placements", scheme)(where, settings["ledger"])
        placement.ready()
        hosts = sorted(placement.hosts())
    except SubletError as e:
        yield failed("placement", e)
        return
    except Exception as e:  # an engine of somebody else's, and any of its errors
        yield fail(
            "placement",
            f"{scheme} does not answer: {type(e).__name__}: {str(e)[:200]}",
            f"check SUBLET_PLACEMENT and that the {scheme} cluster can be reached from here",
        )
        return
    if not hosts:
        yield fail("placement", f"{scheme} has no host that could start a worker", "start its nodes")
        return
    yield ok("placement", f"{scheme}, {len(hosts)} node(s): {', '.join(hosts)}")
    try:
        yield from _nodes(settings, hosts)
    except SubletError as e:
        yield failed("placement", e)


def _nodes(settings: Settings, hosts: list[str]) -> Iterator[Check]:
    devices = open_ledger(settings).devices()
    for host in hosts:
        there = [d for d in devices if d.host == host]
        ready = [f"{d.id} ({format_size(d.capacity_bytes)})" for d in there if d.state is DeviceState.READY]
        if ready:
            yield ok(f"node {host}", ", ".join(ready))
        else:
            seen = (
                "no device is ready" if there else "its warden reports to another ledger, or found no device"
            )
            yield warn(f"node {host}", seen, "see warden.log in SUBLET_HOME there")
    for host in sorted({d.host for d in devices if d.state is DeviceState.READY} - set(hosts)):
        yield warn(
            f"host {host}",
            "in the ledger, and not a node of the cluster: nothing can be placed there",
            "run work on it by itself, or let it join the cluster",
        )
