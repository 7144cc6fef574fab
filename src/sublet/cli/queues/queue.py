"""`sublet queue …`: what an operator does to a queue: list, pause, redrive, purge. The other verbs are in the
files next to it."""

from __future__ import annotations

import sys

import click

from sublet.cli.leases.operate import actor
from sublet.cli.output import json_option, print_json, print_table
from sublet.cli.progress import progress_bar
from sublet.cli.queues.audit import audit
from sublet.cli.queues.export import results
from sublet.cli.queues.publish import publish
from sublet.cli.queues.view import peek, rate_of, show, stats
from sublet.core.errors import BadInput
from sublet.core.queues.items import ItemState
from sublet.json_shapes import queue_json
from sublet.ports.items import QueueRecord, QueueStats
from sublet.queues.opening import queue as open_queue
from sublet.settings import load_settings
from sublet.wiring import open_ledger


@click.group()
def queue() -> None:
    """Queues of items, each done once: publish, look, redrive, purge, pause, export, prove."""


@queue.command("ls", epilog="Example:  sublet queue ls --json")
@json_option
def ls(as_json: bool) -> None:
    """Every queue of your tenant, with what is in it."""
    settings = load_settings()
    ledger = open_ledger(settings)
    found = [(record, ledger.queue_stats(record.id)) for record in ledger.queues(settings["tenant"])]
    if as_json:
        print_json([queue_json(record, now) for record, now in found])
        return
    print_table(
        ["QUEUE", "READY", "DELAYED", "LEASED", "DONE", "DEAD", "RATE", "WORKERS", "STATE"],
        [_listed(record, now) for record, now in found],
        empty="no queues; 'sublet queue publish NAME ITEM…' makes one",
        optional=("DELAYED", "LEASED", "DEAD", "RATE", "WORKERS"),
    )


def _listed(record: QueueRecord, now: QueueStats) -> tuple[object, ...]:
    counts = (now.ready, now.delayed, now.leased, now.done, now.dead)
    return (record.name, *counts, rate_of(now), now.workers, "paused" if record.paused else "open")


for _command in (publish, show, peek, stats, results, audit):
    queue.add_command(_command)


# --- operating ----------------------------------------------------------------------------------------------


def _pause(name: str, paused: bool, as_json: bool) -> None:
    found = open_queue(name)
    if paused:
        found.pause(actor=actor())
    else:
        found.resume(actor=actor())
    if as_json:
        print_json({"queue": name, "paused": paused})
    elif paused:
        leased = found.stats().leased
        told = f"; {leased} handed out before may still be completed" if leased else ""
        click.echo(f"{name} is paused: nothing is handed out{told}")
    else:
        click.echo(f"{name} hands out items again")


@queue.command("pause", epilog="Example:  sublet queue pause images")
@click.argument("name", metavar="QUEUE")
@json_option
def pause(name: str, as_json: bool) -> None:
    """Hand out nothing until 'resume'. Publishing goes on, and what was handed out may be completed."""
    _pause(name, True, as_json)


@queue.command("resume", epilog="Example:  sublet queue resume images")
@click.argument("name", metavar="QUEUE")
@json_option
def resume(name: str, as_json: bool) -> None:
    """Hand out items of a paused queue again."""
    _pause(name, False, as_json)


@queue.command("redrive", epilog="Example:  sublet queue redrive images 17 23")
@click.argument("name", metavar="QUEUE")
@click.argument("items", metavar="[ITEM]…", type=click.IntRange(min=1), nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every dead item of the queue.")
@json_option
def redrive(name: str, items: tuple[int, ...], everything: bool, as_json: bool) -> None:
    """Make dead items ready again, with all their tries, at the end of the queue.

    'peek --state dead' lists them; the cause of their death should be gone.
    """
    if bool(items) == everything:
        raise BadInput(
            "say which items to redrive, or --all",
            remedy=f"'sublet queue peek {name[:80]} --state dead' lists the dead ones",
        )
    moved = open_queue(name).redrive(items or None, actor=actor())
    if as_json:
        print_json({"queue": name, "redriven": moved})
        return
    wanted = len(set(items))
    more = f"; {wanted - moved} of those named are not dead, and were left alone" if moved < wanted else ""
    click.echo(f"{moved} item{'s' * (moved != 1)} of {name} made ready again{more}")


#: What `--state` means. Never those that somebody has, unless they are named.
PURGED = {state.value: (state,) for state in ItemState} | {
    "all": (ItemState.READY, ItemState.DELAYED, ItemState.DONE, ItemState.DEAD)
}


@queue.command("purge", epilog="Example:  sublet queue purge images --state dead")
@click.argument("name", metavar="QUEUE")
@click.option(
    "--state",
    type=click.Choice(["dead", "done", "ready", "delayed", "leased", "all"]),
    required=True,
    help="Which items. all: every one that nobody is working on; leased: those that somebody is.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def purge(name: str, state: str, yes: bool, as_json: bool) -> None:
    """Forget items for good. Done ones go with their results, and their keys may be published again.

    A worker that has a purged item gets its result refused.
    """
    found = open_queue(name)
    now = found.stats()
    counts = {one.value: getattr(now, one.value) for one in PURGED[state]}
    there = sum(counts.values())
    if there and not yes:
        _ask(name, counts)
    with progress_bar(rate=True) as progress:
        gone = found.purge(
            *PURGED[state], actor=actor(), on_progress=lambda n: progress(f"purging {name}", n, there)
        )
    if as_json:
        print_json({"queue": name, "state": state, "purged": gone})
        return
    click.echo(f"{gone} item{'s' * (gone != 1)} of {name} forgotten")
    if state == "all" and now.leased:
        click.echo(f"{now.leased} that somebody has were left: say --state leased for those")


def _ask(name: str, counts: dict[str, int]) -> None:
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    if not sys.stdin.isatty():
        raise BadInput(
            f"{told} of {name} would be forgotten for good, and nobody is there to be asked",
            remedy="say --yes if that is meant",
        )
    lost = " Their results are forgotten too." if counts.get("done") else ""
    lost += " Work on them that is under way is wasted." if counts.get("leased") else ""
    if not click.confirm(f"Forget {told} of {name} for good?{lost}", err=True):
        click.echo("nothing was forgotten", err=True)
        raise click.exceptions.Exit(1)
