"""What hostile sessions do. Each function runs in a leased worker, which has device memory in hand when it begins."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time


def _bystanders() -> None:
    """Every session leaves these behind too: a plain child, one in its own session, one that daemonised away."""
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(600)


def kill_itself() -> None:
    _bystanders()
    os.kill(os.getpid(), signal.SIGKILL)


def stop_itself() -> None:
    _bystanders()
    os.kill(os.getpid(), signal.SIGSTOP)


def ignore_term() -> None:
    _bystanders()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            time.sleep(600)
        except BaseException:
            continue


def hold_the_interpreter() -> None:
    """In C, signals blocked, the interpreter's lock held: nothing in this process will ever run again."""
    _bystanders()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).pause()


def bomb() -> None:
    """Children that make children, each in a session of its own, while the tree is being walked. Bounded: it is our machine."""
    for _ in range(5):
        if os.fork() == 0:
            for _ in range(15):
                if os.fork() == 0:
                    os.setsid()
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    if os.fork() == 0:
                        os.setsid()
                    time.sleep(600)
                time.sleep(0.01)
            time.sleep(600)
    time.sleep(600)


def crash() -> None:
    _bystanders()
    ctypes.string_at(0)


def leave() -> None:
    _bystanders()
    os._exit(0)


def flood() -> None:
    _bystanders()
    while True:
        sys.stdout.write("x" * 4096)


KINDS = (kill_itself, stop_itself, ignore_term, hold_the_interpreter, bomb, crash, leave, flood)
