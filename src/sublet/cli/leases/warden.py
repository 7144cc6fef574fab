"""`sublet warden`: the host's enforcing loop, in the foreground."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.core.errors import BadInput, Disconnected, Misconfigured, NotDurable, WardenRunning
from sublet.core.notice import Notice
from sublet.core.values import SECOND_US, format_duration, parse_duration
from sublet.leases.warden.warden import Warden
from sublet.leases.warden.warden_process import make_warden, single_warden, warden_health, watch_loops
from sublet.machine.private_files import make_private_folder
from sublet.machine.process_log import ProcessLog
from sublet.processes.arenas import ArenaHolder
from sublet.processes.loop_watch import LoopBeats
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, hold_arenas, open_ledger, open_notice_bus

#: How much of a machine's last time is kept for writing the last Receipts.
MARGIN_US = 3 * SECOND_US


_log = ProcessLog("warden")


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
@click.option(
    "--status", is_flag=True, help="Instead, say whether this host's warden runs and its loops turn."
)
@json_option
def warden(
    idle_exit: str | None, drain: str | None, system: bool, for_pid: int, status: bool, as_json: bool
) -> None:
    """The host's enforcing loop (started by itself when needed).

    Reports devices, runs the schedule, watches every holder, ends what outlives its lease. One per host; it
    survives the loss of the ledger, and rebuilds what it knows after its own death.

    SIGTERM ends it and nothing else: leases go on, and the next warden looks after them. With --drain it
    gives the host back instead; it then also hears Slurm's time limit, Kubernetes and the clouds, and leaves
    in time.

    A warden whose loop has died or hangs ends itself, as does one whose home was deleted or unmounted; the
    next lease, the studio or systemd starts another. --status exits with 78 when something is wrong.
    """
    settings = load_settings()
    if status:
        _print_status(settings, as_json)
        return
    grace_us = parse_duration(drain, what="drain") if drain else None
    if system and idle_exit:
        raise BadInput("--system and --idle-exit exclude each other", remedy="leave one of them out")
    if grace_us is not None and idle_exit:
        raise BadInput("--drain and --idle-exit exclude each other", remedy="leave one of them out")
    idle_us = parse_duration(idle_exit, what="idle-exit") if idle_exit else None
    make_private_folder(settings.home)
    while True:
        try:
            _serve(settings, idle_us, grace_us, system=system, for_pid=for_pid)
        except WardenRunning:
            if idle_us is not None:
                return  # somebody else's start won the race
            raise
        # A lease granted while the lock was being given up must not be left unwatched.
        if idle_us is None or not open_ledger(settings).host_view(settings["host"]).leases:
            return


def _serve(
    settings: Settings, idle_us: int | None, grace_us: int | None, *, system: bool, for_pid: int
) -> None:
    beats = LoopBeats(CLOCK)
    with (
        single_warden(settings, system=system) as fd,
        hold_arenas(settings, _log, beats) as arenas,
        contextlib.ExitStack() as leaving,
    ):
        keeper = make_warden(
            settings, idle_exit_us=idle_us, log=_log, needed=partial(_needed, arenas, for_pid), beats=beats
        )
        watch = leaving.enter_context(
            watch_loops(settings, fd, beats, _log, keeper.has_deadlines, system=system)
        )
        _report(settings, keeper)
        watch.say_ready()
        if grace_us is not None:
            _leave_when_told(settings, keeper, grace_us, leaving)
        else:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_, ending=keeper: ending.stop())
        devices = open_ledger(settings).devices(settings["host"])
        _log(f"watching {settings['host']}: {', '.join(d.id for d in devices)}")
        keeper.run()


def _report(settings: Settings, keeper: Warden) -> None:
    """Wait for a ledger that cannot be reached, or cannot be written because its disk is full."""
    while True:
        try:
            ledger = open_ledger(settings)
            if settings.policy is not None and settings.policy != ledger.policy():
                ledger.set_policy(settings.policy, actor=settings.origin("host"))
            keeper.report()
            return
        except (Disconnected, NotDurable) as e:
            _log(f"waiting for the ledger: {e.message}")
            time.sleep(1)


def _print_status(settings: Settings, as_json: bool) -> None:
    found = warden_health(settings)
    if as_json:
        silent = {name: us / 1e6 for name, us in found.silent_us.items()}
        print_json({"pid": found.pid, "problem": found.problem, "silent_seconds": silent})
    else:
        print_table(
            ["LOOP", "LAST TURN"],
            [(name, f"{format_duration(us)} ago") for name, us in found.silent_us.items()],
            empty="",
        )
    if found.problem:
        raise Misconfigured(
            f"the warden of this host does not do its work: {found.problem}",
            remedy="'sublet doctor' says what it waits for; where none runs, the next lease or "
            "'sublet warden' starts one",
        )
    if not as_json:
        click.echo(f"the warden of {settings['host']} runs (pid {found.pid}), and all its loops turn")
