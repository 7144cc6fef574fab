"""A process that stores results, to be killed: `python -m tests.queues.sinks.writer MODULE:OPENER URL ITEMS BATCH DELIVERY`. Says a line after each batch."""

from __future__ import annotations

import sys
from importlib import import_module

from tests.queues.sinks.results import made


def main() -> None:
    opener, url, items, batch, delivery = sys.argv[1:]
    module, _, name = opener.partition(":")
    sink = getattr(import_module(module), name)(url)
    for start in range(0, int(items), int(batch)):
        sink.store([made(n, delivery=int(delivery)) for n in range(start, start + int(batch))])
        print(start, flush=True)
    sink.close()


if __name__ == "__main__":
    main()
