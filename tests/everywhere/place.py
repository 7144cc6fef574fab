"""Where the programs of this package run: this machine alone, or a cluster; a user changes settings and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sublet.leases.warden.warden_process import warden_state
from sublet.ports.ledger import Ledger
from sublet.settings import load_settings
from sublet.studio.holder.finding import stop
from sublet.wiring import open_ledger
from tests import forked

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_SECONDS = 240


@dataclass
class Place:
    python: str
    environment: dict[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
        """In the folder of the programs. What is still running when the place is left is killed."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        of_ours = self.python == sys.executable  # forked; a cluster's is another interpreter
        made: subprocess.Popen[Any] = (forked.Forked if of_ours else subprocess.Popen)(
            [self.python, *arguments],
            env=self.environment,
            cwd=PROGRAMS,
            stdin=subprocess.DEVNULL,
            **streams,
        )
        self.started.append(made)
        return made

    def start_sublet(self, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
        return self.start("-m", "sublet", *arguments, **streams)

    def ended(self, process: subprocess.Popen[bytes], code: int = 0) -> bytes:
        """Its standard output, when it has left with this code."""
        out, errors = process.communicate(timeout=LIMIT_SECONDS)
        said = (errors or b"").decode(errors="replace")[-3000:]
        assert process.returncode == code, f"it left with {process.returncode}: {said}"
        return out or b""

    def run(self, *arguments: str) -> dict[str, Any]:
        return facts(self.ended(self.start(*arguments)))

    def sublet(self, *arguments: str, code: int = 0) -> bytes:
        return self.ended(self.start_sublet(*arguments), code)

    def trained(self, name: str, steps: int, pause: float = 0.0) -> tuple[str, ...]:
        """The words of a run that trains."""
        program = (self.python, "train.py", name, str(steps), str(pause))
        return ("run", "--vram", "64MiB", "--ttl", "20s", "--name", name, "--", *program)

    @contextlib.contextmanager
    def ledger(self) -> Iterator[Ledger]:
        yield open_ledger(load_settings(ledger=self.environment["SUBLET_LEDGER"]))

    def elsewhere(self, **changed: str) -> Place:
        return Place(self.python, self.environment | changed, self.started)

    def leave(self) -> None:
        names = ("home", "ledger", "host")
        settings = load_settings(**{name: self.environment[f"SUBLET_{name.upper()}"] for name in names})
        stop(settings)  # the process that holds sessions
        running, _, warden = warden_state(settings)
        if running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(warden, signal.SIGTERM)
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def facts(out: bytes) -> dict[str, Any]:
    """What was printed as JSON, in one. Nothing else may have been printed."""
    found: dict[str, Any] = {}
    for line in out.splitlines():
        found |= json.loads(line)
    return found


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if not k.startswith(("SUBLET_", "RAY_", "AWS_"))}
