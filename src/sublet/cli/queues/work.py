"""`sublet work QUEUE module:function`: items of a queue on a leased GPU, drained and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, TextIO

import click

from sublet.core.leasing.options import GpuOptions
from sublet.core.notice import DEFAULT_GRACE
from sublet.core.runs.exits import PROFILES
from sublet.leases.progress_line import WorkLine
from sublet.queues.build_worker import WorkOptions, go, prepare
from sublet.settings import load_settings


class _Printed:
    """Standard output, knowing whether what the target printed ended its line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.at_line_start = True

    def write(self, text: str) -> int:
        if text:
            self.at_line_start = text.endswith("\n")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@click.command(epilog="Example:  sublet work images model.py:Classifier --vram 8GB --batch 16 --until-empty")
@click.argument("queues", metavar="QUEUE[,QUEUE…]")
@click.argument("target", metavar="MODULE:NAME")
@click.option(
    "--vram", default="1GiB", show_default=True, help="Per device; a range 8GB..16GB takes what is free."
)
@click.option("--count", "--gpus", "count", default=1, show_default=True, help="Devices, all or none.")
@click.option("--tier", default="batch", show_default=True, help="interactive, batch or spot.")
@click.option(
    "--ttl", default="5m", show_default=True, help="A lease that is not renewed for this long is over."
)
@click.option(
    "--grace",
    default=DEFAULT_GRACE,
    show_default=True,
    help="From a notice to having left, everything given back.",
)
@click.option(
    "--wait",
    default=None,
    help="How long to queue for a GPU, e.g. 30m; 0: now or exit 75. Default: for ever.",
)
@click.option(
    "--batch",
    default=None,
    type=int,
    help="Call the target with a list of up to this many items; it returns a list of results.",
)
@click.option(
    "--visibility",
    default=None,
    help="How long an item stays with a worker that says nothing. Default: the queue's.",
)
@click.option(
    "--until-empty", is_flag=True, help="Leave when nothing is ready, delayed or with another worker."
)
@click.option("--most", default=None, type=int, help="Leave after this many items.")
@click.option("--idle", default=None, help="Leave after this long without an item, e.g. 10m.")
@click.option("--sink", default=None, metavar="URL", help="Where results go besides the ledger.")
@click.option(
    "--broker", default=None, metavar="URL", help="Where items come from that other programs publish."
)
@click.option("--tenant", default=None, help="The tenant it is for.")
@click.option(
    "--exit-profile", "profile", default="default", show_default=True, help=", ".join(PROFILES) + "."
)
@click.option("--json", "as_json", is_flag=True, help="A summary as the last line, as JSON; and no progress.")
@click.pass_context
def work(context: click.Context, /, queues: str, target: str, as_json: bool, **options: Any) -> None:
    """Work off a queue on a leased GPU; start more of them, anywhere, to go faster.

    TARGET is module:function, or path/to/file.py:name, called with an item and returning what JSON can hold.
    A class is made once per lease: setup(self) loads the model, process(self, item) works, teardown(self)
    ends it; the first and the last may be missing. With --batch it is called with a list and returns a list.

    An item that raises is tried again later and is dead after the queue's tries, with its traceback; the
    others of its batch are not held up. When the lease is taken, or the process is told to leave (SIGTERM, a
    spot notice, a time limit), a batch that can finish in time does; the others are given back at once.
    Several queues are served in turn.

    The GPU is given back while there is nothing to do, and leased again when there is. Without --until-empty,
    --most or --idle it works until it is told to leave.

    Exit codes: 0 done, 85 told to leave with everything given back, 75 no lease, 2 the target cannot be
    loaded.
    """
    gpu = GpuOptions.take_from(options)
    prepared = prepare(WorkOptions(queues=queues, target=target, gpu=gpu, **options), load_settings())
    line = WorkLine(None if as_json else sys.stderr, queues)
    printed = _Printed(sys.stdout)
    with contextlib.redirect_stdout(printed):
        left = go(prepared, line)
    if as_json:
        if not printed.at_line_start:
            click.echo()
        click.echo(json.dumps({"queues": queues.split(","), "pid": os.getpid(), **left.to_json()}))
    else:
        line.say(left.summary())
    context.exit(left.exit_code)
