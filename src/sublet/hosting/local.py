"""Workers on this host: finding or starting the zygote, and this process's end of a worker.

Rules of this file:
- One call at a time per worker; what the worker prints is shown by whoever waits for the answer.
- An answer that arrived counts, even if the worker died right after it. A worker that died without one is `WorkerLost`.
- Ctrl-C interrupts the call in the worker; a second one ends the worker. Any other exception that a call is left by (a signal
  handler's, a closed standard output's) interrupts it too, and its answer is nobody's: answers are matched with calls.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import select
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sublet import inside
from sublet.core.errors import BadInput, CallFailed, Misconfigured, SubletError, WorkerLost
from sublet.core.lease import Holder
from sublet.hosting import worker
from sublet.hosting.channel import (
    Channel,
    ChannelClosed,
    look_briefly,
    pair,
    reachable,
    receive_with_fds,
    send_with_fds,
)
from sublet.hosting.detached import last_line, spawn_detached
from sublet.hosting.pickling import pack, unpack, unpack_whole
from sublet.hosting.processes import ended
from sublet.hosting.screen import PlainScreen, ScreenPipe
from sublet.hosting.shipping import UNSENDABLE, Parcel, Shipped
from sublet.ports.worker import Call, Screen

START_SECONDS = 60.0
END_WAIT_US = 2_000_000
EXPLAIN_AFTER_SECONDS = 1.0
OBEY_MS = 1000


class RemoteTraceback(Exception):
    """Shown as the cause of an exception raised in a worker: where in the worker it was."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"in the leased worker:\n{self.text.rstrip()}"


class NotServed(Misconfigured):
    """No worker could be forked."""

    remedy = "see zygote.log in SUBLET_HOME"


