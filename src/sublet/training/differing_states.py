"""A resume that came out differently: both states are kept, for whoever looks for the cause.

Rules of this file:
- The committed state stays the job's own and gets a tag, so that no sweep removes it. The repeated one becomes
  a checkpoint under a name of its own.
- The difference is reported whether or not the states could be kept; what could not is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sublet.core.errors import ResumeDiffers, SubletError
from sublet.core.progress.verifying import DIFFERS_TAG, repeated_name
from sublet.training.resume_check import RepeatedSteps
from sublet.training.run_parts import Parts


def resume_differs(
    parts: Parts, job: str, repeated: RepeatedSteps, steps: str, found: Sequence[object], now: Any
) -> ResumeDiffers:
    """What to raise. `now` is the repeated state; None when the program did not come to it."""
    more = f" (and {len(found) - 4} more)" if len(found) > 4 else ""
    return ResumeDiffers(
        f"{steps} came out differently when repeated after a resume: "
        f"{'; '.join(str(part) for part in found[:4])}{more}; step {repeated.to_step} is committed, nothing was "
        f"overwritten. {_keep_both(parts, job, repeated, now)}"
    )


def _keep_both(parts: Parts, job: str, repeated: RepeatedSteps, now: Any) -> str:
    other = repeated_name(job)
    try:
        parts.store.tag(job, repeated.to_version, DIFFERS_TAG, actor=job)
        if now is None or parts.lease is None:
            return f"The committed state is kept: {job} version {repeated.to_version}"
        head = parts.ledger.head(other)
        saved = parts.store.save(
            other, now, expected_version=head.version if head is not None else 0, lease=parts.lease
        )
    except (SubletError, OSError) as error:
        return f"The states could not be kept: {error}"
    return (
        f"Both states are kept: {job} version {repeated.to_version} as committed, {other} version "
        f"{saved.version} as repeated"
    )
