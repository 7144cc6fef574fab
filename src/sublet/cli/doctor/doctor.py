"""`sublet doctor`: every setting with its origin, and a check of every part; with `--gpu`, every device tried
for real.

The ledger, the stores and the placement are checked by the files of these names in this folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import click

from sublet.cli.doctor.checks import Check, fail, failed, ok, warn
from sublet.cli.doctor.ledger import check_ledger
from sublet.cli.doctor.placement import check_placement, placed_here
from sublet.cli.doctor.stores import check_stores
from sublet.cli.output import json_option, print_json, print_table
from sublet.core.errors import (
    BadInput,
    DeviceFault,
    DeviceTaken,
    Misconfigured,
    NotFound,
    Refused,
    SubletError,
)
from sublet.core.leasing.device_claim import taken_words
from sublet.core.scheduling.device import DeviceState
from sublet.core.values import format_size
from sublet.devices.opening import installed_drivers
from sublet.devices.selftest import Row, try_device
from sublet.leases.warden.warden_process import ensure_warden, warden_health
from sublet.ports.ledger import FoundDevice
from sublet.processes.sandbox import containment
from sublet.settings import SPECS, Settings, load_settings
from sublet.wiring import device_locks, find_host_devices, open_ledger


def _shown(settings: Settings, name: str, secret: bool) -> str:
    value = settings[name]
    if secret and value:
        return "(set)"
    if "://" in value and "@" in value:
        scheme, _, rest = value.partition("://")
        who, _, where = rest.rpartition("@")
        return f"{scheme}://{who.split(':')[0]}@{where}"
    return value or "-"


def _check_python() -> Iterator[Check]:
    yield ok("python", f"{sys.version.split()[0]} at {sys.executable}")
    yield (
        ok("process watch", "pidfd")
        if hasattr(os, "pidfd_open") and sys.platform == "linux"
        else fail("process watch", "no pidfd", "leases can be held here only on Linux 5.3 or newer")
    )


def _check_containment() -> Iterator[Check]:
    found = containment.available()
    if found == [containment.SUBREAPER]:
        yield warn(
            "containment",
            "subreaper only: no cgroup v2 to write in and no user namespaces; a hostile worker could leave "
            "a daemon behind",
            "run as root or under systemd with Delegate=yes, or allow user namespaces",
        )
    else:
        yield ok("containment", f"workers are contained by {' and '.join(found)}")


def _check_devices(settings: Settings) -> Iterator[Check]:
    try:
        drivers = installed_drivers()
        found = find_host_devices(settings, drivers)
        yield ok("devices here", ", ".join(f"{d.id} ({format_size(d.capacity_bytes)})" for d in found))
        for driver in drivers.values():
            for seen in driver.passed_over():
                yield warn(
                    driver.name, f"not used: {seen}", "a newer version of its libraries may know this machine"
                )
        ensure_warden(settings)
        warden = warden_health(settings)
        yield (
            fail("warden", warden.problem, "'sublet warden --status' shows its loops; its log says more")
            if warden.problem
            else ok("warden", f"pid {warden.pid}, all its loops turn")
        )
        if os.geteuid() != 0:
            yield warn(
                "teardown",
                "not root: this warden can end only processes of its own user",
                "fine where everybody is this user; else run 'sublet warden' as root",
            )
        else:
            yield ok("teardown", "may end any process")
        yield from _check_locks(settings, found)
        for d in open_ledger(settings).devices(settings["host"]):
            if d.state not in (DeviceState.READY, DeviceState.TAKEN):
                yield warn(
                    d.id, f"{d.state.value}: {d.note}", "'sublet gpus' and 'sublet quarantine' say more"
                )
    except SubletError as e:
        yield failed("devices here", e)


def _check_locks(settings: Settings, found: Sequence[FoundDevice]) -> Iterator[Check]:
    """A physical device is granted by one ledger of a machine. Who that is, everybody can see."""
    locks = device_locks(settings)
    for device in found:
        if not device.physical:
            continue
        kept, holder = locks.holder(device.physical)
        if not kept:
            yield warn(
                "device lock",
                f"{device.id} has none: another ledger of this machine could grant it too",
                f"let this user write in {locks.folder}; the warden's log says what is in the way",
            )
        elif locks.is_ours(holder):
            assert holder is not None
            yield ok(
                "device lock",
                f"{device.id} is granted by this ledger: user {holder.user}, home {holder.home}, "
                f"warden pid {holder.pid}",
            )
        else:
            yield warn("device lock", taken_words(device.id, holder), DeviceTaken.remedy)


def _everything(settings: Settings) -> list[Check]:
    ledger = list(check_ledger(settings))
    reachable = ledger[0].status == "ok" and ledger[-1].part != "ledger"
    return [
        *_check_python(),
        *_check_containment(),
        *ledger,
        *(_check_devices(settings) if reachable and placed_here(settings) else ()),
        *check_stores(settings),
        *check_placement(settings),
    ]


def _try_devices(settings: Settings, only: str, force: bool) -> Iterator[tuple[FoundDevice, list[Row]]]:
    """The self-test of each device; one that is leased is left alone unless forced."""
    known = installed_drivers()
    found = find_host_devices(settings, known)
    chosen = [d for d in found if only in ("", d.id)]
    if not chosen:
        raise NotFound(
            f"this host has no device {only[:60]!r}", remedy=f"it has {', '.join(d.id for d in found)}"
        )
    leases = {d.id: d.leases for d in open_ledger(settings).devices(settings["host"])}
    for device in chosen:
        if leases.get(device.id) and not force:
            yield device, [Row("-", "skip", f"{leases[device.id]} live lease(s): it was not touched")]
        else:
            yield device, list(try_device(known[device.driver], device))


def _doctor_gpu(settings: Settings, only: str, force: bool, as_json: bool) -> None:
    results = list(_try_devices(settings, only, force))
    if as_json:
        print_json(
            {
                "devices": [
                    {
                        "id": d.id,
                        "driver": d.driver,
                        "name": d.name,
                        "checks": [{"check": r.check, "status": r.status, "seen": r.seen} for r in rows],
                    }
                    for d, rows in results
                ]
            }
        )
    else:
        table = [(d.id, r.check, r.status, r.seen) for d, rows in results for r in rows]
        print_table(["DEVICE", "CHECK", "STATUS", "SEEN"], table, empty="")
    broken = [f"{r.check} on {d.id}" for d, rows in results for r in rows if r.status == "fail"]
    if broken:
        raise DeviceFault(
            f"{len(broken)} check(s) failed: {', '.join(broken)}",
            remedy="see the lines marked fail; do not lease such a device: 'sublet quarantine set' "
            "withholds it",
        )
    if all(r.status == "skip" for _, rows in results for r in rows):
        raise Refused(
            "nothing was tried: every device is leased", remedy="wait for the leases to end, or add --force"
        )


@click.command(epilog="Example:  sublet doctor --json")
@click.option("--gpu", is_flag=True, help="Instead, try every device of this host for real. Leases nothing.")
@click.option("--device", default="", metavar="ID", help="With --gpu: only this device.")
@click.option("--force", is_flag=True, help="With --gpu: also devices with live leases, which it disturbs.")
@json_option
def doctor(gpu: bool, device: str, force: bool, as_json: bool) -> None:
    """Every setting with its origin, and a check of every part."""
    settings = load_settings()
    if gpu:
        _doctor_gpu(settings, device, force, as_json)
        return
    if device or force:
        raise BadInput("--device and --force go with --gpu", remedy="add --gpu")
    values = [
        (s.variable, _shown(settings, s.name, s.secret), settings.origin(s.name), s.help) for s in SPECS
    ]
    checks = _everything(settings)
    if as_json:
        print_json(
            {
                "settings": [{"name": n, "value": v, "origin": o} for n, v, o, _ in values],
                "checks": [asdict(c) for c in checks],
            }
        )
    else:
        print_table(["SETTING", "VALUE", "FROM", "WHAT"], values, empty="")
        click.echo()
        print_table(["PART", "STATUS", "SEEN"], [(c.part, c.status, c.seen) for c in checks], empty="")
        remedies = [c for c in checks if c.remedy]
        if remedies:
            click.echo("\nWhat to do:")
        for c in remedies:
            click.echo(f"  {c.part}: {c.remedy}")
    broken = [c.part for c in checks if c.status == "fail"]
    if broken:
        raise Misconfigured(
            f"{len(broken)} part(s) do not work: {', '.join(broken)}",
            remedy="see 'What to do', or 'remedy' in the JSON",
        )
