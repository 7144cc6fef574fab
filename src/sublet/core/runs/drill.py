"""A drill: which faults a run gets and when, and what came of them.

Rules of this file:
- Where a fault strikes is a share of the work that is left, in steps or, of a command that does not tell its
  steps, in time. No fault waits for longer than its part of what is left, so that short and long runs are hit
  as often and all faults find something to hit.
- Whether two runs ended alike is decided by their jobs, their last steps and the content of their states, and
  by nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sublet.core.errors import BadInput

KINDS = {
    "kill": "SIGKILL: the machine is gone",
    "term": "SIGTERM: told to leave",
    "revoke": "its lease is taken back, with or without grace",
    "stop": "SIGSTOP past the end of its lease, then SIGCONT",
}
PPM = 1_000_000
#: Less than the whole share: a run that resumes may be quicker than the one that was measured.
_MOST_OF_A_SHARE = 9, 10


def parse_kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        shown = ", ".join(unknown)[:60] or "nothing"
        raise BadInput(f"kinds: {shown} is unknown; use some of {', '.join(KINDS)}")
    return kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillFault:
    kind: str
    early: bool  # while the run still starts and restores
    share_ppm: int  # of its part of the time
    grace_us: int = 0


def _share(fault: DrillFault, left: int, faults_left: int) -> int:
    part, whole = _MOST_OF_A_SHARE
    return left * fault.share_ppm * part // (PPM * whole * max(1, faults_left))


def delay_us(fault: DrillFault, *, start_us: int, work_us: int, left_ppm: int, faults_left: int) -> int:
    """How long after the run began, or after its first step if it is not an early one, the fault strikes."""
    if fault.early:
        return start_us * fault.share_ppm // PPM
    return _share(fault, work_us * left_ppm // PPM, faults_left)


def place(fault: DrillFault, *, done: int, last: int, faults_left: int) -> tuple[int, int]:
    """The step the fault strikes in, and how far into it, in millionths."""
    at = _share(fault, max(0, last - done) * PPM, faults_left)
    return done + 1 + at // PPM, at % PPM


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillLoss:
    """One fault that ended a run, and what it cost."""

    kind: str
    grace_us: int
    working_on: int  # the step being worked on; 0: it had not begun one, or does not tell
    committed: int
    back_us: int | None = None  # until the first new step; None: no such step was seen
    exit_code: int | None = None  # None: it went on under another lease

    @property
    def wasted(self) -> int:
        """Steps begun and not committed."""
        return max(0, self.working_on - self.committed) if self.working_on else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfKind:
    kind: str
    count: int
    wasted: int
    most_wasted: int
    median_back_us: int | None
    longest_back_us: int | None


def by_kind(losses: Iterable[DrillLoss]) -> list[OfKind]:
    """Kinds in the order they are described in; a revoke with grace apart from one without."""
    found: dict[str, list[DrillLoss]] = {}
    for loss in losses:
        name = loss.kind if loss.kind != "revoke" else "revoke, grace" if loss.grace_us else "revoke, none"
        found.setdefault(name, []).append(loss)
    order = sorted(found, key=lambda name: (list(KINDS).index(name.split(",")[0]), name))
    return [_of_kind(name, found[name]) for name in order]


def _of_kind(name: str, losses: Sequence[DrillLoss]) -> OfKind:
    back = sorted(loss.back_us for loss in losses if loss.back_us is not None)
    return OfKind(
        kind=name,
        count=len(losses),
        wasted=sum(loss.wasted for loss in losses),
        most_wasted=max(loss.wasted for loss in losses),
        median_back_us=back[len(back) // 2] if back else None,
        longest_back_us=back[-1] if back else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndState:
    """How a job stood when its run was over."""

    step: int
    content: str  # digest of its state; of a job without checkpoints, what it committed


def differences(undisturbed: Mapping[str, EndState], disturbed: Mapping[str, EndState]) -> dict[str, str]:
    """Job to what is different about it; empty when both runs ended alike."""
    found: dict[str, str] = {}
    for job in sorted({*undisturbed, *disturbed}):
        quiet, rough = undisturbed.get(job), disturbed.get(job)
        if quiet is None:
            found[job] = "only the disturbed run committed it"
        elif rough is None:
            found[job] = "the disturbed run never committed it"
        elif quiet.step != rough.step:
            found[job] = f"undisturbed it ended at step {quiet.step}, disturbed at step {rough.step}"
        elif quiet.content != rough.content:
            found[job] = f"at step {quiet.step} its state is different"
    return found
