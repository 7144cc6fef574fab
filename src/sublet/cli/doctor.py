"""`sublet doctor`: every setting with its origin, and a check of every part."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.core.device import DeviceState
from sublet.core.errors import Misconfigured, SubletError
from sublet.core.values import format_size
from sublet.ports.ledger import Ledger
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


@click.command(epilog="Example:  sublet doctor --json")
@json_option
def doctor(as_json: bool) -> None:
    """Every setting with its origin, and a check of every part."""
    settings = load_settings()
    values = [
        (s.variable, _shown(settings, s.name, s.secret), settings.origin(s.name), s.help) for s in SPECS
    ]
    checks = [*_check_python(), *_check_ledger(settings)]
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
