"""Programs under strace, killed at one system call or given an error by it.

Each is forked from a process that has its imports: it gets ready, says who it is, waits to be traced, does what it is asked and says how that went.

Rules of this file:
- Only what comes after `begin` is traced, so that the same call is the same place in every program.
- A place is a call at its first, second, … time. strace counts for each thread: of a program with several, the busiest thread's count is taken.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.conftest import need

_ZYGOTE = """
import ctypes, json, os, signal, sys

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

def say(**what):
    os.writev(1, [(json.dumps(what) + "\\n").encode()])  # a call that no program under test makes

def begin(**who):
    say(pid=os.getpid(), **who)
    signal.sigwait({signal.SIGUSR1})

%s

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # whoever is not root may trace it too
            program(**json.loads(line))
        except BaseException as e:
            say(failed=type(e).__name__, why=str(e)[:300])
            os._exit(1)
        os._exit(0)
    say(ended=os.waitpid(child, 0)[1])
"""


class Programs:
    def __init__(self, source: str, calls: str, log: Path) -> None:
        """`source` defines `program(**order)`, which calls `begin` when it is ready; `calls` are those that are looked at."""
        need(shutil.which("strace") is not None, "strace")
        self._calls, self._log = calls, log
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", _ZYGOTE % source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _said(self) -> dict[str, Any]:
        assert self._zygote.stdout is not None
        said: dict[str, Any] = json.loads(self._zygote.stdout.readline())
        return said

    def run(
        self, order: dict[str, Any], inject: str = "", whom: str = "pid"
    ) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, int]]:
        """Who it was, what was said until it ended, and how often each call was made. `whom`: which of those it named is traced."""
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(order) + "\n")
        self._zygote.stdin.flush()
        born = self._said()
        assert "pid" in born, born
        command = ["strace", "-f", "-o", str(self._log), "-e", f"trace={self._calls}", "-p", str(born[whom])]
        if inject:
            command += ["-e", f"inject={inject}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            words = strace.stderr.readline()
            need("attached" in words, f"strace that may trace ({words.strip()})")
            os.kill(born["pid"], signal.SIGUSR1)
            said = []
            while not said or "ended" not in said[-1]:
                said.append(self._said())
            strace.communicate(timeout=20)
        often: dict[str, int] = {}
        seen = re.findall(r"^(\d+) +(\w+)\(", self._log.read_text(), re.MULTILINE)
        for (_, call), count in Counter(seen).items():
            often[call] = max(often.get(call, 0), count)
        return born, said, often

    def close(self) -> None:
        self._zygote.communicate(timeout=20)


def places_of(often: dict[str, int]) -> list[tuple[str, int]]:
    return [(call, n) for call, count in sorted(often.items()) for n in range(1, count + 1)]
