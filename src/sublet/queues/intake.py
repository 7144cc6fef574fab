"""Items that come from a broker: its messages become items of the ledger's queue.

Rules of this file:
- A message is durable in the ledger first and settled at the broker afterwards. A crash between the two is a
  duplicate later, which its key shows, and never a loss.
- A message that can never be an item is put aside at the broker, with the reason.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence

from sublet.core.errors import BadInput, NotJson, SubletError, TooLarge
from sublet.core.queues.items import NewItem, from_text, to_text
from sublet.ports.broker import Broker, BrokerMessage
from sublet.ports.items import Published


class BrokerIntake:
    """One queue's broker, opened at the first use by each process for itself."""

    def __init__(
        self,
        queue: str,
        open_broker: Callable[[], Broker],
        into_ledger: Callable[[Sequence[NewItem]], Published],
    ) -> None:
        self._queue = queue
        self._open = open_broker
        self._into_ledger = into_ledger
        self._broker: Broker | None = None
        self.new_lock()

    def new_lock(self) -> None:
        # Not the queue's own lock: one thread may wait at the broker while another one completes.
        self._lock = threading.Lock()

    def forget(self) -> None:
        """A forked child opens a connection of its own."""
        self._broker = None

    def close(self) -> None:
        if self._broker is not None:
            self._broker.close()
            self._broker = None

    def _opened(self) -> Broker:
        if self._broker is None:
            self._broker = self._open()
        return self._broker

    def publish(self, drafts: Sequence[NewItem]) -> Published:
        if any(draft.priority or draft.delay_us for draft in drafts):
            raise BadInput(
                "a broker's queue has no priority and no delay: leave them out, or publish without broker="
            )
        with self._lock:
            self._opened().publish([(draft.key, from_text(draft.body)) for draft in drafts])
        return Published(new=len(drafts))

    def take_in(self, most: int, *, wait_us: int) -> int:
        """Take in up to so many messages; how many of them are new items."""
        with self._lock:
            broker = self._opened()
            messages = broker.receive(most, wait_us=wait_us)
            if not messages:
                return 0
            drafts: list[NewItem] = []
            unfit: list[tuple[BrokerMessage, SubletError]] = []
            for message in messages:
                try:
                    drafts.append(NewItem(body=to_text(message.body, what="a message"), key=message.key))
                except (NotJson, TooLarge) as e:
                    unfit.append((message, e))
            try:
                done = self._into_ledger(drafts) if drafts else Published(new=0)
            except BaseException:
                with contextlib.suppress(SubletError):
                    broker.give_back(messages)
                raise
            for key in done.conflicts:
                warnings.warn(
                    f"queue {self._queue}: a message with the key {key[:80]} came with another content than "
                    "before; "
                    "the first one counts",
                    RuntimeWarning,
                    stacklevel=2,
                )
            for message, why in unfit:
                broker.put_aside(message, str(why))
            refused = {id(message) for message, _ in unfit}
            broker.settle([message for message in messages if id(message) not in refused])
            return done.new
