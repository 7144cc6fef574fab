"""Inside a leased kernel: the class that kernel.json makes `ipykernel` use for its kernel.

Rules of this file:
- It is an ordinary IPython kernel, except that a cell waits for its GPU before it runs, and that notices
  appear where the user looks: under the running cell, or the last one.
- A cell that gets no GPU does not run: its error says why, and what to do.
- Code a front end runs on its own (silent), and `%gpu` by itself, take no GPU.
- Started without a kernel provisioner, it is a plain kernel in which `%%gpu` works, and it says so.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from ipykernel import compiler, debugger
from ipykernel.ipkernel import IPythonKernel

from sublet.core.billing.meter import billed_until
from sublet.core.cells.costs import price_micro
from sublet.core.errors import GpuSessionEnded, LeaseLost, Refused, SubletError, error_tree
from sublet.core.scheduling.admission import Wait
from sublet.core.values import format_duration, format_size, parse_price
from sublet.devices.opening import Opening
from sublet.leases import current
from sublet.machine import lease_environment
from sublet.notebook import magics, screen
from sublet.notebook.kernel import messages
from sublet.notebook.kernel.messages import LINK_VARIABLE, MESSAGE_BYTES, WORDS_VARIABLE
from sublet.notebook.options import parse_line
from sublet.notebook.screen import Frontend, WaitDisplay, brief
from sublet.settings import variable
from sublet.wiring import open_ledger

#: How long before the end the last message is shown: it must reach the screen.
LAST_WORDS_US = 300_000

UNLEASED = (
    "This kernel was started without a Jupyter kernel provisioner, so it holds no GPU and cannot "
    "lease one as a whole. "
    "Put %%gpu above the cells that need one."
)


AS_A_WHOLE = (
    "This kernel is leased as a whole: its GPU goes back when the kernel is restarted or shut down, "
    "and nothing is kept with --keep. "
    "'sublet ps --all' lists its leases."
)
_UNREADABLE = (
    "the lease cannot be used: its Jupyter server is gone, or the files it was handed over in cannot be read"
)


class KernelLink:
    """The kernel's end of the socket to `kernel.lease.KernelLease`."""

    def __init__(self, sock: socket.socket, say: Any) -> None:
        self._socket = sock
        self._say = say
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._working: set[int] = set()  # threads with a cell
        self._changing = threading.Lock()
        self._closed = False
        self._number = 0
        self._notice: dict[str, Any] | None = None
        self.process_lease: lease_environment.ProcessLease | None = None
        self.tier = ""
        threading.Thread(target=self._listen, name="sublet-kernel-listens", daemon=True).start()

    # what a cell asks

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks the kernel busy. Threads are recorded, not counted, so an ill-timed interrupt cannot leave it
        busy for ever."""
        try:
            self._change(self._working.add)
            yield
        finally:
            self._change(self._working.discard)

    def _change(self, how: Callable[[int], None]) -> None:
        with self._changing:
            before = bool(self._working)
            how(threading.get_ident())
            if bool(self._working) != before:
                self._send(busy=not before)

    def need(self, waiting: WaitDisplay) -> SubletError | None:
        """Waits for a lease; returns the error to raise instead of running the cell, or None."""
        with self._asking:
            if self.process_lease is not None:
                return None if self.process_lease.seconds_left > 0 else GpuSessionEnded(self._over())
            if self._closed:
                return LeaseLost(_UNREADABLE)
            self._number += 1
            self._send(want=self._number)
            try:
                return self._await(self._number, waiting)
            except KeyboardInterrupt:
                self._send(leave=self._number)
                return Refused(
                    "interrupted while it waited for a GPU; the cell was not run", remedy="run the cell again"
                )
            finally:
                waiting.over()

    def _await(self, number: int, waiting: WaitDisplay) -> SubletError | None:
        while True:
            said = self._answers.get()
            if said.get("waiting") == number:
                waiting(Wait(position=said["position"], eta_us=said["eta_us"], reason=said["reason"]))
            elif said.get("refused") == number:
                return _error(said)
            elif "granted" in said or "closed" in said:
                return None if self.process_lease is not None else LeaseLost(_UNREADABLE)

    def _over(self) -> str:
        reason = self._notice["notice"] if self._notice is not None else "it was not renewed in time"
        return f"GPU session ended ({reason})."

    # what the server says

    def _listen(self) -> None:
        while True:
            try:
                message = self._socket.recv(MESSAGE_BYTES)
            except OSError:
                message = b""
            if not message:
                self._closed = True
                self._answers.put({"closed": True})
                return  # the supervisor ends us
            said = json.loads(message)
            if "notice" in said:
                self._warned(said)
            else:
                if "granted" in said:
                    self._take_lease(said)
                self._answers.put(said)

    def _take_lease(self, said: dict[str, Any]) -> None:
        os.environ.update(said["environment"])
        self.process_lease = lease_environment.of_run()
        self.tier = said["tier"]
        if self.process_lease is not None:
            lease_environment.set_process_lease(self.process_lease)
            current.set_openings([Opening(**opening) for opening in said["openings"]])

    def _warned(self, said: dict[str, Any]) -> None:
        self._notice = said
        seconds = max(0.0, (said["deadline_us"] - _now_us()) / 1e6)
        ahead = seconds - LAST_WORDS_US / 1e6
        if ahead > 0:
            self._say(messages.ending(said["notice"], seconds, final=said["final"]))
        last = threading.Timer(max(0.0, ahead), self._last_words, (said,))
        last.daemon = True
        last.start()

    def _last_words(self, said: dict[str, Any]) -> None:
        """Shows the last message, unless the notice was withdrawn or replaced."""
        if (
            self._notice is said
            and self.process_lease
            and self.process_lease.seconds_left <= 2 * LAST_WORDS_US / 1e6
        ):
            self._say(messages.ended(said["notice"]))

    def _send(self, **said: Any) -> None:
        with suppress(OSError):
            self._socket.send(json.dumps(said).encode(), socket.MSG_NOSIGNAL)


class LeasedKernelMagics(magics.GpuMagics):
    """`%gpu` and `%%gpu` where the whole kernel is leased: cells run unchanged."""

    def _line(self, line: str) -> Any:
        verb, _ = parse_line(line)
        if verb == "status":
            self._say(self.shell.kernel.describe())
        elif verb == "cost":
            self._say(self._cost())
        elif verb in ("help", "quota"):
            return super()._line(line)
        else:
            self._say(AS_A_WHOLE)
        return None

    def _say(self, text: str) -> None:
        self.front.publish(screen.line(text).data)

    def _cost(self) -> str:
        process_lease = self.shell.kernel.link.process_lease
        if process_lease is None:
            return "Nothing was leased yet."
        found = open_ledger(self.bench.settings).look(process_lease.id)
        row, price = found.lease, self.bench.settings["price"]
        gpu_us = (billed_until(row, found.at) - row.granted_at) * len(row.slices)
        text = f"{gpu_us / 1e6:.3f} GPU-s so far"
        if price:
            text += f", price {price_micro(gpu_us, parse_price(price)) / 1e6:.6f}"
        return (
            f"{text} (lease {row.id}). A leased kernel is billed from its first cell to its end, idle or not."
        )


class LeasedIPythonKernel(IPythonKernel):
    shell: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._stderr = sys.stderr
        number = os.environ.pop(LINK_VARIABLE, "")
        self._words = os.environ.pop(WORDS_VARIABLE, "")
        self._refusal: ContextVar[BaseException | None] = ContextVar("refusal", default=None)
        self.link: KernelLink | None = None
        if number:
            os.set_inheritable(int(number), False)  # processes a cell starts must not use our socket
            self.link = KernelLink(socket.socket(fileno=int(number)), self._say)
            self.gpu_magics = LeasedKernelMagics
            _name_files_after(os.path.basename(os.path.dirname(variable("NOTICE_FILE"))))
            self.shell.input_transformers_cleanup.extend([self._refuse, _as_it_is])
        elif not variable("DISABLE"):
            self._words = UNLEASED

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: Any = None,
        allow_stdin: bool = False,
        *,
        cell_meta: Any = None,
        cell_id: Any = None,
    ) -> Any:
        async def run() -> Any:
            return await super(LeasedIPythonKernel, self).do_execute(  # type: ignore[no-untyped-call]
                code,
                silent,
                store_history,
                user_expressions,
                allow_stdin,
                cell_meta=cell_meta,
                cell_id=cell_id,
            )

        if self._words and not silent:
            words, self._words = self._words, ""
            self._say(words)
        if self.link is None:
            return await run()
        with self.link.working():
            if not silent and _needs_gpu(code):
                error = self.link.need(WaitDisplay(Frontend(self.shell)))
                if error is not None:
                    self._refusal.set(brief(error))
            try:
                return await run()
            finally:
                self._refusal.set(None)

    def _refuse(self, lines: list[str]) -> list[str]:
        """An input transformer: what it raises is shown as the cell's error, and the cell does not run."""
        refusal = self._refusal.get()
        if refusal is not None:
            raise refusal
        return lines

    def _say(self, text: str) -> None:
        """Writes under the running cell or the last one, to the kernel's own stream, which a cell cannot
        replace."""
        self._stderr.write(f"{text}\n")
        self._stderr.flush()

    def describe(self) -> str:
        assert self.link is not None
        process_lease = self.link.process_lease
        if process_lease is None:
            return "This kernel is leased as a whole: it takes its GPU when the first cell is run."
        lease = current.lease()
        left = format_duration(int(lease.seconds_left * 1e6))
        what = (
            f"{format_size(lease.vram_bytes)} on {', '.join(lease.devices)} (lease {lease.id}, "
            f"{self.link.tier})"
        )
        when = f"It ends in {left}" if lease.warned else f"Without a running cell it ends in {left}"
        return f"This kernel is leased as a whole: {what}. {when}, and the kernel with it."


def _as_it_is(lines: list[str]) -> list[str]:
    """Runs a %%gpu cell as a plain cell, with `await`, its own lines in tracebacks and its own result."""
    return [f"#{lines[0]}", *lines[1:]] if lines and lines[0].startswith("%%gpu") else lines


def _name_files_after(kernel: str) -> None:
    """`ipykernel` names the folder of its cells' files after its pid, which is 2 in every PID namespace:
    users would share one."""
    folder = os.path.join(tempfile.gettempdir(), f"ipykernel_{kernel}")
    modules: tuple[Any, ...] = (compiler, debugger)
    for module in modules:
        module.get_tmp_directory = lambda: folder


def _needs_gpu(code: str) -> bool:
    text = code.strip()
    alone = text.startswith(("%gpu", "%load_ext", "%reload_ext")) and "\n" not in text
    return bool(text) and not alone


def _error(said: dict[str, Any]) -> SubletError:
    kind = next((cls for cls in error_tree() if cls.code == said["code"]), SubletError)
    try:
        return kind(said["message"], remedy=said["remedy"])
    except TypeError:
        return SubletError(said["message"], remedy=said["remedy"])


def _now_us() -> int:
    return time.monotonic_ns() // 1000
