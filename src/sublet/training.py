"""What users call: `sublet.train(...)` and `sublet.run_step(...)`.

Rules of this file:
- Words in, a checked run out. The loop is in `runtime.train`, the single step in `runtime.step`.
- It chooses the lease: the one given, the one `sublet run` started this program under, or a new one that the run gives back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sublet import inside, waiting
from sublet.borrowing import local_gpu
from sublet.core.cadence import Losses, parse_cadence
from sublet.core.errors import BadInput, SubletError
from sublet.core.kernel import Scalar
from sublet.core.values import DAY_US, check_job, parse_duration
from sublet.ports.ledger import Ledger
from sublet.runtime.alarms import Alarms
from sublet.runtime.capture import Captured
from sublet.runtime.holding import Lease
from sublet.runtime.progress_line import ProgressLine
from sublet.runtime.ranks import TIMEOUT_US, find_ranks
from sublet.runtime.run_parts import Held, Parts
from sublet.runtime.saves import SAVE_PATIENCE_US
from sublet.runtime.step import Completed, Duplicate, KernelStep, as_shape
from sublet.runtime.step import run_step as run_one_step
from sublet.runtime.train import Preempted, Run
from sublet.settings import Settings, load_settings
from sublet.store.checkpoints import CheckpointStore
from sublet.wiring import CLOCK, checkpoints, open_ledger
from sublet.wiring import alarms as open_alarms

DEFAULT_GRACE = "15s"
DEFAULT_TIER = "batch"
#: Leases that ended this way were lost without a warning.
_UNWARNED = ("holder_lost", "expired", "device_lost")

Duration = str | int | float


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
    settings: Settings | None = None,
    **leasing: Any,
) -> Run:
    """A training run that survives anything: `run = sublet.train("resnet", state={"model": model, "optim": optimizer, "data": loader})`.

    The committed state is put back before it returns; then `for step in run.steps(10_000): ...`. `every` is how often it saves: "auto"
    (what wastes least), a number of steps, or a duration. It leases a GPU by itself (`vram`, `ttl`, `tier`, `wait` and the other options
    of `sublet.gpu`), or works under `lease`, or under the lease that `sublet run` started it with. `grace` is how long it has to leave
    after a signal. `overlap=optimizer` copies what the optimizer owns behind the next steps, if nothing else writes to it.

    Under torchrun, with torch.distributed initialised, all ranks call it alike: rank 0 leases and commits for all of them. Random
    states and places in the data are each rank's own; `per_rank=("name",)` names other parts that are. A rank that says nothing for
    `rank_timeout` (10 minutes) is given up.
    """
    name = check_job(name or os.environ.get("SUBLET_JOB", "") or _unnamed())
    captured = Captured(state if state is not None else {}, per_rank=per_rank)
    cadence = parse_cadence(every)
    settings = settings or load_settings()
    grace_us = parse_duration(grace if grace is not None else _given_grace(), what="grace")
    patience_us = (
        SAVE_PATIENCE_US if save_patience is None else parse_duration(save_patience, what="save_patience")
    )
    ranks = find_ranks(
        TIMEOUT_US if rank_timeout is None else parse_duration(rank_timeout, what="rank_timeout")
    )
    ledger = open_ledger(settings)
    tenancy = (inside.of_run() or inside.of_gang()) if lease is None and vram is None else None
    alarms = open_alarms(settings, grace_us=grace_us)
    own: Lease | None = None
    opened: CheckpointStore | None = None
    alarms.__enter__()
    try:
        held: Held | None = lease or tenancy
        if ranks.rank != 0:
            held = None
        elif held is None:
            options = {"vram": vram, "ttl": ttl, "wait": wait, **leasing}
            given = {key: value for key, value in options.items() if value is not None}
            asked = local_gpu(tier=tier, job=name, settings=settings, **given)
            asked._still_wanted = lambda: leave_the_waitlist(alarms, name)
            own = asked._keep()
            held = own
        if isinstance(held, Lease):
            alarms.listen_to(held)
        opened = store or checkpoints(settings=settings)
        run = Run(
            name,
            captured,
            Parts(
                ledger=ledger,
                store=opened,
                clock=CLOCK,
                alarms=alarms,
                ranks=ranks,
                line=ProgressLine(sys.stderr if progress and ranks.rank == 0 else None, name),
                lease=held,
                losses=_losses(ledger, name) if ranks.rank == 0 else Losses(),
                report=_reporting(tenancy) if ranks.rank == 0 else _nobody,
                report_away=_reporting_away(settings, held),
                release=lambda: _give_back(own, opened if store is None else None),
            ),
            cadence=cadence,
            overlap=overlap,
            save_patience_us=patience_us,
        )
        run.resume()
    except BaseException:
        ranks.close()  # first: the others wait for this one
        alarms.close()
        _give_back(own, opened if store is None else None)
        raise
    return run


def leave_the_waitlist(alarms: Alarms, name: str) -> None:
    """Told to leave before the GPU came: nothing was begun, so nothing is saved."""
    notice = alarms.notice
    if notice is not None:
        ProgressLine(sys.stderr, name).say(f"leaves ({notice.reason}) before it got a GPU; nothing was begun")
        raise Preempted(notice, step=0, committed=0, plan="nothing was begun")


def _unnamed() -> str:
    raise BadInput("a run needs a name that stays the same over restarts: sublet.train('my-job', state=...)")


def _given_grace() -> Duration:
    said = os.environ.get("SUBLET_GRACE_SECONDS")
    try:
        return float(said) if said else DEFAULT_GRACE
    except ValueError:
        raise BadInput(f"SUBLET_GRACE_SECONDS={said!r} is not a number of seconds") from None


def _nobody(working_on: int, committed: int) -> None:
    pass


def _reporting(tenancy: inside.Tenancy | None) -> Callable[[int, int], None]:
    """To the run this process was started by, and to whoever else follows its steps."""
    pages = [page for page in (tenancy.page if tenancy else None, inside.onlooker()) if page is not None]

    def report(working_on: int, committed: int) -> None:
        for page in pages:
            inside.write_steps(page, working_on, committed)

    return report if pages else _nobody


def _reporting_away(settings: Settings, held: Held | None) -> Callable[[str], None]:
    """To `sublet ps` on this machine."""
    if held is None:
        return lambda reason: None
    return lambda reason: waiting.say(settings.home, held.id, reason)


def _give_back(lease: Lease | None, store: CheckpointStore | None) -> None:
    try:
        if store is not None:
            store.close()
    finally:
        if lease is not None:
            lease.release()


def _losses(ledger: Ledger, job: str) -> Losses:
    """Of the leases this job had in the last week. Not knowing costs a better cadence, nothing else."""
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
    """One kernel over one batch, exactly once: `Completed(version, digest, output)`, or `Duplicate(version, output)` with the stored result.

    The kernel gets the step, `output_bytes`, the batch (whose first `output_bytes` it overwrites with the output), then, with
    `state_bytes`, the state the step before left, then `args`. Output and state are saved, and become true with the step, in one commit.
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
