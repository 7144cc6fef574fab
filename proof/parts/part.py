"""What a part of `make proof` is, and where its numbers come from.

Rules of this file:
- A count is read from what the part said it did: its JSON, or a line it printed. Where a test runs exactly as often as it was told to and fails
  otherwise, the count is what it was told.
- A part that does not finish proves nothing: its counts are not added up.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

#: What a part counted: (what, how often).
Counts = list[tuple[str, int]]
#: Of what it said, the file of its numbers, and what it was told.
Way = Callable[[str, Path, dict[str, str]], Counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    shows: str
    rules: str
    command: list[str]
    expected_s: int  # about, among the others on two calm cores; the longest begin first
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)
    counts: Way = lambda said, numbers, told: []
    json: bool = False  # it writes its numbers to a file
    #: One process, which beside a storm of many would get the least: the others make way for it.
    alone: bool = False
    first: bool = False  # a count that is claimed hangs on it: it begins before the others, should the hour not be enough for all


def seed() -> str:
    return os.environ.get("SUBLET_PROOF_SEED", "1")


def often(name: str, usual: int) -> str:
    """How often, unless the environment says otherwise."""
    return os.environ.get(name, str(usual))


def asked(**usual: int) -> dict[str, str]:
    """What a part's tests are told, by the name they read."""
    return {name: often(name, number) for name, number in usual.items()}


def told(**counts: str) -> Way:
    """As often as the environment said."""
    return lambda said, numbers, environment: [
        (what.replace("_", " "), int(environment[name])) for what, name in counts.items()
    ]


def printed(**patterns: str) -> Way:
    """The sum of every number a pattern finds."""
    return lambda said, numbers, environment: [
        (what.replace("_", " "), sum(int(n) for n in re.findall(pattern, said)))
        for what, pattern in patterns.items()
    ]


def written(**fields: str) -> Way:
    """A number of the part's file."""
    return lambda said, numbers, environment: [
        (what.replace("_", " "), int(json.loads(numbers.read_text())[name])) for what, name in fields.items()
    ]


def pytest(*args: str, timeout_s: int = 900) -> list[str]:
    return [sys.executable, "-m", "pytest", "-s", "-q", "--timeout", str(timeout_s), *args]


def own(module: str, *args: str) -> list[str]:
    return [sys.executable, "-m", module, *args]
