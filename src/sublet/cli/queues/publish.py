"""`sublet queue publish`: items from arguments, lines or files' names into a queue.

Rules of this file:
- Items are read as they are published: never more than a batch of them is in memory, however many there are.
- The first item that cannot be published ends it, named by its line. Everything before it is published,
  nothing behind it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click

from sublet.cli.output import json_option, print_json, shortened
from sublet.cli.progress import Progress, progress_bar
from sublet.core.errors import BadInput, Disconnected, FingerprintMismatch, SubletError, TooLarge
from sublet.core.queues.items import MOST_BYTES, NewItem, check_draft, to_text
from sublet.core.values import format_size, parse_duration
from sublet.queues.opening import queue as open_queue

#: The longest line. JSON may be longer than it is stored: blanks, and characters as escapes.
LONGEST_LINE = 8 * MOST_BYTES
LONGEST_KEY = 512
SHOWN_KEYS = 10
_BOM = b"\xef\xbb\xbf"

#: Where an item was found, and its text.
Found = tuple[str, str]


@click.command(epilog="Example:  sublet queue publish images --glob 'imgs/**/*.png' --key self --tries 3")
@click.argument("name", metavar="QUEUE")
@click.argument("items", metavar="[ITEM]…", nargs=-1)
@click.option(
    "--file", default=None, help="One item a line; '-' is standard input. Empty lines are left out."
)
@click.option("--jsonl", is_flag=True, help="Items are JSON. Without it, an item is a text.")
@click.option(
    "--glob",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="The names of files, e.g. 'imgs/**/*.png'. Can be said several times.",
)
@click.option(
    "--key",
    type=click.Choice(["self"]),
    default=None,
    help="self: an item is published once, however often it is given. Without a key, every time is a "
    "new item.",
)
@click.option(
    "--key-field",
    default=None,
    metavar="NAME",
    help="Items with the same value in this field of their JSON are one item; with other content, a "
    "conflict.",
)
@click.option("--priority", default=0, show_default=True, help="Higher ones are handed out first.")
@click.option("--delay", default="0s", show_default=True, help="Not to be handed out before, e.g. 10m.")
@click.option("--tries", type=int, default=None, help="An item is dead after this many failures. [5]")
@click.option("--losses", type=int, default=None, help="An item is dead after this many lost workers. [20]")
@click.option(
    "--visibility", default=None, help="How long an item stays with a worker that says nothing. [60s]"
)
@click.option("--backoff", default=None, help="Before the second try; doubles with each. [1s]")
@click.option("--concurrency", type=int, default=None, help="The most handed out at once; 0 is no limit. [0]")
@click.option("--broker", default=None, metavar="URL", help="To this broker's queue instead of the ledger's.")
@json_option
def publish(
    name: str,
    items: tuple[str, ...],
    file: str | None,
    jsonl: bool,
    patterns: tuple[str, ...],
    key: str | None,
    key_field: str | None,
    priority: int,
    delay: str,
    tries: int | None,
    losses: int | None,
    visibility: str | None,
    backoff: str | None,
    concurrency: int | None,
    broker: str | None,
    as_json: bool,
) -> None:
    """Publish items to QUEUE, which is made if it is not there.

    They come from the arguments, from a file with one on each line, or are the names of files. Millions are
    fine: they are read as they are published. --tries, --losses, --visibility, --backoff and --concurrency
    are the queue's terms: what is not said stays as it was, and without items only the terms are set.
    """
    if items == ("-",) and file is None:
        items, file = (), "-"
    if sum(map(bool, (items, file, patterns))) > 1:
        raise BadInput("items come from the arguments, from --file or from --glob: say one of them")
    if key and key_field:
        raise BadInput("say --key self or --key-field, not both")
    terms = {"tries": tries, "losses": losses, "concurrency": concurrency}
    durations = {"visibility": visibility, "backoff": backoff}
    target = open_queue(name, broker=broker, **terms, **durations)  # type: ignore[arg-type]
    some_terms = any(value is not None for value in (*terms.values(), *durations.values()))
    if not (items or file or patterns):
        if not some_terms:
            raise BadInput(
                "there is nothing to publish",
                remedy=f"'sublet queue publish {name} ITEM…', '--file F', '--file -' or '--glob PATTERN'",
            )
        target.make()
        _tell_terms(name, as_json)
        return
    if some_terms:
        target.make()  # also with a broker, which knows nothing of terms
    make = _Maker(jsonl, key, key_field, priority, parse_duration(delay, what="delay"))
    done = _Done(name, sent="the broker" if broker else "")
    with contextlib.ExitStack() as stack:
        reading = _opened(stack, file) if file else _numbered(items) if items else _matching(patterns)
        progress = stack.enter_context(progress_bar(rate=True))
        total = _lines_of(file) if file else len(items)
        drafts = _Drafts(reading, make)
        _publish(target.publish_drafts(drafts), done, progress, total)
    _end(done, drafts, file, as_json)


def _tell_terms(name: str, as_json: bool) -> None:
    if as_json:
        print_json({"queue": name, "new": 0, "duplicates": 0, "conflicts": 0, "conflicting": []})
    else:
        click.echo(f"{name}: its terms are set ('sublet queue show {name}'); no item was given")


# --- reading ------------------------------------------------------------------------------------------------


class _Bad(Exception):
    """An item that cannot be published, and why."""

    def __init__(self, where: str, why: SubletError) -> None:
        super().__init__(where)
        self.where, self.why = where, why


def _numbered(items: Iterable[str]) -> Iterator[Found]:
    for number, text in enumerate(items, 1):
        yield f"item {number}", text


def _opened(stack: contextlib.ExitStack, file: str) -> Iterator[Found]:
    if file == "-":
        return _lines(sys.stdin.buffer, "standard input")
    try:
        return _lines(stack.enter_context(Path(file).open("rb")), file)
    except OSError as e:
        raise BadInput(f"{file} cannot be read: {e.strerror}", remedy="nothing was published") from None


def _lines(stream: BinaryIO, name: str) -> Iterator[Found]:
    number = 0
    while True:
        where = f"line {number + 1}"
        try:
            raw = stream.readline(LONGEST_LINE + 2)
        except OSError as e:
            raise _Bad(where, BadInput(f"{name} cannot be read on: {e.strerror}")) from e
        if not raw:
            return
        number += 1
        text = raw.rstrip(b"\r\n")
        if len(text) > LONGEST_LINE:
            most = f"an item has {format_size(MOST_BYTES)} at most"
            raise _Bad(where, TooLarge(f"{where} is longer than {format_size(LONGEST_LINE)}; {most}"))
        if number == 1:
            text = text.removeprefix(_BOM)
        if not text.strip():
            continue
        try:
            yield where, text.decode()
        except UnicodeDecodeError as e:
            raise _Bad(where, BadInput(f"{where} is not UTF-8: {e.reason} at byte {e.start}")) from None


def _matching(patterns: Iterable[str]) -> Iterator[Found]:
    found = False
    for pattern in patterns:
        for path in glob.iglob(os.path.expanduser(pattern), recursive=True):
            if os.path.isfile(path):
                found = True
                yield f"file {path}", path
    if not found:
        raise BadInput(
            f"no file matches {', '.join(patterns)[:200]}",
            remedy="look at the pattern; '**' stands for any folders, and it begins where you are",
        )


def _lines_of(file: str) -> int:
    """About how many there are, for the bar; 0 when nobody can say or nobody looks."""
    if not sys.stderr.isatty() or not Path(file).is_file():
        return 0
    with Path(file).open("rb") as stream:
        return sum(part.count(b"\n") for part in iter(lambda: stream.read(1 << 20), b""))


# --- making -------------------------------------------------------------------------------------------------


def _not_a_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


@dataclass(frozen=True, slots=True)
class _Maker:
    """Turns a text into what is published."""

    jsonl: bool
    key: str | None
    key_field: str | None
    priority: int
    delay_us: int

    def __call__(self, where: str, text: str) -> NewItem:
        body: Any = text
        if self.jsonl:
            try:
                body = json.loads(text, parse_constant=_not_a_number)
            except json.JSONDecodeError as e:
                raise BadInput(f"{where} is not JSON: {e.msg} at character {e.pos + 1}") from None
            except (ValueError, RecursionError) as e:
                raise BadInput(f"{where} is not JSON: {str(e)[:200]}") from None
        written = to_text(body, what=where)
        try:
            return check_draft(
                NewItem(
                    body=written,
                    key=self._key(where, body, written),
                    priority=self.priority,
                    delay_us=self.delay_us,
                )
            )
        except BadInput as e:
            raise e if e.message.startswith(where) else BadInput(f"{where}: {e.message}") from None

    def _key(self, where: str, body: Any, written: str) -> str:
        if self.key_field is not None:
            value = body.get(self.key_field) if isinstance(body, dict) else None
            if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
                raise BadInput(
                    f"{where} has no text or whole number in the field {self.key_field!r}",
                    remedy="'--key-field' is for JSON objects ('--jsonl') that all have it",
                )
            return str(value)
        if self.key == "self":
            text = body if isinstance(body, str) else written
            # What cannot be a key is known by its digest.
            if text and len(text) <= LONGEST_KEY and text.isprintable():
                return text
            return f"sha256:{hashlib.sha256(written.encode()).hexdigest()}"
        return ""


class _Drafts:
    """Items as they are read, up to the first that cannot be published; the reason is kept."""

    def __init__(self, reading: Iterator[Found], make: Callable[[str, str], NewItem]) -> None:
        self._reading, self._make = reading, make
        self.bad: _Bad | None = None

    def __iter__(self) -> Iterator[NewItem]:
        try:
            for where, text in self._reading:
                try:
                    draft = self._make(where, text)
                except SubletError as e:
                    raise _Bad(where, e) from e
                yield draft
        except _Bad as e:
            self.bad = e


# --- publishing ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Done:
    name: str
    sent: str  # to whom, when not to the ledger
    new: int = 0
    duplicates: int = 0
    conflicts: int = 0
    keys: tuple[str, ...] = ()

    @property
    def items(self) -> int:
        return self.new + self.duplicates + self.conflicts

    def words(self) -> str:
        if self.sent:
            return f"{self.new} sent to {self.sent}"
        duplicates = f"{self.duplicates} duplicate{'s' * (self.duplicates != 1)}"
        return f"{self.new} new, {duplicates}, {self.conflicts} conflict{'s' * (self.conflicts != 1)}"


def _publish(batches: Iterator[Any], done: _Done, progress: Progress, total: int) -> None:
    try:
        for some in batches:
            done.new += some.new
            done.duplicates += some.duplicates
            done.conflicts += len(some.conflicts)
            done.keys = (*done.keys, *some.conflicts)[:SHOWN_KEYS]
            progress(f"publishing to {done.name}", done.items, max(total, done.items) if total else 0)
    except KeyboardInterrupt:
        click.echo(f"sublet: stopped; of {done.name}: {done.words()}", err=True)
        raise
    except SubletError as e:
        if not done.items:
            raise
        remedy = e.remedy
        if isinstance(e, Disconnected):
            remedy = f"{remedy}; publish the rest then, or all of it again if it has a key"
        raise type(e)(f"{e.message}. Before that: {done.words()}", remedy=remedy) from e


def _end(done: _Done, drafts: _Drafts, file: str | None, as_json: bool) -> None:
    bad = drafts.bad
    if bad is not None:
        before = "nothing was published" if not done.items else f"everything before it was: {done.words()}"
        remedy = "correct it and publish the rest; with a key, what is there is not published twice"
        if file and file != "-":
            number = bad.where.removeprefix("line ")
            rest = f"tail -n +{number} {file} | sublet queue publish {done.name} --file - …"
            remedy = f"correct it and publish the rest: {rest}"
        own = bad.why.remedy if bad.why.remedy != type(bad.why).remedy else ""
        raise type(bad.why)(f"{bad.why.message}; {before}", remedy=f"{own}; {remedy}" if own else remedy)
    if as_json:
        print_json(
            {
                "queue": done.name,
                "new": done.new,
                "duplicates": done.duplicates,
                "conflicts": done.conflicts,
                "conflicting": list(done.keys),
            }
        )
    else:
        click.echo(f"{done.name}: {done.words()}")
    if done.conflicts:
        shown = ", ".join(shortened(key, 60) for key in done.keys[:3])
        more = " …" if done.conflicts > 3 else ""
        raise FingerprintMismatch(
            f"not published: {done.conflicts} whose key is known with another item ({shown}{more})",
            remedy="use a new key for a new item; what was stored under the key was not touched",
        )
