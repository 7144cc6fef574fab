"""What a host remembers of a script's resumes: which versions were rehearsed, and what differs from run to
run by itself.

Rules of this file:
- A new version of a script is rehearsed: after its first steps it is saved twice, ended and started again.
  The new process goes on from the first save, repeats the steps up to the second, and everything is compared.
- Where something differs, it is repeated once more. What differs between two repetitions differs by itself: a
  time, a duration. That is named and left out of comparisons. What differs only from what was saved is lost
  state, and the script is refused.
- A program has phases: an evaluation, a copy of the best model. A save that holds objects of kinds, or of
  functions, that no rehearsal saw is rehearsed too, once the run has lasted long enough to be worth it.
- Numbers that differ by themselves reach no weights: a script whose arrays differ between two repetitions is
  not exact, with or without a resume.
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sublet.core.values import SECOND_US
from sublet.machine.run_folder import replace_file
from sublet.training.program_state.comparing import Difference, StateToCompare, pattern_of
from sublet.training.program_state.memory import ShownParts, digest_of_holder

#: The steps between the two saves of a rehearsal take about so long, unless one takes longer.
REPEATED_US = 2 * SECOND_US
MOST_REPEATED = 40
#: A beginning that takes longer is not run a second time before the run has taken so many times as long.
CHEAP_BEGINNING_US = 10 * SECOND_US
WORTH_IT_AFTER = 33
#: Of one version: a program that makes new kinds of objects for ever is not started again for ever.
MOST_REHEARSALS = 4
#: What may differ by itself without being part of a result.
_HARMLESS = ("number", "text")


@dataclass(slots=True)
class RehearsalPlan:
    """When a version that was never rehearsed is saved, and started again."""

    beginning_us: int
    why: str = "this version of the script is new"
    first_saved_at: int | None = None
    first_step: int = 0
    first_version: int = 0

    def after(self, step: int, now: int, run_us: int) -> str:
        """'save', 'restart' (after another save) or ''."""
        if self.beginning_us > CHEAP_BEGINNING_US and run_us < WORTH_IT_AFTER * self.beginning_us:
            return ""
        if self.first_saved_at is None:
            self.first_saved_at, self.first_step = now, step
            return "save"
        done = step - self.first_step
        if done >= MOST_REPEATED or (done and now - self.first_saved_at >= REPEATED_US):
            return "restart"
        return ""


@dataclass(slots=True)
class RememberedVersion:
    """What is known of one version of a script."""

    file: Path
    rehearsed: bool = False
    varies: set[str] = field(default_factory=set)  # patterns of paths
    kinds: set[str] = field(default_factory=set)  # of what was in the states that were compared
    rehearsals: int = 0

    def read(self) -> RememberedVersion:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = json.loads(self.file.read_text())
            self.rehearsed, self.varies = bool(found["rehearsed"]), set(found["varies"])
            self.kinds, self.rehearsals = set(found["kinds"]), int(found["rehearsals"])
        return self

    def plan_for(self, kinds: Collection[str], beginning_us: int, run_us: int) -> RehearsalPlan | None:
        """A rehearsal of what no rehearsal saw yet, if there is any and the run has lasted long enough."""
        unseen = sorted(set(kinds) - self.kinds)
        if not unseen or not self.rehearsed or self.rehearsals >= MOST_REHEARSALS:
            return None
        if run_us < WORTH_IT_AFTER * (beginning_us + REPEATED_US):
            return None
        return RehearsalPlan(beginning_us, f"what it holds is new: {', '.join(unseen[:3])}")

    def saw(self, *states: Mapping[str, Any]) -> None:
        """These states were compared, and are equal."""
        unseen = {kind for state in states for kind in state.get("kinds", ())} - self.kinds
        self.rehearsals += bool(unseen)
        self.kinds |= unseen
        self.rehearsed = True
        self.keep()

    def keep(self) -> None:
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            said = {
                "rehearsed": self.rehearsed,
                "varies": sorted(self.varies),
                "kinds": sorted(self.kinds),
                "rehearsals": self.rehearsals,
            }
            replace_file(self.file, json.dumps(said).encode())

    def telling(self, found: Iterable[Difference]) -> list[Difference]:
        """Without what is known to differ by itself."""
        return [d for d in found if pattern_of(d.path) not in self.varies or d.sort not in _HARMLESS]


@dataclass(slots=True)
class Repetition:
    """A state that came out differently, kept until the steps are repeated once more."""

    file: Path

    def keep(self, state: Any) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.file, pickle.dumps(state))

    def take(self) -> Any:
        """The one that was kept, once; None if there is none."""
        try:
            found = pickle.loads(self.file.read_bytes())
        except (OSError, pickle.UnpicklingError, EOFError):
            return None
        with contextlib.suppress(OSError):
            self.file.unlink()
        return found


def judged(found: Sequence[Difference], by_itself: Sequence[Difference]) -> tuple[list[Difference], set[str]]:
    """What is lost state, or not exact at all; and the patterns of what harmlessly differs by itself."""
    varies = {pattern_of(d.path) for d in by_itself}
    harmless = {pattern_of(d.path) for d in by_itself if d.sort in _HARMLESS}
    lost = [d for d in found if pattern_of(d.path) not in varies]
    return (lost or [d for d in by_itself if pattern_of(d.path) not in harmless]), harmless


# --- two saved states, to be compared -----------------------------------------------------------------------


def digests_of(tree: Any) -> dict[str, str]:
    """Of what the program saw of each block of memory."""
    shown = tree.get("shown", {})
    digests = {name: digest_of_holder(block, shown.get(name)) for name, block in tree["blocks"].items()}
    return {**digests, **tree["same"]}


def state_to_compare(tree: Any, words: Callable[[int], str]) -> StateToCompare:
    def block(name: str, parts: ShownParts) -> str:
        return str(tree["same"].get(name) or digest_of_holder(tree["blocks"][name], parts))

    return StateToCompare(bytes(tree["data"]), block, words, tree.get("shown"))


def to_compare(data: bytes, words: Callable[[int], str], digests: Mapping[str, str]) -> StateToCompare:
    """Where the memory itself is not there any more."""
    return StateToCompare(data, lambda name, _: digests.get(name), words)
