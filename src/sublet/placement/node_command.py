"""A command on this node, as the node's agent keeps it: its folder, its streams, and the end of both.

Rules of this file:
- It is an ordinary command of `sublet run`, with a supervisor of its own that holds the lease and enforces
  every deadline alone. Nothing here has to work for that.
- Its folder is on the node: the key of its lease, the page with its deadline, and the notice file are where
  the command is. The folder goes when the command is gone.
- What the command writes is passed on byte by byte. When nobody fetches it, the command's writes wait, as at
  any full pipe.
- The caller's folders are used where they exist on this node; else others are, and the command is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sublet.core.notice import Notice
from sublet.core.runs.remote_environment import folders, placed_environment
from sublet.machine import lease_environment
from sublet.machine.executables import find_executable
from sublet.machine.run_folder import RunFolder
from sublet.ports.ledger import LeaseKey
from sublet.processes.ladder import read_stat
from sublet.settings import Settings
from sublet.wiring import CLOCK, start_command

READ_BYTES = 1 << 16
#: How often the steps are read, while nothing else happens.
LOOK_MS = 250
#: How long the last bytes in the pipe are read for, when the command and all it started are gone.
LAST_BYTES_US = 5_000_000
STDOUT, STDERR = 1, 2


def placed_folder(home: Path) -> Path:
    """A folder apart from this user's own runs: the run is elsewhere, and may even share this home."""
    return home / "run" / "placed"


