"""What the tests of `call_shown` call. In a file without pytest: every worker imports it."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from sublet.processes.worker import worker as there
from sublet.processes.worker.screen import ERR, OUT, WorkerScreen


def here() -> dict[str, Any]:
    """What the worker keeps between calls. In a module of its own: functions made in a test travel with
    copies of what they read."""
    found: dict[str, Any] = there.__dict__.setdefault("_of_tests", {})
    return found


def frames() -> WorkerScreen:
    """The worker's, made with its first call."""
    if "frames" not in here():
        here()["frames"] = made = WorkerScreen(there.screen_fd)
        sys.stdout, sys.stderr = made.stream(OUT), made.stream(ERR)
        os.register_at_fork(after_in_child=made.after_fork)
    found: WorkerScreen = here()["frames"]
    return found


def talk(n: int) -> int:
    show = frames().show
    for i in range(n):
        print(i)
        if i % 100 == 0:
            print(-i, file=sys.stderr)
            show({"i": i})
    sys.stdout.write("the end")
    return n


def ask(*questions: Any) -> list[Any]:
    return [there.ask_caller(question) for question in questions]


def sleep_through(seconds: float) -> str:
    frames()
    print("began")
    sys.stdout.flush()
    try:
        for _ in range(round(seconds * 100)):  # a signal just before a long sleep would be seen only after it
            time.sleep(0.01)
    except KeyboardInterrupt:
        return "interrupted"
    return "slept"
