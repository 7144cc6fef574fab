"""`sublet queue show|peek|stats`: looking at a queue. Nothing here changes it."""

from __future__ import annotations

import json
import time

import click

from sublet.cli.output import (
    instant,
    json_option,
    on_terminal,
    plain,
    print_fields,
    print_json,
    print_table,
    shortened,
)
from sublet.core.errors import Disconnected
from sublet.core.queues.items import ItemState, from_text
from sublet.core.values import format_duration, parse_duration
from sublet.json_shapes import consumer_json, item_json, queue_json, queue_terms_json
from sublet.ports.items import ConsumerRecord, ItemRecord, QueueRecord, QueueStats
from sublet.queues.opening import queue as open_queue
from sublet.queues.queue import Queue

# --- words --------------------------------------------------------------------------------------------------


def rate_of(now: QueueStats) -> str:
    return f"{now.rate:.1f}/s" if now.rate < 100 else f"{now.rate:.0f}/s"


def eta_of(now: QueueStats) -> str:
    if not now.depth:
        return "nothing is left to do"
    left = now.eta_us
    if left is None:
        return "unknown: nothing was completed recently"
    return f"about {format_duration(left)}"


def _terms(record: QueueRecord) -> str:
    terms = record.terms
    limit = f"{terms.concurrency} at once" if terms.concurrency else "no limit at once"
    return (
        f"visibility {format_duration(terms.visibility_us)}; dead after {terms.tries} failures or "
        f"{terms.losses} losses; "
        f"backoff {format_duration(terms.backoff_us)}; {limit}"
    )


def _counts(now: QueueStats) -> str:
    pairs = [(state.value, getattr(now, state.value)) for state in ItemState]
    return ", ".join(f"{count} {state}" for state, count in pairs)


def oldest_of(now: QueueStats) -> str:
    return (
        f"ready for {format_duration(max(0, now.at - now.oldest_at))}" if now.oldest_at else "none is ready"
    )


def work_of(now: QueueStats) -> str:
    each = f", {now.work_us / 1e6 / now.completed:.3f}s an item" if now.completed else ""
    return f"{now.work_us / 1e6:.1f}s{each}"


# --- show ---------------------------------------------------------------------------------------------------


@click.command(epilog="Example:  sublet queue show images 17")
@click.argument("name", metavar="QUEUE")
@click.argument("item", type=click.IntRange(min=1), required=False)
@json_option
def show(name: str, item: int | None, as_json: bool) -> None:
    """A queue: its terms, what is in it, and who works on it now. With the number of an item: everything of
    that one."""
    found = open_queue(name)
    if item is not None:
        _show_item(found, item, as_json)
        return
    record, now = found.record(), found.stats()
    workers = _workers(found)
    if as_json:
        told = [consumer_json(consumer, has) for consumer, has in workers]
        print_json({**queue_json(record, now), "terms": queue_terms_json(record.terms), "working": told})
        return
    print_fields(
        [
            ("queue", f"{record.name} (tenant {record.tenant}), made {instant(record.created_at)}"),
            ("state", "paused: nothing is handed out" if record.paused else "open"),
            ("terms", _terms(record)),
            ("items", _counts(now)),
            ("oldest", oldest_of(now)),
            ("rate", f"{rate_of(now)} by {now.workers} worker{'s' * (now.workers != 1)}"),
            ("eta", eta_of(now)),
        ]
    )
    if workers:
        click.echo()
        _show_workers(workers)
    if now.dead:
        click.echo(
            f"→ {now.dead} dead: 'sublet queue peek {name} --state dead' lists them, 'redrive' tries them "
            "again"
        )


def _workers(found: Queue) -> list[tuple[ConsumerRecord, int]]:
    """The consumers that have items now, and how many each."""
    has = found.held_by()
    return [(consumer, has.get(consumer.id, 0)) for consumer in found.workers()]


