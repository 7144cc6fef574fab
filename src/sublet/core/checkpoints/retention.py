"""Retention: which versions of a job are kept, and why.

Rules of this file:
- The newest version and every tagged one are always kept. Without a rule everything is.
- `every` counts version numbers, not steps: a version's number is its own and never changes, a step may be
  saved twice after a rollback.
- Each decision has a reason a user can read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from sublet.core.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    last: int = 0  # the newest k; 0: no such rule
    every: int = 0  # those whose version is a multiple of n; 0: no such rule

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            if type(value) is not int or not 0 <= value <= 1 << 62:
                raise BadInput(f"{name} must be a number of versions, not {str(value)[:40]!r}")

    @property
    def keeps_all(self) -> bool:
        return not (self.last or self.every)


@dataclass(frozen=True, slots=True)
class Verdict:
    version: int
    keep: bool
    reason: str


def judge(versions: Iterable[int], tags: Mapping[int, Collection[str]], rule: Retention) -> list[Verdict]:
    """One verdict for each version, newest first."""
    found = sorted(set(versions), reverse=True)
    verdicts = []
    for place, version in enumerate(found):
        why = []
        if place == 0:
            why.append("the newest")
        if tags.get(version):
            why.append("tagged " + ", ".join(sorted(tags[version])))
        if 0 < place < rule.last:
            why.append(f"one of the last {rule.last}")
        if rule.every and version % rule.every == 0:
            why.append(f"a multiple of {rule.every}")
        if rule.keeps_all and place > 0:
            why.append("no rule drops it")
        verdicts.append(Verdict(version, bool(why), "; ".join(why) or "no rule keeps it"))
    return verdicts


def floor_of(chain: Iterable[int], kept: Collection[int]) -> int:
    """The oldest version from which on everything is kept. `chain` holds the versions linked to the
    newest."""
    floor = 0
    for version in sorted(set(chain), reverse=True):
        if version not in kept:
            break
        floor = version
    return floor
