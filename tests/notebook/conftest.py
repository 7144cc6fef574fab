"""A real kernel, with a real ledger, warden and zygote behind it; most tests of a file share one."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.ports.ledger import Answer
from sublet.wiring import open_ledger
from tests import forked
from tests.conftest import need
from tests.homes import Home, close_home, make_home

ROOT = Path(__file__).parents[2]
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PATIENCE = 60.0


@dataclass
class Shown:
    """What became of one cell."""

    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    cleared: int = 0
    result: str = ""
    data: dict[str, Any] = field(default_factory=dict)  # of the result
    error: str = ""  # the class's name
    said: str = ""  # by the error
    trace: str = ""
    order: list[str] = field(default_factory=list)
    seconds: float = 0.0
    status: str = ""

    def take(self, kind: str, content: Mapping[str, Any]) -> None:
        self.order.append(kind)
        if kind == "stream":
            name = content["name"]
            setattr(self, name, getattr(self, name) + content["text"])
        elif kind == "display_data":
            self.displays.append(dict(content))
        elif kind == "update_display_data":
            self.updates.append(dict(content))
        elif kind == "clear_output":
            self.cleared += 1
        elif kind == "execute_result":
            self.result, self.data = content["data"]["text/plain"], content["data"]
        elif kind == "error":
            self.error, self.said = content["ename"], content["evalue"]
            self.trace = _COLOUR.sub("", "\n".join(content["traceback"]))

    @property
    def line(self) -> str:
        """The quiet one under the cell."""
        lines = [d["data"]["text/plain"] for d in self.displays if "GPU-s" in d["data"].get("text/plain", "")]
        assert lines, f"no line under the cell: {self}"
        return str(lines[-1])

    @property
    def texts(self) -> list[str]:
        return [d["data"].get("text/plain", "") for d in self.displays]


class Kernel:
    """One notebook."""

    def __init__(self, folder: Path, environment: Mapping[str, str], name: str = "notebook") -> None:
        from jupyter_client.manager import KernelManager

        folder.mkdir(parents=True, exist_ok=True)
        self.manager = KernelManager(kernel_name="python3", transport="ipc")
        self.manager.ip = str(folder / "k")
        env = dict(environment) | {
            "IPYTHONDIR": str(folder / "ipython"),
            "JPY_SESSION_NAME": f"{name}.ipynb",
        }
        with forked.kernels():
            self.manager.start_kernel(env=env, cwd=str(folder))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        self.begun: str = ""

    def begin(self, code: str) -> None:
        """Send a cell, and do not wait for it."""
        self.begun = self.client.execute(code, allow_stdin=True)

    def finish(self, *, answer: str | None = None, until: Any = None) -> Shown:
        """What the cell sent by `begin` has shown, when it is over or when `until(shown)` says so."""
        shown, began = Shown(), time.monotonic()
        return self._follow(shown, began, answer, until)

    def _follow(self, shown: Shown, began: float, answer: str | None, until: Any) -> Shown:
        import queue

        while True:
            assert time.monotonic() - began < PATIENCE, f"the cell does not end: {shown}"
            if answer is not None:
                with contextlib.suppress(queue.Empty):
                    asked = self.client.get_stdin_msg(timeout=0.01)
                    shown.stdout += asked["content"]["prompt"]
                    self.client.input(answer)
                    answer = None
                    if until is not None and until(shown):
                        return shown
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != self.begun:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind not in ("status", "execute_input"):
                shown.take(kind, content)
            if until is not None and until(shown):
                return shown
        shown.seconds = time.monotonic() - began
        reply = self.client.get_shell_msg(timeout=PATIENCE)
        while reply["parent_header"].get("msg_id") != self.begun:
            reply = self.client.get_shell_msg(timeout=PATIENCE)
        shown.status = reply["content"]["status"]
        return shown

    def run(self, code: str, *, answer: str | None = None) -> Shown:
        self.begin(code)
        return self.finish(answer=answer)

    def fine(self, code: str) -> Shown:
        shown = self.run(code)
        assert shown.status == "ok", shown.trace or shown.stderr
        return shown

    def value(self, expression: str) -> str:
        """In the notebook's own process."""
        return self.fine(expression).result

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.process.pid)  # type: ignore[union-attr]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()


@dataclass
class Lab:
    """A home and the notebooks in it."""

    home: Home
    folder: Path
    kernels: list[Kernel] = field(default_factory=list)

    def kernel(self, name: str = "notebook", *, load: bool = True, **environment: str) -> Kernel:
        folder = self.folder / f"k{len(self.kernels)}"
        made = Kernel(folder, self.home.environment | environment, name)
        self.kernels.append(made)
        if load:
            made.fine("%load_ext sublet")
        return made

    def leases(self) -> list[Answer]:
        return open_ledger(self.home.settings).leases()

    def all_leases(self) -> list[Answer]:
        return open_ledger(self.home.settings).leases(live_only=False)

    def lease_id(self) -> str:
        (only,) = [a for a in self.leases() if a.lease.state is LeaseState.ACTIVE]
        return only.lease.id

    def revoke(self, *, grace_s: float = 0.0, detail: str = "ada needs it") -> str:
        lease_id = self.lease_id()
        open_ledger(self.home.settings).revoke(
            lease_id, reason=EndReason.REVOKED, detail=detail, grace_us=int(grace_s * 1e6), actor="test"
        )
        return lease_id

    def close(self) -> None:
        for kernel in self.kernels:
            with contextlib.suppress(Exception):
                kernel.close()
        close_home(self.home)


def open_lab(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    devices: str,
    preload: str = "none",
    ledger: str = "",
) -> Lab:
    need_notebooks()
    home = make_home(folder, ledger or f"sqlite:{folder}/home/ledger.db", monkeypatch, devices)
    home.environment["SUBLET_PRELOAD"] = preload
    return Lab(home, folder)


def need_notebooks() -> None:
    try:
        import ipykernel  # noqa: F401
        import nbclient  # noqa: F401
    except ImportError:
        need(False, "ipykernel or nbclient")


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        lab = open_lab(tmp_path_factory.mktemp("lab"), monkeypatch, devices="host:2x4GiB", preload="numpy")
        yield lab
        lab.close()


@pytest.fixture(scope="module")
def kernel(shared_lab: Lab) -> Kernel:
    """One notebook for all tests of a file: none may leave it broken."""
    return shared_lab.kernel()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = open_lab(tmp_path, monkeypatch, devices="host:1x4GiB", preload="numpy")
    yield made
    made.close()
