"""`sublet logs`, `attach` and `cancel`, and the table of `sublet ps --runs`: commands for a run in the
background."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import click

from sublet.cli.output import instant, json_option, print_json, print_table
from sublet.core.errors import BadInput, Misconfigured
from sublet.core.runs.exits import KILLED_CODE
from sublet.core.values import format_duration, parse_duration
from sublet.machine.run_folder import RunFolder, all_runs, find_run
from sublet.processes.ladder import read_stat
from sublet.settings import Settings, load_settings

LOOK_SECONDS = 0.05
#: How long a supervisor may take to end the command and write `exit.json` after its run is gone.
LOST_SECONDS = 5.0
#: How long the process that wrote `exit.json` may take to end.
LAST_LINE_SECONDS = 2.0
TAIL_BYTES = 1 << 20


def _is(pid: int, started: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.started == started and stat.state != "Z"


def _signal(pid: int, started: int, number: int) -> bool:
    """Signal exactly that process."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _is(pid, started):
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


def alive(facts: dict[str, Any]) -> bool:
    """Whether anything of the run lives: its own process, or the supervisor that outlived it."""
    pid, started = facts.get("supervisor", (0, 0))
    return _is(int(facts.get("pid", 0)), int(facts.get("process_started", 0))) or _is(int(pid), int(started))


def state_of(run: RunFolder, host: str) -> str:
    facts, left = run.facts(), run.exit()
    if left:
        return str(left.get("outcome", "ended"))
    if facts.get("host") == host and not alive(facts):
        return "lost"
    return str(facts.get("state", "starting"))


# --- following ----------------------------------------------------------------------------------------------


def _with_log(wanted: str) -> tuple[Settings, RunFolder]:
    settings = load_settings()
    run = find_run(settings.home, wanted)
    if not run.log.exists():
        raise BadInput(
            f"run {run.id} has no log: its output went to the terminal it was started from",
            remedy="start it with -d to have one",
        )
    return settings, run


def _from_line(path: Path, lines: int | None) -> int:
    """The offset at which the last lines begin."""
    size = path.stat().st_size
    if lines is None:
        return 0
    with path.open("rb") as file:
        begin = max(0, size - TAIL_BYTES)
        file.seek(begin)
        tail = file.read()
    kept = tail.splitlines(keepends=True)
    return begin + sum(map(len, kept[: max(0, len(kept) - lines)])) if kept else size


def _copy(file: Any) -> bool:
    some = False
    while chunk := file.read(65536):
        sys.stdout.buffer.write(chunk)
        some = True
    if some:
        sys.stdout.buffer.flush()
    return some


def _follow(settings: Settings, run: RunFolder, begin: int) -> int:
    """Everything from there on, over every restart, until the run has ended; its exit code."""
    silent_since = time.monotonic()
    with run.log.open("rb") as file:
        file.seek(begin)
        while True:
            left, facts = run.exit(), run.facts()
            if left and not (alive(facts) and time.monotonic() - silent_since < LAST_LINE_SECONDS):
                _copy(file)
                return int(left["exit_code"])
            _copy(file)
            if left:  # its last line comes after that
                time.sleep(LOOK_SECONDS)
                continue
            if facts.get("host") != settings["host"] or alive(facts):
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since > LOST_SECONDS:
                click.echo(f"sublet: run {run.id} was killed, and nothing of it is left", err=True)
                return KILLED_CODE
            time.sleep(LOOK_SECONDS)


def _detached(run: RunFolder) -> NoReturn:
    click.echo(f"\nsublet: detached; run {run.id} goes on, 'sublet cancel {run.id}' ends it", err=True)
    raise click.exceptions.Exit(0)


@click.command(epilog="Example:  sublet logs -f resnet")
@click.argument("wanted", metavar="RUN")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends, and leave with its exit code.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=None, help="Only this many lines, the last ones."
)
def logs(wanted: str, follow: bool, lines: int | None) -> None:
    """What a run started with -d has printed, over all its restarts. RUN is its id or its name."""
    settings, run = _with_log(wanted)
    begin = _from_line(run.log, lines)
    if not follow:
        with run.log.open("rb") as file:
            file.seek(begin)
            _copy(file)
        return
    try:
        code = _follow(settings, run, begin)
    except KeyboardInterrupt:
        _detached(run)
    raise click.exceptions.Exit(code)


