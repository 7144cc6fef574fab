"""`sublet doctor`: every setting with its origin, and a check of every part; with `--gpu`, every device tried for real."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.core.device import DeviceState
from sublet.core.errors import BadInput, DeviceFault, Misconfigured, NotFound, Refused, SubletError
from sublet.core.values import format_size
from sublet.drivers.opening import installed_drivers
from sublet.drivers.selftest import Row, try_device
from sublet.hosting import containment
from sublet.ports.ledger import FoundDevice, Ledger
from sublet.settings import SPECS, Settings, load_settings
from sublet.wiring import CLOCK, ensure_warden, find_host_devices, open_ledger, warden_state

Check = tuple[str, str, str]  # part, ok|warn|fail, what was seen


def _shown(settings: Settings, name: str, secret: bool) -> str:
    value = settings[name]
    if secret and value:
        return "(set)"
    if "://" in value and "@" in value:
        scheme, _, rest = value.partition("://")
        who, _, where = rest.rpartition("@")
        return f"{scheme}://{who.split(':')[0]}@{where}"
    return value or "-"


def _median_ms(call: Callable[[], object], times: int = 15) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return sorted(taken)[times // 2] * 1000


def _check_python() -> Iterator[Check]:
    yield "python", "ok", f"{sys.version.split()[0]} at {sys.executable}"
    yield (
        ("process watch", "ok", "pidfd")
        if hasattr(os, "pidfd_open") and sys.platform == "linux"
        else ("process watch", "fail", "no pidfd: leases can be held here only on Linux 5.3 or newer")
    )


def _check_containment() -> Iterator[Check]:
    found = containment.available()
    if found == [containment.SUBREAPER]:
        yield (
            "containment",
            "warn",
            "subreaper only: no cgroup v2 to write in and no user namespaces; a hostile worker could leave a daemon behind",
        )
    else:
        yield "containment", "ok", f"workers are contained by {' and '.join(found)}"


def _write_through(ledger: Ledger, host: str) -> None:
    ledger.beat_host(host)
    ledger.barrier()


def _check_ledger(settings: Settings) -> Iterator[Check]:
    try:
        ledger = open_ledger(settings)
        seen = ledger.describe()
        yield "ledger", "ok", ", ".join(f"{k} {v}" if k != "engine" else v for k, v in seen.items())
        yield "ledger read", "ok", f"{_median_ms(ledger.now):.2f} ms"
        yield "ledger to disk", "ok", f"{_median_ms(lambda: _write_through(ledger, settings['host'])):.2f} ms"
        skew = ledger.now() - CLOCK.wall_us()
        drifted = abs(skew) > 5_000_000
        yield (
            "clock",
            "warn" if drifted else "ok",
            f"the ledger's clock is {skew / 1e6:+.3f} s from this machine's"
            + ("; harmless for leases, odd to read" if drifted else ""),
        )
        result = ledger.verify()
        yield (
            "journal",
            "fail" if result.faults else "ok",
            f"{result.rows} rows, {len(result.faults)} fault(s)"
            + ("; run 'sublet journal verify'" if result.faults else ""),
        )
        yield from _check_devices(settings, ledger)
    except SubletError as e:
        yield "ledger", "fail", f"{e.message}; {e.remedy}"


def _check_devices(settings: Settings, ledger: Ledger) -> Iterator[Check]:
    try:
        found = find_host_devices(settings)
        yield "devices here", "ok", ", ".join(f"{d.id} ({format_size(d.capacity_bytes)})" for d in found)
        ensure_warden(settings)
        _, ready, pid = warden_state(settings)
        yield "warden", "ok" if ready else "fail", f"pid {pid}" if ready else "not running"
        if os.geteuid() != 0:
            yield "teardown", "warn", "not root: this warden can end only processes of its own user"
        else:
            yield "teardown", "ok", "may end any process"
        for d in ledger.devices(settings["host"]):
            if d.state is not DeviceState.READY:
                yield d.id, "warn", f"{d.state.value}: {d.note}"
    except SubletError as e:
        yield "devices here", "fail", f"{e.message}; {e.remedy}"


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
    failed = [f"{r.check} on {d.id}" for d, rows in results for r in rows if r.status == "fail"]
    if failed:
        raise DeviceFault(
            f"{len(failed)} check(s) failed: {', '.join(failed)}",
            remedy="see the lines marked fail; do not lease such a device: 'sublet quarantine set' withholds it",
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
    checks = [*_check_python(), *_check_containment(), *_check_ledger(settings)]
    if as_json:
        print_json(
            {
                "settings": [{"name": n, "value": v, "origin": o} for n, v, o, _ in values],
                "checks": [{"part": p, "status": s, "seen": w} for p, s, w in checks],
            }
        )
    else:
        print_table(["SETTING", "VALUE", "FROM", "WHAT"], values, empty="")
        click.echo()
        print_table(["PART", "STATUS", "SEEN"], checks, empty="")
    failed = [part for part, status, _ in checks if status == "fail"]
    if failed:
        raise Misconfigured(
            f"{len(failed)} part(s) do not work: {', '.join(failed)}", remedy="see the lines marked fail"
        )
