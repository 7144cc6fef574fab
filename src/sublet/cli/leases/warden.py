"""`sublet warden`: the host's enforcing loop, in the foreground."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from functools import partial

import click

from sublet.core.errors import BadInput, Disconnected, WardenRunning
from sublet.core.notice import Notice
from sublet.core.values import SECOND_US, parse_duration
from sublet.leases.warden.warden import Warden
from sublet.leases.warden.warden_process import make_warden, single_warden
from sublet.processes.arenas import ArenaHolder
from sublet.processes.pid_lock import say_ready
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, hold_arenas, open_ledger, open_notice_bus

#: How much of a machine's last time is kept for writing the last Receipts.
MARGIN_US = 3 * SECOND_US


def _log(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} warden[{os.getpid()}] {line}", file=sys.stderr, flush=True)


def _needed(arenas: ArenaHolder, pid: int) -> bool:
    return arenas.holding() or (pid > 0 and os.path.exists(f"/proc/{pid}"))


def _leave_when_told(
    settings: Settings, keeper: Warden, grace_us: int, leaving: contextlib.ExitStack
) -> None:
    """SIGTERM, SIGINT, and whoever SUBLET_NOTICES lets say that this machine goes: Slurm, Kubernetes, a
    cloud."""

    def told(notice: Notice) -> None:
        now = CLOCK.monotonic_us()
        left_us = max(0, notice.deadline_us - now)
        keeper.leave(notice.reason, now + min(grace_us, max(left_us // 2, left_us - MARGIN_US)))

    bus = open_notice_bus(settings, grace_us=grace_us + MARGIN_US)
    leaving.enter_context(bus)
    bus.on_notice(told)


@click.command(epilog="Example:  sublet warden          (under systemd: Restart=always)")
@click.option("--idle-exit", default=None, help="Leave when nothing was leased here for this long, e.g. 60s.")
@click.option("--for-pid", default=0, hidden=True, help="Do not leave while this process lives.")
@click.option(
    "--drain",
    default=None,
    metavar="GRACE",
    help="Told to leave, give the host back: grant nothing more, revoke its leases with this grace, "
    "leave when they are settled.",
)
@click.option(
    "--system",
    is_flag=True,
    help="The machine's own, for all its users: it says so in /run/sublet, and nobody starts another.",
)
def warden(idle_exit: str | None, drain: str | None, system: bool, for_pid: int) -> None:
    """The host's enforcing loop (started by itself when needed).

    Reports devices, runs the schedule, watches every holder, ends what outlives its lease. One per host; it
    survives the loss of the ledger, and rebuilds what it knows after its own death.

    SIGTERM ends it and nothing else: leases go on, and the next warden looks after them. With --drain it
    gives the host back instead; it then also hears Slurm's time limit, Kubernetes and the clouds, and leaves
    in time.
    """
    settings = load_settings()
    grace_us = parse_duration(drain, what="drain") if drain else None
    if system and idle_exit:
        raise BadInput("--system and --idle-exit exclude each other", remedy="leave one of them out")
    if grace_us is not None and idle_exit:
        raise BadInput("--drain and --idle-exit exclude each other", remedy="leave one of them out")
    idle_us = parse_duration(idle_exit, what="idle-exit") if idle_exit else None
    while True:
        try:
            with (
                single_warden(settings, system=system) as fd,
                hold_arenas(settings, _log) as arenas,
                contextlib.ExitStack() as leaving,
            ):
                keeper = make_warden(
                    settings, idle_exit_us=idle_us, log=_log, needed=partial(_needed, arenas, for_pid)
                )
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
                say_ready(fd)
                if grace_us is not None:
                    _leave_when_told(settings, keeper, grace_us, leaving)
                else:
                    for number in (signal.SIGTERM, signal.SIGINT):
                        signal.signal(number, lambda *_, ending=keeper: ending.stop())
                _log(
                    f"watching {settings['host']}: "
                    f"{', '.join(d.id for d in ledger.devices(settings['host']))}"
                )
                keeper.run()
        except WardenRunning:
            if idle_us is not None:
                return  # somebody else's start won the race
            raise
        # A lease granted while the lock was being given up must not be left unwatched.
        if idle_us is None or not ledger.host_view(settings["host"]).leases:
            return
