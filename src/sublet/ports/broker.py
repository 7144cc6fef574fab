"""An external broker: where items come from that other programs publish.

Rules of this port:
- The ledger's queue is the truth. A message is received, becomes an item by its key, and is settled when that
  item is durable. What happens to the item (visibility, retries, dead-letter, the result) is the ledger's
  business, so a broker needs to promise only one thing: what was not settled comes again.
- A message's key is the same at every redelivery. It is what makes a redelivered message a duplicate and not
  more work.
- No message is ever settled before its item is durable, and none is held long: receive, publish, settle takes
  milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerMessage:
    """One message that was received and is not settled."""

    # the same at every redelivery: the sender's id if it gave one, else the broker's, else a digest of the
    # content
    key: str
    body: Any  # what JSON can hold; a body that is not JSON is its text
    receipt: Any  # the broker's own
    redelivered: bool = False


class Broker(Protocol):
    """One queue of one broker. Used by one thread. Raises `BrokerDown` when it cannot be reached, after
    trying again on a new connection."""

    def receive(self, most: int, *, wait_us: int = 0) -> list[BrokerMessage]:
        """Called when the queue pulls: up to so many, waiting at most so long for the first. A message that
        cannot be read at all (neither JSON nor text) is put aside by the broker's own dead-letter means or
        dropped with a warning that names it, never returned and never left to block the others."""

    def settle(self, messages: Sequence[BrokerMessage]) -> None:
        """Called when their items are durable: the broker may forget them. A receipt that lapsed is not an
        error: its message comes again, as a duplicate."""

    def give_back(self, messages: Sequence[BrokerMessage]) -> None:
        """Called when they could not be made items: they are available again at once."""

    def put_aside(self, message: BrokerMessage, why: str) -> None:
        """Called for one that can never be an item, such as a far too large one: to the broker's dead-letter
        means, or left to lapse where only the broker itself moves it there; a warning names it. It does not
        come again at once, and holds up no other."""

    def publish(self, items: Sequence[tuple[str, Any]]) -> None:
        """Called by `queue.publish` on a queue with a broker: (key, body) each; durable at the broker when it
        returns. A key of '' lets the broker name it."""

    def depth(self) -> int | None:
        """For stats: how many wait there, about; None when it cannot say."""

    def describe(self) -> dict[str, str]:
        """For `queue show` and the doctor: kind, place (without secrets), queue."""

    def close(self) -> None:
        """Safe to call twice. What was received and not settled goes back."""


class OpenBroker(Protocol):
    """What an entry point of the group `sublet.brokers` is, named by the address's scheme."""

    def __call__(self, url: str, queue: str) -> Broker:
        """`queue` is the queue's name; `?queue=NAME` in the address names another one at the broker."""
