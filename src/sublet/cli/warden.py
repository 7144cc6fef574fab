"""`sublet warden`: the host's enforcing loop, in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import time

import click

from sublet.core.errors import Disconnected, WardenRunning
from sublet.core.values import parse_duration
from sublet.settings import load_settings
from sublet.wiring import hold_arenas, make_warden, open_ledger, single_warden


def _log(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} warden[{os.getpid()}] {line}", file=sys.stderr, flush=True)


@click.command(epilog="Example:  sublet warden          (under systemd: Restart=always)")
@click.option("--idle-exit", default=None, help="Leave when nothing was leased here for this long, e.g. 60s.")
def warden(idle_exit: str | None) -> None:
    """The host's enforcing loop (started by itself when needed).

    Reports devices, runs the schedule, watches every holder, ends what outlives its lease. One per host; it survives the
    loss of the ledger, and rebuilds what it knows after its own death.
    """
    settings = load_settings()
    idle_us = parse_duration(idle_exit, what="idle-exit") if idle_exit else None
    while True:
        try:
            with single_warden(settings) as fd, hold_arenas(settings, _log) as arenas:
                keeper = make_warden(settings, idle_exit_us=idle_us, log=_log, needed=arenas.holding)
                ledger = open_ledger(settings)
                if settings.policy is not None and settings.policy != ledger.policy():
                    ledger.set_policy(settings.policy, actor=settings.origin("host"))
                while True:
                    try:
                        keeper.report()
                        break
                    except Disconnected as e:
                        _log(f"waiting for the ledger: {e.message}")
                        time.sleep(1)
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()} ready\n".encode(), 0)
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, lambda *_, leaving=keeper: leaving.stop())
                _log(
                    f"watching {settings['host']}: {', '.join(d.id for d in ledger.devices(settings['host']))}"
                )
                keeper.run()
        except WardenRunning:
            if idle_us is not None:
                return  # somebody else's start won the race
            raise
        # A lease granted while the lock was being given up must not be left unwatched.
        if idle_us is None or not ledger.host_view(settings["host"]).leases:
            return