WORKER_COLUMNS = ["CONSUMER", "HOST", "PID", "HAS", "DONE", "FAILED", "REFUSED", "WORK"]


def worker_row(consumer: ConsumerRecord, has: int) -> tuple[object, ...]:
    work = f"{consumer.work_us / 1e6:.1f}s"
    return (
        consumer.id,
        consumer.host,
        consumer.pid or "-",
        has,
        consumer.completed,
        consumer.failed,
        consumer.stale,
        work,
    )


def _show_workers(workers: list[tuple[ConsumerRecord, int]]) -> None:
    print_table(WORKER_COLUMNS, [worker_row(*worker) for worker in workers], empty="")


def _show_item(found: Queue, number: int, as_json: bool) -> None:
    item, now = found.item(number), found.stats().at
    if as_json:
        print_json(item_json(item))
        return
    fields = [
        ("item", f"{item.id} of {found.name}"),
        ("key", item.key or "none"),
        ("state", _state_of(item, now)),
        ("priority", str(item.priority)),
        ("published", instant(item.published_at)),
        ("deliveries", f"{item.delivery}: {item.failures} failed, {item.losses} lost their worker"),
    ]
    if item.state is ItemState.DONE:
        fields.append(
            ("done", f"{instant(item.done_at)}, by consumer {item.owner}, {item.work_us / 1e6:.3f}s of work")
        )
    fields.append(("body", _indented(item.body)))
    if item.result:
        fields.append(("result", _indented(item.result)))
    print_fields(fields)
    if item.error:
        click.echo("\nlast error")
        click.echo(plain(item.error.rstrip()))


def _indented(text: str) -> str:
    value = from_text(text)
    if not isinstance(value, (dict, list)):
        return text
    return json.dumps(value, indent=2).replace("\n", "\n            ")


def _state_of(item: ItemRecord, now: int) -> str:
    left = format_duration(max(0, item.visible_at - now))
    match item.state:
        case ItemState.DELAYED:
            return f"delayed: ready in {left}"
        case ItemState.LEASED if item.visible_at <= now:
            silent = f"consumer {item.owner} has said nothing for its whole visibility"
            return f"leased: {silent}; the next pull gets it"
        case ItemState.LEASED:
            return f"leased: consumer {item.owner} has it, for {left} unless it extends it"
        case ItemState.DEAD:
            return "dead: 'redrive' makes it ready again"
        case ItemState.READY:
            return f"ready for {format_duration(max(0, now - item.place))}"
        case ItemState.DONE:
            return "done"


# --- peek ---------------------------------------------------------------------------------------------------


@click.command(epilog="Example:  sublet queue peek images --state dead -n 20")
@click.argument("name", metavar="QUEUE")
@click.option("-n", "most", type=click.IntRange(1, 10_000), default=10, show_default=True, help="How many.")
@click.option(
    "--state",
    type=click.Choice([state.value for state in ItemState]),
    default="ready",
    show_default=True,
    help="Those that are in this state.",
)
@json_option
def peek(name: str, most: int, state: str, as_json: bool) -> None:
    """Look at items without taking them: ready ones in the order they will be handed out, dead ones with
    their error."""
    found = open_queue(name)
    items = found.peek(most, state=ItemState(state))
    if as_json:
        print_json([item_json(item) for item in items])
        return
    now = found.stats().at
    print_table(
        ["ITEM", "KEY", "PRIO", "TRY", "FAILED", "LOST", *_LAST_COLUMNS[ItemState(state)]],
        [_peeked(item, now) for item in items],
        empty=f"no item of {name} is {state}",
        optional=("KEY", "PRIO", "TRY", "FAILED", "LOST"),
    )


_LAST_COLUMNS = {
    ItemState.READY: ("WAITS", "BODY"),
    ItemState.DELAYED: ("READY", "BODY"),
    ItemState.LEASED: ("WITH", "BODY"),
    ItemState.DONE: ("AGO", "RESULT"),
    ItemState.DEAD: ("AGO", "ERROR"),
}


