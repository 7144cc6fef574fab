"""A home for runs, and real `sublet run` processes in it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet import wiring
from sublet.cli.main import main
from sublet.core.leasing.lease import LeaseState
from sublet.machine.run_folder import RunFolder, runs_folder
from sublet.ports.ledger import Ledger
from tests import forked
from tests.homes import Home, wait_until
from tests.processes.supervisor.test_command import marked

SUBLET = (sys.executable, "-m", "sublet")

#: A script that says each start, and on SIGTERM what it was told, and then does as its second argument says.
SCRIPT = """
    import json, os, signal, sys, time
    out, ending = sys.argv[1:3]
    count = int(os.environ["SUBLET_RESTART_COUNT"])
    def note(what):
        with open(out, "a") as file:
            file.write(what + "\\n")
    def leave(*_):
        try:
            said = json.load(open(os.environ["SUBLET_NOTICE_FILE"]))
        except OSError:
            said = "nothing"
        note("told " + json.dumps(said))
        if ending != "stay":
            sys.exit(int(ending))
    signal.signal(signal.SIGTERM, leave)
    if os.path.exists(os.environ["SUBLET_NOTICE_FILE"]):
        note("an old notice")
    note(f"start {count} {os.environ['SUBLET_LEASE_ID']}")
    if count < int(sys.argv[3]):
        while True:
            time.sleep(0.01)
    note("done")
"""


class Started:
    """One `sublet run`, and what it leaves behind."""

    def __init__(
        self, home: Home, tmp_path: Path, options: tuple[str, ...], command: list[str], **popen: Any
    ):
        self.home = home
        self.name = f"j{uuid.uuid4().hex[:8]}"
        self.mark = f"MARK={uuid.uuid4().hex}"
        self.out = tmp_path / f"{self.name}.out"
        kind = subprocess.Popen if "preexec_fn" in popen else forked.Forked
        self.process = kind(
            [*SUBLET, "run", "--name", self.name, "--env", self.mark, *options, "--", *command],
            **({"env": home.environment, "stderr": subprocess.PIPE, "text": True} | popen),
        )

    @property
    def folder(self) -> RunFolder:
        found = [p for p in runs_folder(self.home.settings.home).glob("*") if self._is_mine(p)]
        return RunFolder(found[0]) if found else RunFolder(Path("/nonexistent"))

    def _is_mine(self, path: Path) -> bool:
        return RunFolder(path).facts().get("name") == self.name

    def notes(self) -> list[str]:
        return self.out.read_text().splitlines() if self.out.exists() else []

    def starts(self) -> list[str]:
        return [line for line in self.notes() if line.startswith("start")]

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line[5:]) for line in self.notes() if line.startswith("told")]

    def wait_for_start(self, number: int = 1) -> str:
        """Its lease's id."""
        wait_until(lambda: len(self.starts()) >= number, 30)
        return self.starts()[-1].split()[2]

    def wait(self, seconds: float = 40) -> int:
        try:
            return self.process.wait(timeout=seconds)
        finally:
            if self.process.stderr is not None and self.process.poll() is not None:
                self.said = self.process.stderr.read()

    @property
    def exit(self) -> dict[str, Any]:
        return self.folder.exit()

    @property
    def alive(self) -> list[int]:
        """Processes of the command."""
        return marked(self.mark)

    def close(self) -> None:
        facts = self.folder.facts()
        for pid in [self.process.pid, *facts.get("supervisor", [])[:1]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr, self.process.stdin):
            if stream is not None:
                stream.close()


class Runs:
    def __init__(self, home: Home, tmp_path: Path) -> None:
        self.home = home
        self.path = tmp_path
        self._started: list[Started] = []

    @property
    def ledger(self) -> Ledger:
        return wiring.open_ledger(self.home.settings)

    def script(self, *options: str, ending: str = "85", until: int = 1, **popen: Any) -> Started:
        """`SCRIPT` waits to be told in each start before the `until`th, and then is done."""
        made = Started.__new__(Started)
        out = self.path / f"{uuid.uuid4().hex[:8]}.out"
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(out), ending, str(until)]
        made.__init__(self.home, self.path, options, command, **popen)  # type: ignore[misc]
        made.out = out
        self._started.append(made)
        return made

    def python(self, code: str, *args: str, options: tuple[str, ...] = (), **popen: Any) -> Started:
        command = [sys.executable, "-c", textwrap.dedent(code), *args]
        return self.command(*command, options=options, **popen)

    def command(self, *command: str, options: tuple[str, ...] = (), **popen: Any) -> Started:
        made = Started(self.home, self.path, options, list(command), **popen)
        self._started.append(made)
        return made

    def quick(self, *args: str) -> subprocess.CompletedProcess[str]:
        """The command line in this process: for what needs no process of its own to be true."""
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["sublet", *args])
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                pytest.raises(SystemExit) as left,
            ):
                main()
        said = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(["sublet", *args], int(left.value.code or 0), *said)

    def sublet(self, *args: str) -> subprocess.CompletedProcess[str]:
        return forked.run([*SUBLET, *args], env=self.home.environment, timeout=60)

    def settled(self, lease_id: str) -> None:
        wait_until(lambda: self.ledger.look(lease_id).lease.settled_at, 20)

    def close(self) -> None:
        for one in self._started:
            one.close()
        for one in self._started:
            wait_until(lambda one=one: not one.alive, 20)
        wait_until(lambda: not [a for a in self.ledger.leases() if a.lease.state is not LeaseState.ENDED], 20)


@contextlib.contextmanager
def runs_in(home: Home, tmp_path: Path) -> Iterator[Runs]:
    made = Runs(home, tmp_path)
    try:
        yield made
    finally:
        made.close()
