"""A sink: where results go beside the ledger, such as the user's own database.

Rules of this port:
- Results are stored in the sink first and acknowledged in the ledger afterwards. A crash in between hands the
  item out again; the sink is then asked whether it knows the item, and if so the item is acknowledged without
  being worked on again.
- Storing is keyed by the item and fenced by its delivery: storing the same again changes nothing, and an
  older delivery never replaces a newer one.
- A sink that is down means backpressure: `SinkDown`, nothing acknowledged, nothing pulled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One result, with everything that says whose it is."""

    key: str  # QUEUE/ITEM: the idempotency key, the same at every delivery
    queue: str
    item: int
    item_key: str  # what the publisher called it; '' when it did not
    delivery: int  # rises each time the item is handed out
    body: Any
    result: Any


class Sink(Protocol):
    """Used by several threads at once."""

    def check(self) -> None:
        """Called once before any work is begun: `BadInput` or `Misconfigured` for an address that can never
        work, `SinkDown` when it is not up."""

    def store(self, results: Sequence[Made]) -> None:
        """Durable when it returns. `SinkDown` when it cannot now (nothing or some of it is stored, and
        storing again is fine); `BadInput` for what it will never take."""

    def known(self, keys: Sequence[str]) -> set[str]:
        """Called before redelivered items are worked on: which of these are stored already. A sink that
        cannot tell answers none."""

    def describe(self) -> dict[str, str]:
        """For `queue show`: kind and place, without secrets."""

    def close(self) -> None:
        """Safe to call twice."""


class OpenSink(Protocol):
    """What an entry point of the group `sublet.sinks` is, named by the address's scheme."""

    def __call__(self, url: str) -> Sink: ...
