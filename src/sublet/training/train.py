"""What users call: `sublet.train(...)` and `sublet.run_step(...)`.

Rules of this file:
- It checks the arguments and builds the run. The loop is in `training.loop`, the single step in
  `training.step`.
- It chooses the lease: the one given, the one `sublet run` started this program under, or a new one that the
  run gives back.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from sublet.core.errors import BadInput, SubletError
from sublet.core.leasing.options import Duration, GpuOptions
from sublet.core.progress.cadence import Losses, parse_cadence
from sublet.core.progress.kernel_arguments import Scalar
from sublet.core.progress.verifying import parse_verify
from sublet.core.values import DAY_US, check_job, format_size, parse_duration, parse_size
from sublet.leases.lease import Lease
from sublet.leases.notices import given_grace
from sublet.leases.progress_line import ProgressLine
from sublet.leases.request import local_gpu
from sublet.machine import lease_environment, waiting_note
from sublet.notice_bus.bus import NoticeBus
from sublet.ports.ledger import Ledger
from sublet.settings import Settings, load_settings, variable
from sublet.store.checkpoints import CheckpointStore
from sublet.training.capture import Captured
from sublet.training.loop import Preempted, Run
from sublet.training.ranks import TIMEOUT_US, Ranks, find_ranks
from sublet.training.resume_check import ResumeChecks
from sublet.training.run_parts import Parts, RunLease
from sublet.training.saves import SAVE_PATIENCE_US
from sublet.training.step import Completed, Duplicate, KernelStep, as_shape
from sublet.training.step import run_step as run_one_step
from sublet.wiring import CLOCK, checkpoints, open_ledger, open_notice_bus

DEFAULT_TIER = "batch"
#: Leases that ended this way were lost without a warning.
_UNWARNED = ("holder_lost", "expired", "device_lost")


def train(
    name: str | None = None,
    state: dict[str, Any] | None = None,
    *,
    every: str | int | float = "auto",
    lease: Lease | None = None,
    vram: str | int | None = None,
    ttl: Duration | None = None,
    tier: str = DEFAULT_TIER,
    wait: Duration | None = None,
    grace: Duration | None = None,
    per_rank: Collection[str] = (),
    rank_timeout: Duration | None = None,
    overlap: Any = None,
    save_patience: Duration | None = None,
    store: CheckpointStore | None = None,
    progress: bool = True,
    verify: str | None = None,
    settings: Settings | None = None,
    **leasing: Any,
) -> Run:
    """A training run that survives anything: `run = sublet.train("resnet", state={"model": model, ...})`.

    The committed state is put back before it returns; then `for step in run.steps(10_000): ...`. It saves
    `every` so often: "auto" (what wastes least), a number of steps, or a duration. It leases a GPU by itself
    (options as of `sublet.gpu`), or works under `lease`, or under that of `sublet run`. `grace` is the time
    to leave after a signal. `overlap=optimizer` copies what only the optimizer writes behind the next steps.

    Under torchrun all ranks call it alike, after torch.distributed is initialised; rank 0 leases and commits.
    Random states, places in the data and the parts that `per_rank` names are each rank's own. A rank that is
    silent for `rank_timeout` (10 minutes) is given up.

    A resume is checked (`verify`, else SUBLET_VERIFY: "auto", the first of each version of the program and
    then one in ten; "always", "first", "never"): it begins at the save before the last, repeats the steps up
    to the last one, and stops with `ResumeDiffers` where they come out differently.
    """
    name = check_job(name or variable("JOB") or _unnamed())
    captured = Captured(state if state is not None else {}, per_rank=per_rank)
    cadence, settings = parse_cadence(every), settings or load_settings()
    grace_us = parse_duration(grace if grace is not None else given_grace(), what="grace")
    patience_us = _duration_us(save_patience, SAVE_PATIENCE_US, "save_patience")
    remembered = settings.home / "run" / "resumes" / f"{name}.json"
    checks = ResumeChecks(parse_verify(verify or settings["verify"] or "auto"), remembered, _program_digest())
    ranks = find_ranks(_duration_us(rank_timeout, TIMEOUT_US, "rank_timeout"))
    ledger = open_ledger(settings)
    process_lease = _inherited_lease(ledger, vram) if lease is None else None
    notice_bus = open_notice_bus(settings, grace_us=grace_us)
    with _given_back_on_failure(ranks, notice_bus) as owned:
        held: RunLease | None = None
        if ranks.rank == 0:
            options = {"vram": vram, "ttl": ttl, "wait": wait, **leasing}
            held = lease or process_lease or _lease_a_gpu(notice_bus, settings, name, tier, options, owned)
        opened = store or owned.enter_context(contextlib.closing(checkpoints(settings=settings)))
        line = ProgressLine(sys.stderr if progress and ranks.rank == 0 else None, name)
        run = Run(
            name,
            captured,
            _parts(name, settings, ledger, opened, notice_bus, ranks, line, held, owned.close),
            cadence=cadence,
            overlap=overlap,
            save_patience_us=patience_us,
            checks=checks,
        )
        run.resume()
    return run


@contextlib.contextmanager
def _given_back_on_failure(ranks: Ranks, notice_bus: NoticeBus) -> Iterator[contextlib.ExitStack]:
    """Holds the lease and the store, where they are the run's own: the run gives them back at its end, and a
    run that does not begin at once."""
    owned = contextlib.ExitStack()
    notice_bus.__enter__()
    try:
        yield owned
    except BaseException:
        ranks.close()  # close this first: the other ranks wait for this one
        notice_bus.close()
        owned.close()
        raise


def _parts(
    name: str,
    settings: Settings,
    ledger: Ledger,
    store: CheckpointStore,
    notice_bus: NoticeBus,
    ranks: Ranks,
    line: ProgressLine,
    held: RunLease | None,
    release: Callable[[], None],
) -> Parts:
    if isinstance(held, Lease):
        notice_bus.listen_to(held)
    process_lease = held if isinstance(held, lease_environment.ProcessLease) else None
    is_first = ranks.rank == 0
    return Parts(
        ledger=ledger,
        store=store,
        clock=CLOCK,
        notice_bus=notice_bus,
        ranks=ranks,
        line=line,
        lease=held,
        losses=_losses(ledger, name) if is_first else Losses(),
        report=_reporting(process_lease) if is_first else _nobody,
        report_away=_reporting_away(settings, held),
        release=release,
    )


def _program_digest() -> str:
    """Of the program's own file: another version of it is checked anew."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    with contextlib.suppress(OSError, TypeError):
        return hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()[:32] if file else ""
    return ""


