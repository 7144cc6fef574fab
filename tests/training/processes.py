"""Training jobs as processes of their own, without the wait for their imports: each is forked from one process that has them all.

Rules of this file:
- The process that is forked runs nothing but imports and has one thread.
- A job is a function of a module named by `module:function`; its output goes to a file; it is killed and waited for by pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sublet.failpoints import arm_from_environment

ROOT = Path(__file__).parents[2]
_SERVE = "import sys; from tests.training.processes import serve; serve(int(sys.argv[1]), sys.argv[2:])"


def serve(number: int, modules: list[str]) -> None:
    for name in modules:
        import_module(name)
    link = socket.socket(fileno=number)
    reading = link.makefile("r")
    link.sendall(b"{}\n")
    for line in reading:
        asked = json.loads(line)
        if "wait" in asked:
            try:
                pid, status = os.waitpid(asked["wait"], os.WNOHANG)
                code = None if pid == 0 else os.waitstatus_to_exitcode(status)
            except ChildProcessError:
                code = -999
            link.sendall(json.dumps({"code": code}).encode() + b"\n")
            continue
        pid = os.fork()
        if pid == 0:
            link.close()
            _become(asked)
        link.sendall(json.dumps({"pid": pid}).encode() + b"\n")
    os._exit(0)


def _become(asked: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        out = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(asked["environment"])
        arm_from_environment()
        module, _, function = asked["job"].partition(":")
        getattr(import_module(module), function)(*asked["args"])
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Job:
    nursery: Nursery
    pid: int
    output: Path
    code: int | None = None

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def steps(self) -> int:
        """The last step it told of."""
        found = re.findall(r"^step (\d+)$", self.said(), re.M)
        return int(found[-1]) if found else 0

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.nursery.ask({"wait": self.pid})["code"]
        return self.code

    def wait(self, seconds: float = 120.0) -> int:
        wait_for(lambda: self.poll() is not None, seconds, self.said)
        assert self.code is not None
        return self.code

    def wait_for_step(self, step: int, seconds: float = 120.0) -> None:
        wait_for(lambda: self.steps() >= step or self.poll() is not None, seconds, self.said)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def wait_for(fact: Callable[[], object], seconds: float, said: Callable[[], str] = str) -> None:
    ends = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < ends, f"it did not become true in {seconds} s\n{said()[-3000:]}"
        time.sleep(0.002)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nursery:
    def __init__(self, *modules: str) -> None:
        mine, its = socket.socketpair()
        self._link = mine
        environment = dict(os.environ) | {
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVE, str(its.fileno()), *modules],
            pass_fds=[its.fileno()],
            env=environment,
        )
        its.close()
        self._reading = mine.makefile("r")
        self._jobs: list[Job] = []
        self._count = 0
        self._hear()

    def _hear(self) -> Any:
        line = self._reading.readline()
        assert line, "the process that is forked has ended"
        return json.loads(line)

    def ask(self, what: dict[str, Any]) -> Any:
        self._link.sendall(json.dumps(what).encode() + b"\n")
        return self._hear()

    def start(self, job: str, *args: Any, folder: Path, environment: dict[str, str]) -> Job:
        self._count += 1
        output = folder / f"output-{self._count}.txt"
        asked = {
            "job": job,
            "args": args,
            "output": str(output),
            "environment": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
        }
        started = Job(self, self.ask(asked)["pid"], output)
        self._jobs.append(started)
        return started

    def end_jobs(self) -> None:
        for job in self._jobs:
            job.kill()
            job.wait(20)
        self._jobs.clear()

    def close(self) -> None:
        self.end_jobs()
        self._reading.close()
        self._link.close()
        self._process.wait(20)
