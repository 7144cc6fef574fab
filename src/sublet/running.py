"""What `sublet run` is made of: words in, a run with its lease, its command and its alarms out.

Rules of this file:
- Everything that can be refused is refused before a lease is asked for: sizes, durations, names, a command that is not there.
- The command sees what it inherited, the settings of this run as variables, and what `--env` says; the lease's own come last.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sublet.borrowing import GpuRequest, local_gpu
from sublet.core.device import fit
from sublet.core.errors import BadInput
from sublet.core.exits import DRAINED_CODE, check_profile
from sublet.core.requeue import Limits
from sublet.core.values import SECOND_US, check_job, check_name, format_size, parse_duration
from sublet.hosting.command import find_executable
from sublet.ports.command import Command
from sublet.ports.placement import CommandOrder
from sublet.runs import RunFolder, new_run_id, prune, runs_folder
from sublet.runtime.acquire import OnWait
from sublet.runtime.alarms import SIGNALS, Alarms
from sublet.runtime.command import Exit, Run, Terms
from sublet.runtime.holding import Lease
from sublet.settings import SPECS, Settings
from sublet.wiring import CLOCK, notice_sources, open_ledger, placement, places, processes, start_command

DEFAULT_GRACE = "15s"
#: torchrun's own kill must come a little before ours, so that it is the one that says what happened.
TORCHRUN_MARGIN_S = 1


class CommandNotRun(BadInput):
    """The command cannot be run; no lease was asked for."""

    code = "command_not_run"
    remedy = (
        "write the command as a shell would find it: a program on PATH, or a path to one that is executable"
    )

    def __init__(self, message: str = "", *, exit_code: int = 127, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What was typed, in words."""

    command: tuple[str, ...]
    vram: str = "1GiB"
    ttl: str = "5m"
    count: int = 1
    exclusivity: str = "shared"
    tier: str = "batch"
    wait: str | None = None
    least: str | None = None
    tenant: str | None = None
    name: str = ""
    grace: str = DEFAULT_GRACE
    time: str | None = None
    restarts: int = 0
    preemptions: int | None = None
    backoff: str = "1s"
    drained: tuple[int, ...] = (DRAINED_CODE,)
    profile: str = "default"
    environment: tuple[str, ...] = ()
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Checked: nothing of it can be refused any more but by the ledger."""

    settings: Settings
    request: GpuRequest
    folder: RunFolder
    name: str
    command: tuple[str, ...]
    named: Mapping[str, str]  # what --env says
    executable: str
    terms: Terms
    checkpoint: Path


def prepare(wish: Wish, settings: Settings, *, run_id: str = "", unbuffered: bool = False) -> Prepared:
    if not wish.command:
        raise BadInput(
            "there is no command to run",
            remedy="write it after --:  sublet run --vram 8GB -- python train.py",
        )
    check_profile(wish.profile)
    name = check_job(wish.name) if wish.name else ""
    if wish.restarts < 0 or (wish.preemptions is not None and wish.preemptions < 0):
        raise BadInput("--restarts and --preemptions must not be negative: 0 is never")
    if any(not 0 < code < 256 for code in wish.drained):
        raise BadInput("--drained must be an exit code from 1 to 255; 0 is always done")
    run_id = check_name(run_id, what="run id") if run_id else new_run_id()
    job = name or run_id
    request = local_gpu(
        wish.vram,
        wish.ttl,
        count=wish.count,
        exclusivity=wish.exclusivity,
        tier=wish.tier,
        wait=wish.wait,
        least=wish.least,
        tenant=wish.tenant,
        job=job,
        holder="worker",
        placed=placement(settings),
        settings=settings,
    )
    grace_us = parse_duration(wish.grace, what="grace")
    checkpoint = Path(wish.checkpoint).absolute() if wish.checkpoint else settings.home / "checkpoints" / job
    environment = dict(os.environ)
    if unbuffered:
        environment.setdefault("PYTHONUNBUFFERED", "1")  # whoever follows a log wants to see it now
    environment |= {
        "SUBLET_GRACE_SECONDS": f"{grace_us / SECOND_US:g}",
        "SUBLET_CHECKPOINT_DIR": str(checkpoint),
        "SUBLET_JOB": job,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, grace_us // SECOND_US - TORCHRUN_MARGIN_S)),
    }
    environment |= settings_as_variables(settings, request.request.tenant)
    if places(settings) and settings.origin("store") == "default":
        del environment["SUBLET_STORE"]  # a folder of this machine's; a node has its own
    named = _pairs(wish.environment)
    environment |= named
    executable, code = find_executable(wish.command[0], environment.get("PATH", os.defpath))
    if code and not places(settings):  # a node may have what this machine has not
        how = "is not executable" if code == 126 else "was not found"
        raise CommandNotRun(f"{wish.command[0][:200]!r} {how}; no lease was asked for", exit_code=code)
    terms = Terms(
        grace_us=grace_us,
        time_us=parse_duration(wish.time, what="time") if wish.time else 0,
        wait_us=request.request.wait_us,
        limits=Limits(
            failures=wish.restarts,
            preemptions=wish.preemptions,
            drained_codes=wish.drained,
            backoff_us=max(1, parse_duration(wish.backoff, what="backoff")),
        ),
        profile=wish.profile,
        environment=environment,
    )
    return Prepared(
        settings=settings,
        request=request,
        folder=RunFolder(runs_folder(settings.home) / run_id),
        name=job,
        command=wish.command,
        named=named,
        executable=executable,
        terms=terms,
        checkpoint=checkpoint,
    )


def _order(prepared: Prepared) -> CommandOrder:
    return CommandOrder(
        command=prepared.command,
        folder=os.getcwd(),
        path=prepared.terms.environment.get("PATH", os.defpath),
        named=prepared.named,
        grace_us=prepared.terms.grace_us,
    )


def settings_as_variables(settings: Settings, tenant: str) -> dict[str, str]:
    """So that whatever the command calls finds the same ledger, store and devices, wherever they were configured."""
    ours = {spec.variable: settings[spec.name] for spec in SPECS if settings[spec.name]}
    # A limit of this process is not one of the command's; it is told by notice.
    ours.pop("SUBLET_TIME_LIMIT", None)
    return ours | {"SUBLET_TENANT": tenant}


def _pairs(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name or "\0" in text:
            raise BadInput(f"--env {text[:60]!r} is not NAME=VALUE")
        found[name] = value
    return found


def would_lease(prepared: Prepared) -> tuple[str, bool]:
    """What a run would ask for and whether it is free now, in a sentence. Nothing is asked for."""
    request = prepared.request.request
    shape = request.shape()
    count = f"{request.count} × " if request.count > 1 else ""
    asked = f"{count}{format_size(request.vram_bytes)}, tier {request.tier.value}, for {request.tenant}"
    found = fit(shape, open_ledger(prepared.settings).devices())
    if found is None:
        return f"would ask for {asked}: not free now, so it would wait", False
    return f"would lease {asked}, now, on {', '.join(s.device_id for s in found)}", True


def go(prepared: Prepared, *, detached: bool, say: Callable[[str], None], on_wait: OnWait | None) -> Exit:
    """Run it, in this process, to its end."""
    settings, folder, terms = prepared.settings, prepared.folder, prepared.terms
    prune(settings.home)
    folder.make()
    made_folder = not prepared.checkpoint.exists()
    prepared.checkpoint.mkdir(parents=True, exist_ok=True)
    me = processes(settings).identify(os.getpid())
    folder.record(
        id=folder.id,
        name=prepared.name,
        command=list(prepared.command),
        pid=os.getpid(),
        process_started=me.started if me else 0,
        host=settings["host"],
        folder=os.getcwd(),
        detached=detached,
        tenant=prepared.request.request.tenant,
        grace_us=terms.grace_us,
    )

    def borrow(
        still_wanted: Callable[[], None], move_in: Callable[[Lease, Command], Mapping[str, str]]
    ) -> tuple[Lease, Command]:
        started: list[Command] = []
        placed = placement(settings)

        def start() -> Command:
            started.append(
                start_command(settings, folder, prepared.executable, prepared.command, terms.grace_us)
            )
            return started[-1]

        def place(host: str) -> Command:
            assert placed is not None
            started.append(placed.start_command(host, _order(prepared)))
            return started[-1]

        asked = GpuRequest(
            settings,
            prepared.request.request,
            holder="worker",
            on_wait=on_wait,
            on_offer=None,
            start=start,
            placed=placed,
            place=place,
            environment=lambda lease, worker: move_in(lease, started[-1]),
            still_wanted=still_wanted,
        )
        return asked._keep(), started[-1]

    # One that was ignored when we came (nohup) stays ignored: it was meant to be.
    signals = [*SIGNALS]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    sources = notice_sources(settings, grace_us=terms.grace_us)
    # A lease cannot be paused: it would run out while its command waits.
    paused = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        with Alarms(CLOCK, sources, grace_us=terms.grace_us, signals=signals) as alarms:
            return Run(folder, terms, borrow, lambda: open_ledger(settings), alarms, CLOCK, say).go()
    finally:
        signal.signal(signal.SIGTSTP, paused)
        if made_folder:
            try:
                prepared.checkpoint.rmdir()  # nobody used it
            except OSError:
                pass