def _inherited_lease(ledger: Ledger, vram: str | int | None) -> lease_environment.ProcessLease | None:
    """What `sublet run` or a gang holds for this process. A second lease beside it would be revoked
    unheard."""
    found = lease_environment.of_run() or lease_environment.of_gang()
    if found is not None and vram is not None:
        least = vram if isinstance(vram, int) else parse_size(vram.partition("..")[0])
        held = ledger.look(found.id).lease.vram_bytes
        if least > held:
            raise BadInput(
                f"the program asks for {format_size(least)}, and is run under a lease of "
                f"{format_size(held)}; nothing was begun",
                remedy="give the run as much: sublet run --vram, or leave vram out of the program",
            )
    return found


def _duration_us(given: Duration | None, default_us: int, what: str) -> int:
    return default_us if given is None else parse_duration(given, what=what)


def _lease_a_gpu(
    notice_bus: NoticeBus,
    settings: Settings,
    name: str,
    tier: str,
    options: dict[str, Any],
    owned: contextlib.ExitStack,
) -> Lease:
    asking = {key: options.pop(key, None) for key in ("on_wait", "on_offer")}
    given = {key: value for key, value in options.items() if value is not None}
    lease = local_gpu(
        GpuOptions(tier=tier, job=name, **given),
        **asking,
        still_wanted=lambda: leave_the_waitlist(notice_bus, name),
        settings=settings,
    ).hold()
    owned.callback(lease.release)
    return lease


def leave_the_waitlist(notice_bus: NoticeBus, name: str) -> None:
    """Leave before the GPU came if a warning says so: nothing was begun, so nothing is saved."""
    notice = notice_bus.notice
    if notice is not None:
        ProgressLine(sys.stderr, name).say(f"leaves ({notice.reason}) before it got a GPU; nothing was begun")
        raise Preempted(notice, step=0, committed=0, plan="nothing was begun")


def _unnamed() -> str:
    raise BadInput("a run needs a name that stays the same over restarts: sublet.train('my-job', state=...)")


def _nobody(working_on: int, committed: int, unfinished: bool = False) -> None:
    pass


def _reporting(process_lease: lease_environment.ProcessLease | None) -> Callable[..., None]:
    """Report to the run that started this process, and to whoever else follows its steps."""
    pages = [
        page
        for page in (process_lease.page if process_lease else None, lease_environment.onlooker())
        if page is not None
    ]

    def report(working_on: int, committed: int, unfinished: bool = False) -> None:
        for page in pages:
            lease_environment.write_steps(page, working_on, committed, unfinished)

    return report if pages else _nobody


def _reporting_away(settings: Settings, held: RunLease | None) -> Callable[[str], None]:
    """Report to `sublet ps` on this machine."""
    if held is None:
        return lambda reason: None
    return lambda reason: waiting_note.say(settings.home, held.id, reason)


def _losses(ledger: Ledger, job: str) -> Losses:
    """The losses of this job's leases in the last week. Without them only the save cadence is worse."""
    try:
        week = ledger.usage(since=max(0, ledger.now() - 7 * DAY_US))
    except SubletError:
        return Losses()
    mine = [usage for usage in week if usage.job == job]
    return Losses(
        count=sum(usage.reason in _UNWARNED for usage in mine),
        held_us=sum(usage.to_at - usage.from_at for usage in mine),
    )


def run_step(
    *,
    job: str,
    step: int,
    lease: Lease,
    module: str | bytes,
    kernel: str,
    batch: bytes,
    output_bytes: int,
    expected_version: int,
    state_bytes: int = 0,
    grid: int | Sequence[int] = (1,),
    block: int | Sequence[int] = (1,),
    args: Sequence[Scalar] = (),
    store: CheckpointStore | None = None,
    settings: Settings | None = None,
) -> Completed | Duplicate:
    """One kernel over one batch, exactly once: `Completed(version, digest, output)`, or `Duplicate(version,
    output)` with the stored result.

    The kernel gets the step, `output_bytes`, the batch (whose first `output_bytes` it overwrites with the
    output), then, with `state_bytes`, the state the step before left, then `args`. Output and state are
    saved, and become true with the step, in one commit.
    """
    settings = settings or load_settings()
    wanted = KernelStep(
        job=job,
        step=step,
        module=module,
        kernel=kernel,
        batch=bytes(batch),
        output_bytes=output_bytes,
        state_bytes=state_bytes,
        grid=as_shape(grid),
        block=as_shape(block),
        args=tuple(args),
    )
    opened = store or checkpoints(settings=settings)
    try:
        return run_one_step(open_ledger(settings), opened, lease, wanted, expected_version)
    finally:
        if store is None:
            opened.close()
