"""Training jobs as processes of their own, without the wait for their imports: each is forked from one process that has them all.

Rules of this file:
- A job is a function of a module named by `module:function`; its output goes to a file; it is killed and waited for by pid.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import Forked, Origin

_RUN = "import json, sys; from {} import {} as job; job(*json.loads(sys.argv[1]))"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Job:
    process: subprocess.Popen[str]
    output: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def said(self) -> str:
        return self.output.read_text()

    def steps(self) -> int:
        """The last step it told of."""
        found = re.findall(r"^step (\d+)$", self.said(), re.M)
        return int(found[-1]) if found else 0

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, seconds: float = 120.0) -> int:
        wait_for(lambda: self.poll() is not None, seconds, self.said)
        assert self.code is not None
        return self.code

    def wait_for_step(self, step: int, seconds: float = 120.0) -> None:
        wait_for(lambda: self.steps() >= step or self.poll() is not None, seconds, self.said)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)


def wait_for(fact: Callable[[], object], seconds: float, said: Callable[[], str] = str) -> None:
    ends = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < ends, f"it did not become true in {seconds} s\n{said()[-3000:]}"
        time.sleep(0.01)


class Nursery:
    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._jobs: list[Job] = []
        self._count = 0

    def start(self, job: str, *args: Any, folder: Path, environment: dict[str, str]) -> Job:
        self._count += 1
        output = folder / f"output-{self._count}.txt"
        module, _, function = job.partition(":")
        with output.open("wb") as lines:
            process = Forked(
                [sys.executable, "-u", "-c", _RUN.format(module, function), json.dumps(args)],
                origin=self._origin,
                env=_ONE_THREAD | environment,
                cwd=Path("/"),
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=lines,
                start_new_session=True,
            )
        started = Job(process, output)
        self._jobs.append(started)
        return started

    def end_jobs(self) -> None:
        for job in self._jobs:
            job.kill()
            job.wait(20)
        self._jobs.clear()
