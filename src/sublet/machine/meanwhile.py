"""Something done again and again in another thread, while this one waits for something else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def meanwhile(every_seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` every so often until the block is left. What it raises ends nothing: nobody waits for it."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_seconds):
            with contextlib.suppress(Exception):
                act()

    thread = threading.Thread(target=repeat, name="sublet-meanwhile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
