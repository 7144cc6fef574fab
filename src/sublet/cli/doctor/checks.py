"""What `sublet doctor` says of one part: how it is, what was seen, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sublet.core.errors import SubletError


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    part: str
    status: str  # ok, warn or fail
    seen: str
    remedy: str = ""  # what to do, where something is to be done


def ok(part: str, seen: str) -> Check:
    return Check(part=part, status="ok", seen=seen)


def warn(part: str, seen: str, remedy: str = "") -> Check:
    return Check(part=part, status="warn", seen=seen, remedy=remedy)


def fail(part: str, seen: str, remedy: str) -> Check:
    return Check(part=part, status="fail", seen=seen, remedy=remedy)


def failed(part: str, error: SubletError) -> Check:
    return fail(part, error.message, error.remedy)


def median_ms(call: Callable[[], object], times: int = 15) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return sorted(taken)[times // 2] * 1000
