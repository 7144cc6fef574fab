"""Workers on this host: finding or starting the zygote, and this process's end of a worker.

Rules of this file:
- One call at a time per worker; what the worker prints is shown by whoever waits for the answer.
- An answer that arrived counts, even if the worker died right after it. A worker that died without one is `WorkerLost`.
- Ctrl-C interrupts the call in the worker; a second one ends the worker. Any other exception that a call is left by (a signal
  handler's, a closed standard output's) interrupts it too, and its answer is nobody's: answers are matched with calls.
- Of a sealed call nothing is opened here. A worker of a household is called in no other way, and one that says what cannot be read is
  ended: whatever it does, it can harm its own session only.
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
from sublet.core.errors import BadInput, Misconfigured, SubletError, WorkerLost
from sublet.core.lease import Holder
from sublet.hosting import sealed_channel, worker
from sublet.hosting.channel import (
    SEALED_FIRST,
    Channel,
    ChannelClosed,
    look_briefly,
    pair,
    reachable,
    read_sealed_packet,
    receive_with_fds,
    send_with_fds,
)
from sublet.hosting.detached import last_line, spawn_detached
from sublet.hosting.failing import revived
from sublet.hosting.household import Household, terms_of, zygote_environment
from sublet.hosting.pickling import pack, unpack
from sublet.hosting.processes import ended
from sublet.hosting.screen import SHOWN_MOST_BYTES, PlainScreen, ScreenPipe, SealedScreen, UnreadableFrame
from sublet.hosting.sealed_channel import FROM_WORKER, Assembly, Message, Unreadable
from sublet.hosting.shipping import UNSENDABLE, Parcel, Shipped
from sublet.ports.sealed import PARTS_MOST, read_head
from sublet.ports.worker import Call, Part, Screen, Sink

START_SECONDS = 60.0
END_WAIT_US = 2_000_000
EXPLAIN_AFTER_SECONDS = 1.0
OBEY_MS = 1000
#: Many times what a pipe holds.
_READS_MOST = 64


class NotServed(Misconfigured):
    """No worker could be forked."""

    remedy = "see zygote.log in SUBLET_HOME"


def _files_seen() -> str:
    """Which files this process sees: containers that share a home must not fork their workers from each other's."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""


class LocalWorkers:
    """Implements `ports.worker.Workers`."""

    def __init__(
        self,
        home: Path,
        host: str,
        preload: str,
        *,
        idle_exit: float | None = None,
        household: Household | None = None,
    ) -> None:
        """`household`: the workers are a tenant's, and see and reach nothing of this process's. They are called sealed only."""
        self._home = home
        self._household = household
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
            "" if self._household is None else "household",
            _files_seen(),
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
            return LocalWorker(self._ask, self._host, self._household)
        except NotServed:  # by a zygote that was just leaving, perhaps: the next one will
            return LocalWorker(self._ask, self._host, self._household)

    def warm(self) -> None:
        """Start the zygote if there is none, and wait until it serves. Behind somebody's back: nothing is said."""
        self._connect(explain=False).close()

    def _ask(self, fds: list[int]) -> None:
        with self._connect() as sock:
            try:
                send_with_fds(sock, self._order(), fds)
            except ConnectionError as e:
                raise NotServed("the zygote left") from e

    def _order(self) -> bytes:
        if self._household is None:
            return b"worker"
        hide = [os.path.abspath(path) for path in self._household.hide]
        return json.dumps({"number": self._household.number, "hide": hide}).encode()

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
        if self._household is not None:
            command += ["--household", os.path.realpath(self._home)]
            return spawn_detached(command, zygote_environment(os.environ), self._log)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
        return spawn_detached(command, environment, self._log)