@click.command(epilog="Example:  sublet attach resnet")
@click.argument("wanted", metavar="RUN")
def attach(wanted: str) -> None:
    """Follow a run that was started with -d, from its last lines on. Leaves with its exit code.

    Ctrl-C detaches and the run goes on: 'sublet cancel' is what ends it.
    """
    settings, run = _with_log(wanted)
    facts = run.facts()
    click.echo(
        f"sublet: run {run.id} ({facts.get('name')}) is {state_of(run, settings['host'])}; Ctrl-C detaches, "
        "the run goes on",
        err=True,
    )
    try:
        code = _follow(settings, run, _from_line(run.log, 20))
    except KeyboardInterrupt:
        _detached(run)
    raise click.exceptions.Exit(code)


# --- cancelling ---------------------------------------------------------------------------------------------


@click.command(epilog="Example:  sublet cancel resnet --grace 60s")
@click.argument("wanted", metavar="RUN")
@click.option("--now", is_flag=True, help="Without grace: every process of it is killed at once.")
@click.option("--grace", default=None, help="Time to commit and leave. Default: the run's own grace.")
@json_option
def cancel(wanted: str, now: bool, grace: str | None, as_json: bool) -> None:
    """Tell a run to leave: its command drains, and nothing is started again. Said twice, it is killed.

    RUN is its id or its name. A run that has ended is left alone.
    """
    settings = load_settings()
    run = find_run(settings.home, wanted)
    facts, left = run.facts(), run.exit()
    grace_us = parse_duration(grace, what="grace") if grace else None
    if left:
        said = f"run {run.id} has ended already: {left.get('outcome')}"
    elif facts.get("host") != settings["host"]:
        raise Misconfigured(
            f"run {run.id} is on host {facts.get('host')}",
            remedy="cancel it there, or revoke its lease from here",
        )
    elif not alive(facts):
        said = f"run {run.id} was killed before; nothing of it is left"
    else:
        now = now or bool(run.cancelled())
        run.ask_to_cancel(now=now, grace_us=grace_us)
        _signal(facts["pid"], facts["process_started"], signal.SIGTERM)
        if now and "supervisor" in facts:
            # A run that is stopped, or gone, cannot pass it on.
            pid, started = facts["supervisor"]
            _signal(pid, started, signal.SIGTERM)
        told = format_duration(facts["grace_us"] if grace_us is None else grace_us)
        said = f"run {run.id}: " + ("killed" if now else f"told to leave, killed in {told} at the latest")
    if as_json:
        print_json({"run": run.id, "said": said, "ended": bool(left)})
    else:
        click.echo(said)


# --- listing ------------------------------------------------------------------------------------------------


def show_runs(settings: Settings, *, everything: bool, limit: int, as_json: bool) -> None:
    found = []
    for run in all_runs(settings.home):
        state = state_of(run, settings["host"])
        if everything or (not run.exit() and state != "lost"):
            found.append((run, run.facts(), run.exit(), state))
    found = found[:limit]
    if as_json:
        print_json([facts | {"state": state, "exit": left or None} for _, facts, left, state in found])
        return
    rows = []
    for run, facts, left, state in found:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            began = float(facts["started_at"])
            until = float(left["ended_at"]) if left else time.time()
            rows.append(
                (
                    run.id,
                    facts["name"],
                    state,
                    instant(int(began * 1e6)),
                    format_duration(int(max(0.0, until - began) * 1e6)),
                    facts.get("restarts", 0) if not left else left["restarts"],
                    facts.get("lease", "-"),
                    " ".join(facts["command"])[:60],
                )
            )
    print_table(
        ["RUN", "NAME", "STATE", "STARTED", "TIME", "RESTARTS", "LEASE", "COMMAND"], rows, empty="no runs"
    )
