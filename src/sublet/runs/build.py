"""Builds a run of `sublet run` from what was typed: its lease, its command and its notices.

Rules of this file:
- Everything that can be refused is refused before a lease is asked for: sizes, durations, names, a missing
  command.
- The command sees the inherited environment, then the settings of this run, then what `--env` says; the
  lease's own variables come last.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sublet.core.errors import BadInput
from sublet.core.leasing.options import BATCH_GPU, GpuOptions
from sublet.core.notice import DEFAULT_GRACE
from sublet.core.runs.exits import DRAINED_CODE, check_profile
from sublet.core.runs.requeue import RestartLimits
from sublet.core.scheduling.device import fit
from sublet.core.values import SECOND_US, check_job, check_name, format_size, parse_duration
from sublet.leases.acquire import OnWait
from sublet.leases.lease import Lease
from sublet.leases.request import GpuRequest, local_gpu
from sublet.machine.executables import find_executable
from sublet.machine.run_folder import RunFolder, new_run_id, prune, runs_folder
from sublet.notice_bus.bus import SIGNALS, NoticeBus
from sublet.ports.placement import CommandOrder
from sublet.ports.worker import Command
from sublet.runs.run import CommandRun, Exit, RunPlan
from sublet.settings import SPECS, Settings
from sublet.wiring import CLOCK, notice_sources, open_ledger, placement, places, processes, start_command

#: torchrun's own kill must come a little before ours, so that torchrun reports what happened.
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
class RunOptions:
    """What was typed, in words."""

    command: tuple[str, ...]
    gpu: GpuOptions = BATCH_GPU
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
class PreparedRun:
    """Checked options: only the ledger can still refuse something."""

    settings: Settings
    request: GpuRequest
    folder: RunFolder
    name: str
    command: tuple[str, ...]
    named: Mapping[str, str]  # what --env says
    executable: str
    terms: RunPlan
    checkpoint: Path


#: Options of Python that take a value of their own.
_PYTHON_TAKES = ("-W", "-X", "--check-hash-based-pycs")


def resumable(command: Sequence[str]) -> tuple[str, ...]:
    """The command with the shim before its script: killed, it goes on where it was."""
    program, *rest = command
    if program.endswith(".py"):
        return ("python", "-m", "sublet.shim", *command)
    if not re.fullmatch(r"python(3(\.\d+)?)?", Path(program).name):
        raise CommandNotRun(
            f"--resume makes a Python script resumable, and {program} is none; no lease was asked for",
            exit_code=2,
            remedy="write --resume -- python train.py, or call sublet.train in the program",
        )
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        options += [rest.pop(0)]
        if options[-1] in _PYTHON_TAKES and rest:
            options += [rest.pop(0)]
    if not rest or rest[0].startswith("-"):
        raise CommandNotRun(
            f"--resume needs the script's file, and this is {' '.join(command)}; no lease was asked for",
            exit_code=2,
            remedy="name the file: sublet run --resume -- python path/to/script.py",
        )
    return (program, *options, "-m", "sublet.shim", *rest)


def prepare(
    options: RunOptions, settings: Settings, *, run_id: str = "", unbuffered: bool = False
) -> PreparedRun:
    if not options.command:
        raise BadInput(
            "there is no command to run",
            remedy="write it after --:  sublet run --vram 8GB -- python train.py",
        )
    check_profile(options.profile)
    name = check_job(options.name) if options.name else ""
    if options.restarts < 0 or (options.preemptions is not None and options.preemptions < 0):
        raise BadInput("--restarts and --preemptions must not be negative: 0 is never")
    if any(not 0 < code < 256 for code in options.drained):
        raise BadInput("--drained must be an exit code from 1 to 255; 0 is always done")
    run_id = check_name(run_id, what="run id") if run_id else new_run_id()
    job = name or run_id
    request = local_gpu(
        replace(options.gpu, job=job, holder="worker"), placed=placement(settings), settings=settings
    )
    grace_us = parse_duration(options.grace, what="grace")
    checkpoint = (
        Path(options.checkpoint).absolute() if options.checkpoint else settings.home / "checkpoints" / job
    )
    named = _pairs(options.environment)
    environment = dict(os.environ)
    if unbuffered:
        environment.setdefault("PYTHONUNBUFFERED", "1")  # whoever follows a log wants to see it now
    environment |= _own_variables(settings, request.request.tenant, job, checkpoint, grace_us) | named
    executable, code = find_executable(options.command[0], environment.get("PATH", os.defpath))
    if code and not places(settings):  # a node may have a program that this machine lacks
        how = "is not executable" if code == 126 else "was not found"
        raise CommandNotRun(f"{options.command[0][:200]!r} {how}; no lease was asked for", exit_code=code)
    terms = RunPlan(
        grace_us=grace_us,
        time_us=parse_duration(options.time, what="time") if options.time else 0,
        wait_us=request.request.wait_us,
        limits=RestartLimits(
            failures=options.restarts,
            preemptions=options.preemptions,
            drained_codes=options.drained,
            backoff_us=max(1, parse_duration(options.backoff, what="backoff")),
        ),
        profile=options.profile,
        environment=environment,
    )
    return PreparedRun(
        settings=settings,
        request=request,
        folder=RunFolder(runs_folder(settings.home) / run_id),
        name=job,
        command=options.command,
        named=named,
        executable=executable,
        terms=terms,
        checkpoint=checkpoint,
    )


def _own_variables(
    settings: Settings, tenant: str, job: str, checkpoint: Path, grace_us: int
) -> dict[str, str]:
    ours = {
        "SUBLET_GRACE_SECONDS": f"{grace_us / SECOND_US:g}",
        "SUBLET_CHECKPOINT_DIR": str(checkpoint),
        "SUBLET_JOB": job,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, grace_us // SECOND_US - TORCHRUN_MARGIN_S)),
    } | settings_as_variables(settings, tenant)
    if places(settings) and settings.origin("store") == "default":
        del ours["SUBLET_STORE"]  # a folder of this machine; a node has its own
    return ours


def _order(prepared: PreparedRun) -> CommandOrder:
    return CommandOrder(
        command=prepared.command,
        folder=os.getcwd(),
        path=prepared.terms.environment.get("PATH", os.defpath),
        named=prepared.named,
        grace_us=prepared.terms.grace_us,
    )


def settings_as_variables(settings: Settings, tenant: str) -> dict[str, str]:
    """The settings, so that whatever the command calls finds the same ledger, store and devices."""
    ours = {spec.variable: settings[spec.name] for spec in SPECS if settings[spec.name] and not spec.studio}
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


def would_lease(prepared: PreparedRun) -> tuple[str, bool]:
    """What a run would ask for and whether it is free now, in a sentence. Nothing is asked for."""
    request = prepared.request.request
    shape = request.shape()
    count = f"{request.count} × " if request.count > 1 else ""
    asked = f"{count}{format_size(request.vram_bytes)}, tier {request.tier.value}, for {request.tenant}"
    found = fit(shape, open_ledger(prepared.settings).devices())
    if found is None:
        return f"would ask for {asked}: not free now, so it would wait", False
    return f"would lease {asked}, now, on {', '.join(s.device_id for s in found)}", True


def go(prepared: PreparedRun, *, detached: bool, say: Callable[[str], None], on_wait: OnWait | None) -> Exit:
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
        still_wanted: Callable[[], None], set_up_environment: Callable[[Lease, Command], Mapping[str, str]]
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
            environment=lambda lease, worker: set_up_environment(lease, started[-1]),
            still_wanted=still_wanted,
        )
        return asked.hold(), started[-1]

    # A signal that was ignored at the start (nohup) stays ignored on purpose.
    signals = [*SIGNALS]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    sources = notice_sources(settings, grace_us=terms.grace_us)
    # A lease cannot be paused: it would run out while its command waits.
    paused = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        with NoticeBus(CLOCK, sources, grace_us=terms.grace_us, signals=signals) as notice_bus:
            run = CommandRun(folder, terms, borrow, lambda: open_ledger(settings), notice_bus, CLOCK, say)
            return run.go()
    finally:
        signal.signal(signal.SIGTSTP, paused)
        if made_folder:
            try:
                prepared.checkpoint.rmdir()  # nobody used it
            except OSError:
                pass
