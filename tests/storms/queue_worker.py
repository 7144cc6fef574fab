"""One worker of a queue storm: `python -m tests.storms.queue_worker QUEUE BATCH LOG`, with the ledger and the broker in its environment.

It writes down what it was told: "done ITEM DELIVERY" after a result was accepted, "stale ITEM DELIVERY" after one was refused. What was accepted must be
found in the ledger afterwards, as it was written.
"""

from __future__ import annotations

import os
import random
import sys
import time

import sublet
from sublet.core.errors import BrokerDown, Disconnected, StaleDelivery


def main() -> None:
    name, batch, log = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    queue = sublet.queue(name, broker=os.environ.get("STORM_BROKER") or None)
    chance = random.Random(os.getpid())
    with open(log, "a", buffering=1) as told:
        while True:
            try:
                items = queue.take(batch, visibility_us=1_000_000, wait_us=1_000_000)
            except (BrokerDown, Disconnected):
                time.sleep(0.05)
                continue
            for start in range(0, len(items), 4):
                time.sleep(
                    chance.random() / 12
                )  # a little work, so that a fast machine has items in hand when it is struck
                some = [
                    (item, {"item": item.id, "body": item.body, "by": os.getpid()})
                    for item in items[start : start + 4]
                ]
                told.write("".join(f"try {item.id} {item.delivery}\n" for item, _ in some))
                for (item, _), refused in zip(some, queue.complete(some), strict=True):
                    assert refused is None or isinstance(refused, StaleDelivery)
                    told.write(f"{'stale' if refused else 'done'} {item.id} {item.delivery}\n")


if __name__ == "__main__":
    main()
