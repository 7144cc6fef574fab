"""A step as its body sees it, and what it does outside the model, once: reserved before it is done, true with
the commit of the step.

Rules of this file:
- An effect that a committed step made is not made again: its stored result is returned.
- What is returned the first time is what a repeat will get: it went through the same text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from typing import Any

from sublet.core.errors import BadInput
from sublet.core.progress.effect import AlreadyCommitted, Done
from sublet.training.run_parts import Parts
from sublet.training.saves import Saves


class Step:
    """One numbered unit of progress, while its body runs."""

    def __init__(
        self,
        job: str,
        number: int,
        log: Callable[[dict[str, Any]], None],
        effect: Callable[[int, str, Callable[..., Any]], Any],
    ) -> None:
        self.number = number
        self._job = job
        self._log = log
        self._effect = effect

    def log(self, **values: Any) -> None:
        """Numbers worth seeing: shown in the progress line, committed with the step."""
        self._log(values)

    def effect(self, key: str, function: Callable[..., Any]) -> Any:
        """Do something outside the model once for this job: `step.effect("mail-epoch-1", send)`.

        It becomes true with the commit that makes this step true; asked again after that, its stored result
        is returned and the function is not called. If the process dies between the call and that commit, the
        function is called again by whoever repeats the step: give it a parameter without a default and it
        receives the key, so that whatever it talks to can tell a repeat.
        """
        return self._effect(self.number, key, function)

    def record(self, key: str, value: Any) -> Any:
        """A row of your own, committed with this step and readable afterwards: `sublet audit JOB
        --effects`."""
        return self._effect(self.number, key, lambda: value)

    def __repr__(self) -> str:
        return f"<Step {self.number} of {self._job}>"


class Effects:
    """The effects of one run."""

    def __init__(self, job: str, parts: Parts, saves: Saves) -> None:
        self._job = job
        self._parts = parts
        self._saves = saves

    def do(self, number: int, key: str, function: Callable[..., Any]) -> Any:
        """In the body of step `number`."""
        lease = self._parts.lease
        if lease is None:
            return None  # rank 0 does it for all
        full = f"{self._job}#{key}"  # no job's name has a '#' in it: no two jobs have a key in common
        if self._saves.has_effect(full):
            raise BadInput(
                f"effect {key!r} was done in a step that is not committed yet: use one key for one thing"
            )
        self._saves.make_room_for_an_effect()
        fingerprint = hashlib.sha256(f"{self._job}\n{number}\n{key}".encode()).hexdigest()
        reserved = self._parts.ledger.reserve(lease.key, effect=full, job=self._job, fingerprint=fingerprint)
        if isinstance(reserved, AlreadyCommitted):
            return json.loads(reserved.outcome)
        value = function(full) if _wants_the_key(function) else function()
        try:
            done = Done(key=full, fingerprint=fingerprint, outcome=json.dumps(value))
        except (TypeError, ValueError) as e:
            raise BadInput(
                f"what effect {key!r} returned cannot be stored: {e}",
                remedy="return numbers, texts, lists and dicts, or None",
            ) from e
        self._saves.add_effect(done)
        return json.loads(done.outcome)  # what a repeat will get: the first time must not differ


def _wants_the_key(function: Callable[..., Any]) -> bool:
    """Whether the function wants the key. A parameter with a default (`lambda n=n: ...`) keeps its value."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False  # written in C, without a signature
    return any(p.default is p.empty and p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