def _peeked(item: ItemRecord, now: int) -> tuple[object, ...]:
    when = {
        ItemState.READY: format_duration(max(0, now - item.place)),
        ItemState.DELAYED: f"in {format_duration(max(0, item.visible_at - now))}",
        ItemState.LEASED: f"consumer {item.owner}",
        ItemState.DONE: format_duration(max(0, now - item.done_at)),
        ItemState.DEAD: format_duration(max(0, now - item.visible_at)),
    }[item.state]
    said = item.body
    if item.state is ItemState.DEAD:
        said = plain((item.error.strip().splitlines() or ["no error was kept"])[-1])
    elif item.state is ItemState.DONE:
        said = item.result
    key = shortened(item.key, 40) or "-"
    return (item.id, key, item.priority, item.delivery, item.failures, item.losses, when, shortened(said))


# --- stats --------------------------------------------------------------------------------------------------


@click.command(epilog="Example:  sublet queue stats images --watch --until-empty")
@click.argument("name", metavar="QUEUE")
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C, drawn anew each time.")
@click.option(
    "--until-empty", is_flag=True, help="Watch until nothing is left to do; dead items are not waited for."
)
@click.option("--every", default="1s", show_default=True, help="How often to look, with --watch.")
@json_option
def stats(name: str, watch: bool, until_empty: bool, every: str, as_json: bool) -> None:
    """Depth, rate, ETA, failures, refused results and work seconds of a queue.

    With --watch in a pipe, or with --json, a line each time.
    """
    found = open_queue(name)
    pause_us = max(parse_duration(every, what="every"), 50_000)
    if watch or until_empty:
        _watch(found, pause_us, until_empty, as_json)
        return
    record, now = found.record(), found.stats()
    if as_json:
        print_json(queue_json(record, now))
        return
    print_fields(_stats_fields(record, now))


def _stats_fields(record: QueueRecord, now: QueueStats) -> list[tuple[str, str]]:
    return [
        ("queue", f"{record.name}{', paused' if record.paused else ''}"),
        ("depth", f"{now.depth}: {now.ready} ready, {now.delayed} delayed, {now.leased} leased"),
        ("done", f"{now.done}; {now.dead} dead, {now.purged} purged, {now.published} published in all"),
        ("rate", f"{rate_of(now)} by {now.workers} worker{'s' * (now.workers != 1)}"),
        ("eta", eta_of(now)),
        ("oldest", oldest_of(now)),
        ("failures", str(now.failed)),
        ("refused", f"{now.stale} late results, of items that others had by then" if now.stale else "0"),
        ("work", work_of(now)),
    ]


def _watch(found: Queue, pause_us: int, until_empty: bool, as_json: bool) -> None:
    found.record()  # an unknown queue is an error before anything is drawn
    try:
        if on_terminal() and not as_json:
            from sublet.cli.queues.watch import draw

            draw(found, pause_us, until_empty)
            return
        while True:
            record, now = found.record(), found.stats()
            _say_line(record, now, as_json)
            if until_empty and not now.depth:
                return
            time.sleep(pause_us / 1e6)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(0) from None


def _say_line(record: QueueRecord, now: QueueStats, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(queue_json(record, now)))
        return
    parts = [f"{getattr(now, state.value)} {state.value}" for state in ItemState]
    left = now.eta_us
    eta = format_duration(left) if left is not None and now.depth else "-"
    click.echo(f"{instant(now.at)}  {', '.join(parts)}; {rate_of(now)}, eta {eta}, {now.workers} workers")


def look(found: Queue) -> tuple[QueueRecord, QueueStats, list[tuple[ConsumerRecord, int]]] | Disconnected:
    """Everything that is drawn, of about one moment; a ledger that does not answer is not the end of a
    watch."""
    try:
        return found.record(), found.stats(), _workers(found)
    except Disconnected as e:
        return e