class NodeCommand:
    def __init__(
        self, settings: Settings, number: str, asked: Mapping[str, Any], around: Mapping[str, str]
    ) -> None:
        """`asked` is a `ports.placement.CommandOrder`, and whether its two streams are one; `around` is this
        node's environment."""
        self._settings = settings
        self._around = dict(around)
        self._run = RunFolder(placed_folder(settings.home) / number)
        self._run.path.parent.mkdir(parents=True, exist_ok=True)
        self._run.make()
        self._made: Path | None = None  # a checkpoint folder of this node's own
        self._orphaned = False
        self._grace_us: int = asked["grace_us"]
        self._named: dict[str, str] = asked["named"]
        self._said = ""
        folder = asked["folder"]
        if not os.path.isdir(folder):
            self._said = (
                f"sublet: there is no folder {folder} on host {settings['host']}; "
                f"it starts in {Path.home()}\n"
            )
            folder = str(Path.home())
        executable = asked["command"][0]
        if "/" not in executable:
            path = folders(asked["path"], self._around.get("PATH", ""))
            executable = find_executable(executable, path)[0] or executable
        self._streams: dict[int, int] = {}  # what is read: which of the two it is
        self._deaf: set[int] = set()
        out, out_end = os.pipe2(os.O_CLOEXEC)
        err, err_end = (-1, out_end) if asked["merged"] else os.pipe2(os.O_CLOEXEC)
        try:
            self.command = start_command(
                settings,
                self._run,
                executable,
                asked["command"],
                self._grace_us,
                folder=folder,
                streams={"stdin": subprocess.DEVNULL, "stdout": out_end, "stderr": err_end},
            )
        except BaseException:
            os.close(out)
            if err >= 0:
                os.close(err)
            self._clear()
            raise
        finally:
            os.close(out_end)
            if err >= 0:
                os.close(err_end)
        self._streams[out] = STDOUT
        if err >= 0:
            self._streams[err] = STDERR

    def begin(
        self, key: LeaseKey, environment: Mapping[str, str], say: Callable[[tuple[Any, ...], int], None]
    ) -> None:
        """`say` takes an event and its size; it may block."""
        self.command.entrust(key)
        if self._said:
            say(("out", STDERR, self._said.encode()), len(self._said))
        seen = placed_environment(environment, self._named, self._around, self._of_this_node(environment))
        self.command.begin(key.lease_id, key.epoch, seen)
        threading.Thread(target=self._pass_on, args=(say,), name="sublet-command", daemon=True).start()

    def _of_this_node(self, environment: Mapping[str, str]) -> dict[str, str]:
        ours = {
            f"SUBLET_{name.upper()}": self._settings[name] for name in ("home", "host", "devices", "ledger")
        }
        if not environment.get("SUBLET_STORE"):
            ours["SUBLET_STORE"] = self._settings["store"]
        kept = environment.get("SUBLET_CHECKPOINT_DIR", "")
        if not os.path.isdir(kept):
            own = self._settings.home / "checkpoints" / environment.get("SUBLET_JOB", self._run.id)
            self._made = None if own.exists() else own
            own.mkdir(parents=True, exist_ok=True)
            kept = str(own)
        return ours | {
            "SUBLET_PLACEMENT": "local",
            "SUBLET_CHECKPOINT_DIR": kept,
            "SUBLET_NOTICE_FILE": str(self._run.notice_file),
        }

    # while it runs

    def drain(self, notice: Notice) -> None:
        """Write the notice before the signal, so that whoever looks then finds the reason there."""
        with contextlib.suppress(OSError):  # a full disk must not keep it from being told
            self._run.write_notice(notice, CLOCK.monotonic_us(), CLOCK.wall_us())
        self.command.drain(notice)

    def abandon(self) -> None:
        """Tell the command to leave, once, when the run that looked after it is gone: its lease is no longer
        renewed."""
        if self._orphaned:
            return
        self._orphaned = True
        why = "the run that looks after it was killed: its lease is not renewed any more"
        ends = CLOCK.monotonic_us() + self._grace_us
        self.drain(Notice(source="supervisor", reason=why, deadline_us=ends))

    def deafen(self, stream: int) -> None:
        """Close a stream that nobody reads any more, so that the command sees a closed pipe."""
        self._deaf.add(stream)

    def _pass_on(self, say: Callable[[tuple[Any, ...], int], None]) -> None:
        poller = select.poll()
        control = self.command.fileno()
        for fd in (*self._streams, control):
            poller.register(fd, select.POLLIN)
        steps, left, give_up = (0, 0, False), None, 0
        while left is None or (self._streams and CLOCK.monotonic_us() < give_up):
            ready = {fd for fd, _ in poller.poll(LOOK_MS)}
            for fd in [fd for fd in self._streams if fd in ready or self._streams[fd] in self._deaf]:
                data = b"" if self._streams[fd] in self._deaf else os.read(fd, READ_BYTES)
                if data:
                    say(("out", self._streams[fd], data), len(data))
                else:
                    poller.unregister(fd)
                    os.close(fd)
                    del self._streams[fd]
            if left is None and (control in ready or not self.command.fileno() >= 0):
                left = self.command.left()
                if left is not None or self.command.fileno() < 0:
                    poller.unregister(control)
                    give_up = CLOCK.monotonic_us() + LAST_BYTES_US
                if left is None and self.command.fileno() < 0:
                    break  # ended by whoever asked for it, who does not wait for this
            reported = (*self.command.steps(), self.command.unfinished())
            if reported != steps:
                steps = reported
                say(("steps", *steps), 0)
        for fd in self._streams:
            os.close(fd)
        self._streams.clear()
        if left is not None:
            facts = {name: getattr(left, name) for name in ("code", "why", "killed", "lease_over")}
            say(("left", facts), 0)

    # its end

    def end(self, why: str) -> None:
        self.command.end(why)
        self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self._run.path, ignore_errors=True)
        if self._made is not None:
            with contextlib.suppress(OSError):
                self._made.rmdir()  # nobody used it


def clear_leftovers(home: Path) -> None:
    """Remove folders of commands whose agent was killed, and whose supervisor is gone since."""
    with contextlib.suppress(OSError):
        for path in placed_folder(home).iterdir():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                pid, started = json.loads((path / lease_environment.KEY_FILE).read_text())["holder"]
                stat = read_stat(pid)
                if stat is None or stat.started != started:
                    shutil.rmtree(path, ignore_errors=True)