class _Pipe:
    """One of the worker's output streams, and where it goes."""

    def __init__(self, fd: int, name: str, stream: Callable[[], TextIO | None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._name = name
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def relay(self, screen: SealedScreen | None = None) -> bool:
        """Everything that is there now; whether there can be more. One that never stops writing is left for the next time."""
        shown, more = False, False
        stream = self._stream() if screen is None else None
        try:
            for _ in range(_READS_MOST):
                chunk = os.read(self.fd, 65536)
                if not chunk:
                    break
                text = self._decoder.decode(chunk)
                if text and screen is not None:
                    screen.text(self._name, text)
                elif text and stream is not None:
                    stream.write(text)
                    shown = True
            else:
                more = True
        except BlockingIOError:
            more = True
        if shown and stream is not None:
            stream.flush()
        return more


class Nobody:
    """A `Sink` for calls of our own: nothing is said there and nothing asked."""

    interrupted = False

    def text(self, stream: str, text: str) -> None:
        pass

    def show(self, display: bytes) -> None:
        pass

    def ask(self, head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        return False, []


@dataclass(frozen=True, slots=True)
class _Manner:
    """How one call is waited for."""

    screen: Screen | None = None
    answer: Callable[[Any], Any] | None = None
    returns_when_interrupted: bool = False


_PLAINLY = _Manner()


class LocalWorker:
    """Implements `ports.worker.Worker`."""

    here = True
    host_lost = ""

    def __init__(
        self, ask: Callable[[list[int]], None], host: str, household: Household | None = None
    ) -> None:
        control, control_there = pair()
        call, call_there = pair()
        out, out_there = os.pipe2(os.O_CLOEXEC)
        err, err_there = os.pipe2(os.O_CLOEXEC)
        shown, shown_there = os.pipe2(os.O_CLOEXEC)
        page_fd = os.memfd_create("sublet-tenure", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(page_fd, inside.PAGE_BYTES)
        # The worker has it too, and could make it shorter: writing to what is not there any more would end this process.
        fcntl.fcntl(page_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
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
        self._out = _Pipe(out, "stdout", lambda: sys.stdout)
        self._err = _Pipe(err, "stderr", lambda: sys.stderr)
        streams = {"stdout": lambda: sys.stdout, "stderr": lambda: sys.stderr}
        self._shown = ScreenPipe(shown, PlainScreen(streams))
        self._shipped = Shipped()
        self._household = household
        self._assembly = Assembly(FROM_WORKER)
        self._launches = 0
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
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
        self._scratch: str = facts.get("scratch", "")
        self._poller = select.poll()
        # In this order: what was printed before an answer is then always seen together with the answer.
        for fd in (call.fileno(), out, err, shown, control.fileno(), self._woken):
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

    @property
    def scratch(self) -> str:
        """The folder of a household's worker, which goes with it; '' for others."""
        return self._scratch

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        if self._household is not None:
            self._begin_sealed(lease_id, epoch, environment)
            return
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

    def _begin_sealed(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        terms = {
            "lease_id": lease_id,
            "epoch": epoch,
            "environment": terms_of(self._scratch, environment, os.environ),
            "folder": self._scratch,
        }
        fine, answer = self.call_sealed(
            "sublet.hosting.sealed_calls:begin", [json.dumps(terms).encode()], Nobody()
        )
        if not fine:
            raise WorkerLost(
                f"the worker could not begin: {bytes(answer[0][:500]).decode(errors='replace')}", begun=False
            )

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
        # A tenant's words are for who called it, and nobody does any more.
        nowhere = SealedScreen(Nobody()) if self._household is not None else None
        for pipe in (self._out, self._err):
            if pipe.fd >= 0:
                with contextlib.suppress(Exception):
                    pipe.relay(nowhere)  # what it said last
                os.close(pipe.fd)
                pipe.fd = -1
        if self._shown.fd >= 0:
            with contextlib.suppress(Exception):
                self._shown.end(nowhere)
            os.close(self._shown.fd)
            self._shown.fd = -1
        if self._woken >= 0:
            fd, self._woken = self._woken, -1
            os.close(fd)
        if self._ending and self._supervisor_fd >= 0:
            fd, self._supervisor_fd = self._supervisor_fd, -1
            os.close(fd)

    # the caller's side

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        fine, value = self._trip(function, (tuple(args), dict(kwargs)), several=False)
        if not fine:
            raise revived(value)
        return value

    def call_many(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[tuple[bool, Any]]:
        fine, value = self._trip(function, [(tuple(a), dict(k)) for a, k in calls], several=True)
        if not fine:
            raise revived(value)
        return [(well, result if well else revived(result)) for well, result in value]

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
            raise revived(value)
        return value

    def call_sealed(self, target: str, parts: Sequence[Part], sink: Sink) -> tuple[bool, list[memoryview]]:
        self._check_may_call()
        if len(parts) >= PARTS_MOST:
            raise BadInput(
                f"{len(parts)} parts are more than the {PARTS_MOST - 1} a call may have",
                remedy="send fewer, larger ones",
            )
        screen = SealedScreen(sink)
        with self._lock:
            try:
                self._caller = threading.get_ident()
                if self._ending or self._channel.fileno() < 0:
                    raise WorkerLost(f"the worker had ended: {self._ending}", begun=False)
                self._serial += 1
                self._was_woken()  # for a call that is over
                if sink.interrupted:  # none of it may run, and a signal could come too late for that
                    inside.write_interrupted(self._page, self._serial)
                self._shown.most_bytes = screen.most_bytes
                return self._sealed_trip(target, parts, screen, sink)
            finally:
                self._caller = 0
                self._shown.most_bytes = SHOWN_MOST_BYTES
                if self._over:
                    self._let_go()

    def _sealed_trip(
        self, target: str, parts: Sequence[Part], screen: SealedScreen, sink: Sink
    ) -> tuple[bool, list[memoryview]]:
        begun = False
        try:
            self._send_sealed(sealed_channel.CALL, 0, [target.encode(), *parts], screen)
            begun = True
            look_briefly(self._poller)
            return self._await_sealed(screen, sink)
        except ChannelClosed:
            raise self._lost(begun=begun, screen=screen) from None
        except (Unreadable, UnreadableFrame) as e:
            # One that does not speak our language is not one of us any more.
            self._order({"end": f"it sent what cannot be read: {e}"})
            raise self._lost(screen=screen) from e

    def _send_sealed(self, kind: int, number: int, parts: Sequence[Part], screen: SealedScreen) -> None:
        """What the worker prints meanwhile is taken: one that waits for its output to be read does not read either."""
        waiting: select.poll | None = None
        for packet in sealed_channel.packets(kind, self._serial, number, parts):
            while True:
                try:
                    self._channel.send_packet(packet, int(socket.MSG_DONTWAIT))
                    break
                except BlockingIOError:
                    pass
                if waiting is None:
                    waiting = select.poll()
                    waiting.register(self._channel.fileno(), select.POLLOUT)
                    waiting.register(self._control.fileno(), select.POLLIN)
                    for pipe in (self._out, self._err, self._shown):
                        waiting.register(pipe.fd, select.POLLIN)
                fds = {fd for fd, _ in waiting.poll()}
                for fd in self._relay(fds, screen):
                    waiting.unregister(fd)
                    self._poller.unregister(fd)
                if self._control.fileno() in fds:  # nothing was asked of the supervisor: it ended
                    raise ChannelClosed

    def _relay(self, fds: set[int], screen: SealedScreen) -> list[int]:
        """What was printed and shown; the pipes nothing will come from any more."""
        over = [pipe.fd for pipe in (self._out, self._err) if pipe.fd in fds and not pipe.relay(screen)]
        if self._shown.fd in fds and not self._shown.relay(screen):
            over.append(self._shown.fd)
        return over

    def _await_sealed(self, screen: SealedScreen, sink: Sink) -> tuple[bool, list[memoryview]]:
        interrupted = obeyed = False
        done: Message | None = None
        while True:
            try:
                while done is None:
                    fds = {fd for fd, _ in self._poller.poll()}
                    for fd in self._relay(fds, screen):
                        self._poller.unregister(fd)
                    if self._woken in fds and self._was_woken() and not (interrupted and not obeyed):
                        interrupted, obeyed = True, False
                        self._order_interrupt()
                    if self._channel.fileno() in fds:
                        whole = self._receive_sealed()
                        if whole is not None and whole.kind == sealed_channel.ASKED:
                            self._answer_sealed(whole, screen, sink)
                        elif whole is not None:
                            done = whole
                    elif self._control.fileno() in fds:
                        obeyed = self._obeyed(0)
                        if not obeyed:
                            raise ChannelClosed
                self._shown.drain(screen)
                if interrupted and not obeyed:
                    self._obeyed(OBEY_MS)
                self._launches += done.number
                return done.kind == sealed_channel.DONE, done.parts
            except KeyboardInterrupt:
                if done is not None:
                    continue  # too late for it, and the answer counts
                if interrupted:
                    self._order({"end": "interrupted twice"})
                    raise
                interrupted = True
                self._order_interrupt()
            except (ChannelClosed, Unreadable, UnreadableFrame):
                raise
            except BaseException:
                if done is None:
                    self._order_interrupt()
                if done is None or (interrupted and not obeyed):
                    self._obeyed(OBEY_MS)
                raise

    def _receive_sealed(self) -> Message | None:
        """A message of this call, when it is whole. What belongs to a call that was left is nobody's."""
        if self._household is None:
            kind, serial, parts = self._channel.receive()
            if kind < SEALED_FIRST:
                return None
            packet = parts[0]
        else:
            found = read_sealed_packet(self._channel.receive_packet())
            if found is None:
                raise Unreadable("a packet that is not sealed")
            kind, serial, packet = found
        whole = self._assembly.take(kind, serial, packet)
        return whole if whole is not None and whole.serial == self._serial else None

    def _answer_sealed(self, asked: Message, screen: SealedScreen, sink: Sink) -> None:
        """What the call asks in its middle."""
        self._shown.drain(screen)  # it was shown before it asked
        kind: int = sealed_channel.UNANSWERED
        told: Sequence[Part] = ()
        try:
            if not asked.parts:
                raise Unreadable("a question without a head")
            try:
                head = read_head(asked.parts[0])
            except BadInput as e:
                raise Unreadable(e.message) from e
            fine, told = sink.ask(head, asked.parts[1:])
            if fine:
                kind = sealed_channel.ANSWERED
        finally:  # it waits for nothing else
            self._send_sealed(kind, asked.number, told, screen)

    @property
    def launches(self) -> int:
        """How many kernels its sealed calls said they launched."""
        return self._launches

    def interrupt(self) -> None:
        if self._caller and self._woken >= 0:
            with contextlib.suppress(OSError, ValueError):
                os.eventfd_write(self._woken, 1)

    def _order_interrupt(self) -> None:
        inside.write_interrupted(self._page, self._serial)
        self._order({"interrupt": True, "answer": True})

    def _was_woken(self) -> bool:
        try:
            return os.eventfd_read(self._woken) > 0
        except (BlockingIOError, OSError):
            return False

    def _check_may_call(self) -> None:
        if self._pid != os.getpid():
            raise WorkerLost("this worker belongs to the parent process")
        if self._caller == threading.get_ident():
            raise BadInput(
                "the worker is in the middle of a call, and what answers its question cannot call it",
                remedy="answer first, and call when the call is over",
            )

    def _trip(
        self, function: Callable[..., Any], values: Any, *, several: bool, manner: _Manner = _PLAINLY
    ) -> tuple[bool, Any]:
        self._check_may_call()
        if self._household is not None:
            raise BadInput(
                "a worker of a household is called sealed only: what it answers is opened by its tenant",
                remedy="use Lease.run_sealed",
            )
        with self._lock:
            try:
                self._caller = threading.get_ident()
                if self._ending or self._channel.fileno() < 0:
                    raise WorkerLost(f"the worker had ended: {self._ending}", begun=False)
                self._serial += 1
                self._was_woken()  # for a call that is over
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
                if self._woken in fds and self._was_woken():
                    raise KeyboardInterrupt
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
                self._order_interrupt()
            except BaseException:
                if not arrived:
                    self._order_interrupt()
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

    def _lost(self, *, begun: bool = True, screen: Screen | SealedScreen | None = None) -> WorkerLost:
        if self._supervisor_fd >= 0 and not ended(self._supervisor_fd, END_WAIT_US):
            self._order({"end": "it closed its end, and did not end"})
            ended(self._supervisor_fd, END_WAIT_US)
        for pipe in (self._out, self._err):
            with contextlib.suppress(Exception):
                pipe.relay(screen if isinstance(screen, SealedScreen) else None)
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