class LocalWorkers:
    """Implements `ports.worker.Workers`."""

    def __init__(self, home: Path, host: str, preload: str, *, idle_exit: float | None = None) -> None:
        self._folder = home / "run"
        self._log = home / "zygote.log"
        self._host = host
        self._preload = preload
        self._idle_exit = idle_exit
        self._name = f"zygote-{self._fingerprint()}"

    def _fingerprint(self) -> str:
        """A zygote serves those who would import the same things the same way; after an upgrade there is a new one."""
        facts = [
            sys.executable,
            sys.prefix,
            self._preload,
            str(os.getuid()),
            *(os.environ.get(name, "") for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")),
        ]
        installed = Path(sysconfig.get_path("purelib"))
        package = Path(__file__).parents[1]
        # An installed package changes with the folder it is in; one that somebody works on changes file by file.
        for place in (
            [installed] if package.is_relative_to(installed) else [installed, *package.rglob("*.py")]
        ):
            with contextlib.suppress(OSError):
                facts.append(str(os.stat(place).st_mtime_ns))
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]

    def start(self) -> LocalWorker:
        try:
            return LocalWorker(self._ask, self._host)
        except NotServed:  # by a zygote that was just leaving, perhaps: the next one will
            return LocalWorker(self._ask, self._host)

    def warm(self) -> None:
        """Start the zygote if there is none, and wait until it serves. Behind somebody's back: nothing is said."""
        self._connect(explain=False).close()

    def _ask(self, fds: list[int]) -> None:
        with self._connect() as sock:
            try:
                send_with_fds(sock, b"worker", fds)
            except ConnectionError as e:
                raise NotServed("the zygote left") from e

    def _connect(self, *, explain: bool = True) -> socket.socket:
        began = time.monotonic()
        spawned = 0
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with reachable(self._folder, self._name) as path:
                    sock.connect(path)
                return sock
            except OSError:
                sock.close()
            if spawned and not os.path.exists(f"/proc/{spawned}") and not self._starting():
                raise Misconfigured(
                    f"the zygote, which workers are forked from, could not start: {last_line(self._log)}",
                    remedy=f"see {self._log}",
                )
            if not spawned and not self._starting():
                spawned = self._spawn()
            waited = time.monotonic() - began
            if waited > START_SECONDS:
                raise Misconfigured("the zygote did not become ready", remedy=f"see {self._log}")
            if waited > EXPLAIN_AFTER_SECONDS and explain and sys.stderr is not None:
                explain = False
                if sys.stderr.isatty():
                    print("sublet: warming up workers, once …", file=sys.stderr)
            time.sleep(0.01)

    def _starting(self) -> bool:
        """Somebody's zygote holds the lock and is still importing."""
        try:
            fd = os.open(self._folder / f"{self._name}.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def _spawn(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "sublet.hosting.zygote", "--folder", str(self._folder)]
        command += ["--name", self._name, "--preload", self._preload]
        if self._idle_exit is not None:
            command += ["--idle-exit", str(self._idle_exit)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
        return spawn_detached(command, environment, self._log)


class _Pipe:
    """One of the worker's output streams, and where it goes."""

    def __init__(self, fd: int, stream: Callable[[], TextIO | None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def relay(self) -> bool:
        """Everything that is there now; whether there can be more."""
        shown, more = False, False
        stream = self._stream()
        try:
            while chunk := os.read(self.fd, 65536):
                text = self._decoder.decode(chunk)
                if text and stream is not None:
                    stream.write(text)
                    shown = True
        except BlockingIOError:
            more = True
        if shown and stream is not None:
            stream.flush()
        return more


@dataclass(frozen=True, slots=True)
class _Manner:
    """How one call is waited for."""

    screen: Screen | None = None
    answer: Callable[[Any], Any] | None = None
    returns_when_interrupted: bool = False


_PLAINLY = _Manner()


class LocalWorker:
    """Implements `ports.worker.Worker`."""

    def __init__(self, ask: Callable[[list[int]], None], host: str) -> None:
        control, control_there = pair()
        call, call_there = pair()
        out, out_there = os.pipe2(os.O_CLOEXEC)
        err, err_there = os.pipe2(os.O_CLOEXEC)
        shown, shown_there = os.pipe2(os.O_CLOEXEC)
        page_fd = os.memfd_create("sublet-tenure", os.MFD_CLOEXEC)
        os.ftruncate(page_fd, inside.PAGE_BYTES)
        self._page = mmap.mmap(page_fd, inside.PAGE_BYTES)
        theirs = [control_there.fileno(), call_there.fileno(), out_there, err_there, page_fd, shown_there]
        try:
            ask(theirs)
        except BaseException:
            control.close()
            call.close()
            for fd in (out, err, shown):
                os.close(fd)
            raise
        finally:
            control_there.close()
            call_there.close()
            for fd in (out_there, err_there, page_fd, shown_there):
                os.close(fd)
        self._control = control
        self._channel = Channel(call)
        self._out = _Pipe(out, lambda: sys.stdout)
        self._err = _Pipe(err, lambda: sys.stderr)
        streams = {"stdout": lambda: sys.stdout, "stderr": lambda: sys.stderr}
        self._shown = ScreenPipe(shown, PlainScreen(streams))
        self._shipped = Shipped()
        self._lock = threading.Lock()
        self._over = False  # told to end; nothing is of use any more
        self._serial = 0
        self._caller = 0  # the thread in whose call the worker is
        self._pid = os.getpid()
        self._ending = ""
        self._supervisor_fd = -1
        control.settimeout(START_SECONDS)
        try:
            hello, _ = receive_with_fds(control)
        except TimeoutError:
            hello = b""
        if not hello:
            self._close()
            raise NotServed
        control.settimeout(None)
        facts = json.loads(hello)
        self._holder = Holder(host=host, pid=facts["pid"], started=facts["started"])
        self._supervisor_fd = os.pidfd_open(facts["pid"])
        self.worker_pid: int = facts["worker_pid"]
        self._containment: str = facts["containment"]
        self._poller = select.poll()
        # In this order: what was printed before an answer is then always seen together with the answer.
        for fd in (call.fileno(), out, err, shown, control.fileno()):
            self._poller.register(fd, select.POLLIN)

    @property
    def holder(self) -> Holder:
        return self._holder

    @property
    def containment(self) -> str:
        return self._containment

    @property
    def ending(self) -> str:
        if not self._ending and self._supervisor_fd >= 0 and ended(self._supervisor_fd, 0):
            self._ending = self._why()
        return self._ending

    # the lease's side

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        inside.write_deadline(self._page, stop_us)
        self._order({"deadline_us": kill_us, "answer": confirm})
        if confirm and json.loads(receive_with_fds(self._control)[0] or b"{}").get("obeyed") is not True:
            raise WorkerLost(f"the worker ended before it began: {self._why()}")

    def warn(self) -> None:
        inside.write_warned(self._page)

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        mine = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
        folder = ""
        with contextlib.suppress(OSError):  # it was deleted under this process
            folder = os.getcwd()
        terms = worker.Terms(
            lease_id=lease_id,
            epoch=epoch,
            environment=mine | dict(environment),
            folder=folder,
            path=tuple(sys.path),
            arguments=tuple(sys.argv),
        )
        self.call(worker.move_in, (terms,), {})

    def end(self, why: str) -> None:
        if self._pid != os.getpid():
            return
        self._order({"end": why})
        if self._supervisor_fd >= 0 and ended(self._supervisor_fd, END_WAIT_US):
            self._ending = self._ending or why
        self._close()

    def _order(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # gone: whoever calls next is told
            self._control.send(json.dumps(order).encode(), socket.MSG_NOSIGNAL)

    def _close(self) -> None:
        self._over = True
        if self._lock.acquire(timeout=0.1):
            try:
                self._let_go()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        """Called with the lock held, by whoever has it when all is over."""
        self._channel.close()
        self._control.close()
        for pipe in (self._out, self._err):
            if pipe.fd >= 0:
                with contextlib.suppress(Exception):
                    pipe.relay()  # what it said last
                os.close(pipe.fd)
                pipe.fd = -1
        if self._shown.fd >= 0:
            with contextlib.suppress(Exception):
                self._shown.end(None)
            os.close(self._shown.fd)
            self._shown.fd = -1
        if self._ending and self._supervisor_fd >= 0:
            fd, self._supervisor_fd = self._supervisor_fd, -1
            os.close(fd)

    # the caller's side

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        fine, value = self._trip(function, (tuple(args), dict(kwargs)), several=False)
        if not fine:
            raise _revived(value)
        return value

    def call_many(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[tuple[bool, Any]]:
        fine, value = self._trip(function, [(tuple(a), dict(k)) for a, k in calls], several=True)
        if not fine:
            raise _revived(value)
        return [(well, result if well else _revived(result)) for well, result in value]

    def call_shown(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        screen: Screen,
        answer: Callable[[Any], Any],
    ) -> Any:
        manner = _Manner(screen, answer, returns_when_interrupted=True)
        fine, value = self._trip(function, (tuple(args), {}), several=False, manner=manner)
        if not fine:
            raise _revived(value)
        return value

    def _trip(
        self, function: Callable[..., Any], values: Any, *, several: bool, manner: _Manner = _PLAINLY
    ) -> tuple[bool, Any]:
        if self._pid != os.getpid():
            raise WorkerLost("this worker belongs to the parent process")
        if self._caller == threading.get_ident():
            raise BadInput(
                "the worker is in the middle of a call, and what answers its question cannot call it",
                remedy="answer first, and call when the call is over",
            )
        with self._lock:
            try:
                self._caller = threading.get_ident()
                if self._ending or self._channel.fileno() < 0:
                    raise WorkerLost(f"the worker had ended: {self._ending}", begun=False)
                self._serial += 1
                parcel = self._send(function, values, several)
                look_briefly(self._poller)
                kind, value = self._await(parcel, manner)
                return kind == worker.RESULT, value
            finally:
                self._caller = 0
                if self._over:
                    self._let_go()

    def _send(self, function: Callable[..., Any], values: Any, several: bool) -> Parcel:
        try:
            parcel = self._shipped.parcel(function, values, several)
            self._channel.send(worker.CALL, parcel.packed, self._serial)
            parcel.packed = []
            return parcel
        except ChannelClosed:
            raise self._lost(begun=False) from None
        except SubletError:
            raise
        except UNSENDABLE as e:
            raise BadInput(
                f"this cannot be sent to the worker: {e}",
                remedy="make it inside the function, or pass what it is made from",
            ) from e

    def _await(self, parcel: Parcel, manner: _Manner) -> tuple[int, Any]:
        interrupted = arrived = obeyed = False
        while True:
            try:
                fds = {fd for fd, _ in self._poller.poll()}
                for pipe in (self._out, self._err):
                    if pipe.fd in fds and not pipe.relay():
                        self._poller.unregister(pipe.fd)
                if self._shown.fd in fds and not self._shown.relay(manner.screen):
                    self._poller.unregister(self._shown.fd)
                if self._channel.fileno() in fds:
                    arrived = True
                    kind, serial, parts = self._channel.receive()
                    arrived = serial == self._serial and kind != worker.ASKED
                    if kind == worker.ASKED:
                        self._answer(parts, serial, manner)
                    elif arrived:
                        self._show_rest(manner)
                        if kind != worker.NOT_BEGUN:
                            self._shipped.took(parcel)
                        if interrupted and not obeyed:
                            self._obeyed(OBEY_MS)
                        if not interrupted or manner.returns_when_interrupted:
                            return kind, unpack(parts)
                        raise KeyboardInterrupt
                    del parts
                elif self._control.fileno() in fds:
                    obeyed = self._obeyed(0)
                    if not obeyed:
                        raise self._lost(screen=manner.screen)
            except ChannelClosed:
                raise self._lost(screen=manner.screen) from None
            except WorkerLost:
                raise
            except KeyboardInterrupt:
                if arrived:
                    raise
                if interrupted:
                    self._order({"end": "interrupted twice"})
                    raise
                interrupted = True
                self._order({"interrupt": True, "answer": True})
            except BaseException:
                if not arrived:
                    self._order({"interrupt": True, "answer": True})
                    self._obeyed(OBEY_MS)
                raise

    def _show_rest(self, manner: _Manner) -> None:
        """Of a call whose answer is here. An interrupt is too late for it, and the answer counts."""
        while True:
            try:
                self._shown.drain(manner.screen)
                return
            except KeyboardInterrupt:
                if not manner.returns_when_interrupted:
                    raise

    def _answer(self, parts: list[memoryview], serial: int, manner: _Manner) -> None:
        """What the call asks in its middle. One that nobody waits for any more is told nothing."""
        number, question = unpack(parts)
        told = pack((number, False, None))
        try:
            if serial == self._serial and manner.answer is not None:
                told = pack((number, True, manner.answer(question)))
        finally:  # it waits for nothing else
            self._channel.send(worker.ANSWERED, told, serial)

    def _obeyed(self, wait_ms: int) -> bool:
        """The supervisor has sent the interrupt, so that it cannot hit a later call. False: it said something else, or nothing."""
        with contextlib.suppress(OSError, ValueError):
            poller = select.poll()
            poller.register(self._control.fileno(), select.POLLIN)
            if poller.poll(wait_ms) and b'"obeyed"' in self._control.recv(4096, socket.MSG_PEEK):
                self._control.recv(4096)
                return True
        return False

    def _lost(self, *, begun: bool = True, screen: Screen | None = None) -> WorkerLost:
        if self._supervisor_fd >= 0:
            ended(self._supervisor_fd, END_WAIT_US)
        for pipe in (self._out, self._err):
            with contextlib.suppress(Exception):
                pipe.relay()
        with contextlib.suppress(Exception):
            self._shown.end(screen)
        self._ending = self._ending or self._why()
        return WorkerLost(f"the worker ended: {self._ending}", begun=begun)

    def _why(self) -> str:
        """What the supervisor said last, in words."""
        last: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            while True:
                message = self._control.recv(4096, socket.MSG_DONTWAIT)
                if not message:
                    break
                last = json.loads(message)
        if last.get("ended"):
            return str(last["ended"])
        status = last.get("status")
        if status is None:
            return "its supervisor was killed"
        if status > 128:
            return f"it was killed by signal {status - 128}"
        if status < 0:
            return f"it was killed by signal {-status}"
        return f"it exited with code {status}"


def _revived(failure: worker.Failure) -> BaseException:
    if failure.pickled:
        with contextlib.suppress(Exception):
            error = unpack_whole(failure.pickled)
            if isinstance(error, BaseException):
                error.__cause__ = RemoteTraceback(failure.trace)
                return error
    lost = CallFailed(f"{failure.kind}: {failure.text}")
    lost.__cause__ = RemoteTraceback(failure.trace)
    return lost
