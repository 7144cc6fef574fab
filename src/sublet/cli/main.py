"""`sublet …`: which module has which command, and how an error is reported.

Rules of this file:
- Commands are loaded when called, so `sublet --help` imports none of them.
- Every `SubletError` becomes one sentence and its remedy on stderr, and an exit code by family. No traceback.
- So does an error of the system that says that a place cannot be used: a full disk, a read-only one.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

import click

from sublet.core.errors import (
    BadInput,
    DeviceFault,
    Disconnected,
    InvariantBroken,
    LeaseLost,
    Misconfigured,
    NotDurable,
    Refused,
    ResumeDiffers,
    Stale,
    SubletError,
    Unauthorized,
)
from sublet.core.file_modes import unusable

#: Family to exit code; the nearest ancestor in this table wins.
EXIT_CODES: dict[type[SubletError], int] = {
    BadInput: 2,
    Disconnected: 69,
    InvariantBroken: 70,
    DeviceFault: 71,
    Stale: 73,
    NotDurable: 74,
    Refused: 75,
    LeaseLost: 76,
    Unauthorized: 77,
    Misconfigured: 78,
    ResumeDiffers: 79,
    SubletError: 1,
}

#: Command to (module, its line in --help). The order is the order of --help.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "demo.demo",
        "A tour of about a minute: trains through every kind of loss, and proves that nothing was lost.",
    ),
    "run": ("runs.run", "Any command under a lease: told before it is lost, started again after it."),
    "logs": ("runs.runs", "What a run printed; -f follows it over every restart."),
    "attach": ("runs.runs", "Follow a run live; Ctrl-C detaches."),
    "cancel": ("runs.runs", "Tell a run to leave; said twice, it is killed."),
    "work": (
        "queues.work",
        "Work off a queue: a GPU leased, the model kept loaded, items batched, drained when told.",
    ),
    "gpus": ("leases.listings", "Devices: what is free, who is on them, what is withheld."),
    "ps": ("leases.listings", "Leases and waiters, each with its reason."),
    "lease": ("leases.lease", "Acquire, renew, release or show one lease."),
    "revoke": ("leases.operate", "Take a lease back, with a reason and a grace."),
    "quarantine": ("leases.operate", "Devices withheld after a teardown that was not proven."),
    "checkpoint": (
        "checkpoints.checkpoint",
        "Saved states: list them, look into them, verify and repair their copies.",
    ),
    "block": ("leases.block", "Block leases: durable values by locator; list, look into, remove, sweep."),
    "queue": (
        "queues.queue",
        "Queues of items, each done once: publish, look, redrive, purge, pause, export, prove.",
    ),
    "audit": ("runs.audit", "Prove from the ledger that every step and effect was committed once."),
    "report": ("studio.report", "Goodput, waste, losses, refunds and cost, by job, tenant, tier or day."),
    "drill": (
        "runs.drill",
        "Run a command undisturbed and under losses, and compare: bit-equal, and proven.",
    ),
    "sim": ("sim.sim", "Replay a recorded workload in virtual time, with the decisions of the live system."),
    "tenant": ("studio.tenant", "Who may lease: add, list, change, remove."),
    "quota": ("studio.tenant", "What a tenant may hold and what it has used."),
    "price": ("studio.price", "What a GPU-hour costs, by device class and tier."),
    "journal": ("ledger.journal", "Every decision, hash-chained: follow it, verify it, seal it."),
    "migrate": ("ledger.migrate", "Bring the ledger to this version; back it up, put a backup back."),
    "serve": (
        "studio.serve",
        "The studio over HTTP: sessions, dashboard, events and the page, for many tenants.",
    ),
    "warden": ("leases.warden", "The host's enforcing loop (started by itself when needed)."),
    "doctor": ("doctor.doctor", "Every setting with its origin, and a check of every part."),
}


def exit_code(error: SubletError) -> int:
    return next(EXIT_CODES[cls] for cls in type(error).__mro__ if cls in EXIT_CODES)


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = import_module(f"sublet.cli.{COMMANDS[name][0]}")
        command: click.Command = getattr(module, name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # before click makes a failure of it
            _reader_is_gone()
            raise click.exceptions.Exit(0) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Try first:  sublet demo",
)
@click.version_option(package_name="sublet", message="sublet %(version)s")
def cli() -> None:
    """Borrow a GPU for minutes. Lose it at any moment. Lose nothing."""


def complain(error: SubletError, *, as_json: bool) -> None:
    if as_json:
        shape = {"error": {"code": error.code, "message": error.message, "remedy": error.remedy}}
        print(json.dumps(shape), file=sys.stderr)
        return
    print(f"sublet: {error.message}", file=sys.stderr)
    if error.remedy:
        print(f"        {error.remedy}", file=sys.stderr)


def _reader_is_gone() -> None:
    """The reader may leave, as in `sublet ps | head`: the rest of the output is dropped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _say_the_rest() -> None:
    """Where nobody reads any more, behind a pipe or on a terminal that was closed, it is dropped: the exit
    code says how it went."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def main() -> None:
    try:
        code = cli.main(prog_name="sublet", standalone_mode=False)
    except SubletError as error:
        complain(error, as_json="--json" in sys.argv)
        code = exit_code(error)
    except click.exceptions.Exit as leaving:
        code = leaving.exit_code
    except click.ClickException as usage:
        usage.show()
        code = usage.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        _reader_is_gone()
        code = 0
    except OSError as error:
        meant = unusable(str(error.filename or "the home of sublet"), error.errno)
        if meant is None:
            raise
        complain(meant, as_json="--json" in sys.argv)
        code = exit_code(meant)
    _say_the_rest()
    sys.exit(code if isinstance(code, int) else 0)
