"""What tests run in a worker to start processes that are hard to end. A module of its own, so that the worker
imports little.
"""

from __future__ import annotations

import os
import signal
import subprocess


def plant(word: str) -> None:
    os.environ["PLANTED"] = word  # for what is started from here on
    stubborn = ["/bin/sh", "-c", 'trap "" TERM INT HUP; while :; do sleep 1000; done']
    subprocess.Popen(stubborn)
    subprocess.Popen(stubborn, start_new_session=True)
    os.kill(subprocess.Popen(stubborn).pid, signal.SIGSTOP)
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(stubborn[0], stubborn)
        os._exit(0)
    os.waitpid(child, 0)
