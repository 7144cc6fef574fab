"""How a run ended, and the exit code that says so to whoever started it.

Rules of this file:
- One outcome, one row: what a code means differs from scheduler to scheduler, so the code is chosen last, by
  profile, from this table.
- A code of the command's own is passed on untouched wherever the table has none. `exit.json` says which of
  the two it was.
"""

from __future__ import annotations

from enum import Enum

from sublet.core.errors import BadInput

#: What a command exits with to say: I was told to leave, everything is committed, run me again.
DRAINED_CODE = 85
KILLED_CODE = 128 + 9
TERMINATED_CODE = 128 + 15
INTERRUPTED_CODE = 128 + 2
NOT_EXECUTABLE_CODE = 126
NOT_FOUND_CODE = 127


class Outcome(Enum):
    DONE = "done"
    PREEMPTED = "preempted"  # and committed: it said so itself
    NO_LEASE = "no_lease"
    TIME_LIMIT = "time_limit"
    KILLED = "killed"  # it outlived its grace
    STOPPED = "stopped"  # told to leave, and left without saying that everything is committed
    FAILED = "failed"
    LOST = "lost"  # the process that looked after it was killed


PROFILES = ("default", "k8s", "slurm", "sge", "condor", "zero")

#: Outcome to code; None passes on the command's own.
_DEFAULT: dict[Outcome, int | None] = {
    Outcome.DONE: 0,
    Outcome.PREEMPTED: DRAINED_CODE,
    Outcome.NO_LEASE: 75,
    Outcome.TIME_LIMIT: 124,
    Outcome.KILLED: KILLED_CODE,
    Outcome.STOPPED: None,
    Outcome.FAILED: None,
    Outcome.LOST: KILLED_CODE,
}

#: Where a profile differs from the default, and why.
_DIFFERENT: dict[str, dict[Outcome, int | None]] = {
    "default": {},
    # A pod that was told to go is expected to leave with 128 + SIGTERM: that is what `podFailurePolicy` rules
    # are written for.
    "k8s": {Outcome.PREEMPTED: TERMINATED_CODE},
    # Slurm requeues by a list of codes (`RequeueExit=75,85`); any will do, so they stay the documented ones.
    "slurm": {},
    # Grid Engine reads 99 as "put me back into the queue". No available GPU is a reason for that too.
    "sge": {Outcome.PREEMPTED: 99, Outcome.NO_LEASE: 99},
    # `checkpoint_exit_code = 85` restarts in place. A command that merely stopped must never look like it.
    "condor": {},
    # For callers that take everything but 0 for a failure. "Done" and "preempted" are then told apart by
    # exit.json only.
    "zero": {Outcome.PREEMPTED: 0},
}


def check_profile(name: str) -> str:
    if name not in PROFILES:
        raise BadInput(f"exit profile {str(name)[:40]!r} is unknown: use {', '.join(PROFILES)}")
    return name


def exit_code(outcome: Outcome, own: int | None, profile: str = "default") -> int:
    """`own` is the command's, as a shell shows it; None when it never ran or nobody saw its end."""
    chosen = _DIFFERENT[check_profile(profile)].get(outcome, _DEFAULT[outcome])
    if chosen is not None:
        return chosen
    return KILLED_CODE if own is None else own
