"""`sublet run … -- command`: any script, leased, signalled, requeued, resumed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

import click

from sublet.cli.leases.lease import show_wait
from sublet.cli.output import print_json
from sublet.core.errors import Misconfigured
from sublet.core.leasing.options import GpuOptions
from sublet.core.notice import DEFAULT_GRACE
from sublet.core.runs.exits import PROFILES
from sublet.core.scheduling.admission import Wait
from sublet.core.values import format_duration
from sublet.processes.daemonize import last_line, spawn_detached
from sublet.processes.sandbox.containment import contained
from sublet.runs.build import CommandNotRun, PreparedRun, RunOptions, go, prepare, resumable, would_lease
from sublet.settings import load_settings

START_SECONDS = 30.0


def _say(text: str) -> None:
    # A terminal that was closed must not end what it started.
    with contextlib.suppress(OSError, ValueError):
        line = "\r\033[K" if sys.stderr.isatty() else ""  # the place in the waitlist may stand there
        print(f"{line}sublet: {text}", file=sys.stderr, flush=True)


class _Waiting:
    """Shows the place in the waitlist: a line per change in a file, one line that is redrawn on a
    terminal."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, wait: Wait) -> None:
        text = f"{wait.position} {wait.reason}"
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr.isatty() or text != self._last:
                show_wait(wait)
        self._last = text


@click.command(
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog="Example:  sublet run --vram 16GB --tier spot --restarts 3 -- python train.py",
)
@click.option(
    "--vram", default="1GiB", show_default=True, help="Per device; a range 8GB..16GB takes what is free."
)
@click.option("--count", "--gpus", "count", default=1, show_default=True, help="Devices, all or none.")
@click.option("--least", default=None, help="Take a smaller slice, down to this, rather than wait.")
@click.option("--tier", default="batch", show_default=True, help="interactive, batch or spot.")
@click.option("--exclusivity", default="shared", show_default=True, help="shared, session or device.")
@click.option("--tenant", default=None, help="The tenant it is for.")
@click.option(
    "--ttl", default="5m", show_default=True, help="A lease that is not renewed for this long is over."
)
@click.option(
    "--grace", default=DEFAULT_GRACE, show_default=True, help="From a notice to the end of every process."
)
@click.option(
    "--wait", default=None, help="How long to queue, e.g. 30m; 0: now or exit 75. Default: for ever."
)
@click.option(
    "--time",
    default=None,
    help="The command's time over all restarts, e.g. 2:00:00; told one grace before.",
)
@click.option("--restarts", default=0, show_default=True, help="After failures, until it makes progress.")
@click.option(
    "--preemptions", default=None, type=int, help="The most restarts after a lost lease. Default: no limit."
)
@click.option("--backoff", default="1s", show_default=True, help="Before the first restart; doubles to 1m.")
@click.option(
    "--drained",
    multiple=True,
    type=int,
    default=(85,),
    show_default=True,
    help="Exit codes that mean: told to leave, saved, run me again.",
)
@click.option("--name", default="", help="The job's name: shown everywhere, and SUBLET_JOB for the command.")
@click.option("--checkpoint", default=None, help="SUBLET_CHECKPOINT_DIR. Default: one folder per name.")
@click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="For the command.")
@click.option(
    "--exit-profile", "profile", default="default", show_default=True, help=", ".join(PROFILES) + "."
)
@click.option(
    "--resume",
    is_flag=True,
    help="The command is a Python script: go on where it was, bit for bit (the shim).",
)
@click.option(
    "-d", "--detach", is_flag=True, help="Print the run's id and leave; its output goes to its log."
)
@click.option("--dry-run", is_flag=True, help="Say what would be leased; lease and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="exit.json as the last line of standard error.")
@click.option("--as", "run_id", default="", hidden=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context,
    /,
    command: tuple[str, ...],
    resume: bool,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    run_id: str,
    **options: Any,
) -> None:
    """Run a command under a lease, to its end.

    The command is told of every loss before it happens: its main process gets SIGTERM, and SUBLET_NOTICE_FILE
    says why and until when. At the deadline everything it started is gone. After a lost lease another one is
    asked for and the command is started again, with SUBLET_RESTART_COUNT one higher; after a failure, only as
    often as --restarts says.

    Exit codes: 0 done, 85 preempted and committed, 75 no lease, 124 time limit, 137 killed after its grace,
    126/127 the command cannot be run, else the command's own. exit.json in the run's folder says it in words.

    Ctrl-C tells the command to leave, and a second Ctrl-C ends it. A closed terminal tells it to leave,
    unless it was started with -d.
    """
    settings = load_settings()
    if contained():
        raise Misconfigured(
            "this process is inside a run already", remedy="start the command itself: it has a lease already"
        )
    gpu = GpuOptions.take_from(options)
    try:
        wanted = RunOptions(command=resumable(command) if resume and command else command, gpu=gpu, **options)
        prepared = prepare(wanted, settings, run_id=run_id, unbuffered=bool(run_id))
    except CommandNotRun as e:
        from sublet.cli.main import complain

        complain(e, as_json=as_json)
        context.exit(e.exit_code)
    if dry_run:
        _show_plan(prepared, as_json)
        return
    if detach:
        _detach(prepared, len(command), as_json)
        return
    told = (lambda text: None) if as_json else _say
    told(
        f"run {prepared.folder.id}; notices give the command {format_duration(prepared.terms.grace_us)} to "
        "leave"
    )
    left = go(prepared, detached=bool(run_id), say=told, on_wait=None if as_json else _Waiting())
    if as_json:
        with contextlib.suppress(OSError):
            print(json.dumps(prepared.folder.exit()), file=sys.stderr)
    elif left.outcome.value != "done":
        told(f"{left.outcome.value}: {left.reason}")
    context.exit(left.exit_code)


def _show_plan(prepared: PreparedRun, as_json: bool) -> None:
    sentence, free = would_lease(prepared)
    if as_json:
        request = prepared.request.request
        print_json(
            {
                "free_now": free,
                "sentence": sentence,
                "vram_bytes": request.vram_bytes,
                "count": request.count,
                "tier": request.tier.value,
                "tenant": request.tenant,
                "command": list(prepared.command),
                "executable": prepared.executable,
            }
        )
        return
    click.echo(sentence)


def _detach(prepared: PreparedRun, words: int, as_json: bool) -> None:
    """The same command line again, in a session of its own, with its output in the run's log."""
    folder = prepared.folder
    folder.make()
    arguments = sys.argv[1:]
    ours = arguments[1 : len(arguments) - words]
    if ours and ours[-1] == "--":
        ours.pop()
    ours = [a for a in ours if a not in ("-d", "--detach", "--resume")]
    again = [sys.executable, "-m", "sublet", "run", "--as", folder.id, *ours, "--", *prepared.command]
    pid = spawn_detached(again, dict(os.environ), folder.log, os.getcwd())
    deadline = time.monotonic() + START_SECONDS
    while not folder.facts():
        if not os.path.exists(f"/proc/{pid}") and not folder.facts():
            raise Misconfigured(
                f"the run could not start: {last_line(folder.log)}", remedy=f"see {folder.log}"
            )
        if time.monotonic() > deadline:
            raise Misconfigured("the run did not start in time", remedy=f"see {folder.log}")
        time.sleep(0.01)
    if as_json:
        print_json({"run": folder.id, "name": prepared.name, "log": str(folder.log), "pid": pid})
    else:
        click.echo(folder.id)
