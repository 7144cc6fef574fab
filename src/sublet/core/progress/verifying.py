"""Whether a resume is checked by repeating what was done since the save before the last.

A check costs one interval between two saves. What it proves holds for the version of the program: the first
resume of each version is checked, and later one in ten.
"""

from __future__ import annotations

from enum import Enum

from sublet.core.errors import BadInput

#: Of the resumes after the first.
ONE_IN = 10
#: Of a version that came out differently when a resume repeated its steps.
DIFFERS_TAG = "resume-differs"


class Verify(Enum):
    AUTO = "auto"  # the first of each version, and then one in ten
    ALWAYS = "always"
    FIRST = "first"
    NEVER = "never"


def repeated_name(job: str) -> str:
    """The checkpoint that holds what came out instead."""
    return f"{job}-repeated"


def parse_verify(text: str | Verify) -> Verify:
    try:
        return Verify(text)
    except ValueError:
        raise BadInput(
            f"verify={str(text)[:40]!r} is unknown: use {', '.join(v.value for v in Verify)}"
        ) from None


def wants_check(verify: Verify, *, resumes: int, checked: int) -> tuple[bool, str]:
    """Before the resume number `resumes` (from 1) of this version, `checked` of which were checked."""
    if verify is Verify.NEVER:
        return False, "it is not to be checked"
    if verify is Verify.ALWAYS:
        return True, "every resume is to be checked"
    if not checked:
        return True, "no resume of this version was checked yet"
    if verify is Verify.AUTO and resumes % ONE_IN == 0:
        return True, f"one resume in {ONE_IN} is checked"
    return False, "a resume of this version was checked before"
