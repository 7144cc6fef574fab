"""Whether a command that ended is started again, and what the run leaves with if not.

Rules of this file:
- Two budgets. A lease that was taken away says nothing about the command: it is started again, as often as
  that happens unless somebody set a limit. A failure is the command's own: it is started again only as often
  as asked for.
- Whoever asked the *run* to stop is obeyed: a person, a time limit, a machine that goes away. Then nothing is
  started again.
- Exit 0 is done, whatever was announced before: the command knows best whether it had finished. Except when
  it reported that it leaves steps undone because of a warning: a script that catches everything may have
  caught the order to leave, and what it exits with afterwards means nothing.
- Progress forgives: failures before the last committed step that was new are not counted any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from sublet.core.leasing.renewal import mix
from sublet.core.runs.exits import DRAINED_CODE, Outcome
from sublet.core.values import SECOND_US, format_duration

BACKOFF_US = SECOND_US
BACKOFF_CEILING_US = 60 * SECOND_US


class Cause(Enum):
    """Who said that it had to end."""

    NOBODY = "nobody"
    LEASE = "lease"  # revoked, preempted, hold cap, run out, device lost, not renewable
    STOP = "stop"  # a signal to the run itself, or `sublet cancel`
    TIME = "time"  # --time
    MACHINE = "machine"  # the cloud, Kubernetes or Slurm takes this host away


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the command, as it ended."""

    code: int | None  # as a shell shows it: 128 + the signal; None: nobody saw its end
    cause: Cause = Cause.NOBODY
    why: str = ""  # the notice's own words
    killed: bool = False  # by us, at the deadline
    progressed: bool = False  # it committed a step no attempt had committed before
    unfinished: bool = False  # it reported that it leaves its steps because of a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    failures: int = 0
    preemptions: int | None = None  # None: as often as it happens
    drained_codes: tuple[int, ...] = (DRAINED_CODE,)
    backoff_us: int = BACKOFF_US


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartTally:
    """What a run has been through."""

    failures: int = 0  # since the last progress
    preemptions: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    pause_us: int
    reason: str
    tally: RestartTally


@dataclass(frozen=True, slots=True)
class Leave:
    outcome: Outcome
    reason: str
    tally: RestartTally


def how(code: int | None) -> str:
    if code is None:
        return "its end was not seen"
    if code > 128:
        return f"it was ended by signal {code - 128}"
    return f"it exited with {code}"


def backoff(failures: int, seed: int, base_us: int = BACKOFF_US, ceiling_us: int = BACKOFF_CEILING_US) -> int:
    """Doubles with every failure, up to a ceiling; half of it is jitter, so that what failed together does
    not come back in step."""
    pause = min(base_us << min(failures - 1, 20), max(base_us, ceiling_us))
    return pause // 2 + mix(seed + failures) % (pause // 2 + 1)


def decide(ended: Attempt, tally: RestartTally, limits: RestartLimits, seed: int = 0) -> Restart | Leave:
    if ended.progressed:
        tally = replace(tally, failures=0)
    said = f"{ended.why}; {how(ended.code)}" if ended.why else how(ended.code)
    swallowed = ended.code == 0 and ended.unfinished
    if swallowed:
        said += " although it left steps undone"
    if ended.code == 0 and not ended.killed and not swallowed:
        return Leave(Outcome.DONE, "the command exited with 0", tally)
    drained = (swallowed or ended.code in limits.drained_codes) and not ended.killed
    if ended.cause is Cause.NOBODY and not ended.killed:
        return _after_failure(ended, tally, limits, seed, drained)
    if ended.cause is Cause.LEASE or ended.cause is Cause.NOBODY:
        return _after_loss(ended, tally, limits, said, drained)
    if ended.killed:
        return Leave(Outcome.KILLED, f"{ended.why}; it outlived its grace and was killed", tally)
    if ended.cause is Cause.TIME:
        return Leave(Outcome.TIME_LIMIT, said, tally)
    return Leave(Outcome.PREEMPTED if drained else Outcome.STOPPED, said, tally)


def _after_loss(
    ended: Attempt, tally: RestartTally, limits: RestartLimits, said: str, drained: bool
) -> Restart | Leave:
    tally = replace(tally, preemptions=tally.preemptions + 1)
    if limits.preemptions is None or tally.preemptions <= limits.preemptions:
        return Restart(
            0, f"the lease was taken: {said}; leasing again", replace(tally, restarts=tally.restarts + 1)
        )
    outcome = Outcome.KILLED if ended.killed else Outcome.PREEMPTED if drained else Outcome.STOPPED
    return Leave(
        outcome, f"the lease was taken: {said}; that is more than --preemptions {limits.preemptions}", tally
    )


def _after_failure(
    ended: Attempt, tally: RestartTally, limits: RestartLimits, seed: int, drained: bool
) -> Restart | Leave:
    tally = replace(tally, failures=tally.failures + 1)
    if tally.failures <= limits.failures:
        pause = backoff(tally.failures, seed, limits.backoff_us)
        reason = (
            f"{how(ended.code)}; failure {tally.failures} of at most {limits.failures} without progress, "
            f"again in {format_duration(pause)}"
        )
        return Restart(pause, reason, replace(tally, restarts=tally.restarts + 1))
    spent = f"; failure {tally.failures} without progress, --restarts allows {limits.failures}"
    return Leave(
        Outcome.PREEMPTED if drained else Outcome.FAILED,
        how(ended.code) + (spent if limits.failures else ""),
        tally,
    )
