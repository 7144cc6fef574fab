"""A worker on this host, as the process that asked for it sees it.

Rules of this file:
- What the worker prints is shown by whoever waits for the answer.
- An answer that arrived counts, even if the worker died right after it. A worker that died without one is
  `WorkerLost`.
- Ctrl-C interrupts the call in the worker; a second one ends the worker. Any other exception that leaves a
  call (a signal handler's, a closed standard output's) interrupts it too. Its answer is dropped: answers are
  matched with calls.
- Nothing of a sealed call is unpickled here. A sandboxed worker is called in no other way, and one that sends
  what cannot be read is ended: whatever it does, it can harm its own session only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sublet.core.errors import BadInput, Misconfigured, NotIsolated, SubletError, WorkerLost
from sublet.core.leasing.lease import Holder
from sublet.core.studio.frames import PARTS_MOST, packed_head, read_head
from sublet.machine import lease_environment
from sublet.machine.spill import SpillRoom
from sublet.ports.worker import CallSink, Part, Screen
from sublet.processes.channel import sealed_channel
from sublet.processes.channel.channel import (
    SEALED_FIRST,
    Channel,
    ChannelClosed,
    look_briefly,
    pair,
    read_sealed_packet,
)
from sublet.processes.channel.pickling import pack, unpack
from sublet.processes.channel.sealed_caller import SilentSink, plain_screen
from sublet.processes.channel.sealed_channel import FROM_WORKER, Assembly, SealedMessage, UnreadableMessage
from sublet.processes.sandbox.tenant_sandbox import TenantSandbox, terms_of
from sublet.processes.supervisor.link import SupervisorLink
from sublet.processes.worker import worker
from sublet.processes.worker.main_module import Parcel
from sublet.processes.worker.packed_calls import PackedCalls
from sublet.processes.worker.screen import (
    SHOWN_MOST_BYTES,
    OutputPipe,
    ScreenPipe,
    SealedScreen,
    UnreadableFrame,
)

END_WAIT_US = 2_000_000
OBEY_MS = 1000


class NotServed(Misconfigured):
    """No worker could be forked."""

    remedy = "see zygote.log in SUBLET_HOME"


@dataclass(frozen=True, slots=True)
class _Manner:
    """What one call's output goes to, and who answers what it asks."""

    screen: Screen | None = None
    answer: Callable[[Any], Any] | None = None

    @property
    def returns_when_interrupted(self) -> bool:
        return self.screen is not None


class LocalWorker(PackedCalls):
    """Implements `ports.worker.Worker`."""

    here = True
    host_lost = ""

    def __init__(
        self,
        ask: Callable[[list[int]], None],
        host: str,
        sandbox: TenantSandbox | None = None,
        room: SpillRoom | None = None,
    ) -> None:
        """`room`: where large sealed messages of the worker wait; without one they wait in memory."""
        control, control_there = pair()
        call, call_there = pair()
        out, out_there = os.pipe2(os.O_CLOEXEC)
        err, err_there = os.pipe2(os.O_CLOEXEC)
        shown, shown_there = os.pipe2(os.O_CLOEXEC)
        page_fd = os.memfd_create("sublet-tenure", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(page_fd, lease_environment.PAGE_BYTES)
        # The worker has this page too and could shrink it, and writing to a missing page would end this
        # process.
        fcntl.fcntl(page_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._page = mmap.mmap(page_fd, lease_environment.PAGE_BYTES)
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
        super().__init__()
        self._supervisor = SupervisorLink(control)
        self._channel = Channel(call)
        self._out = OutputPipe(out, "stdout", lambda: sys.stdout)
        self._err = OutputPipe(err, "stderr", lambda: sys.stderr)
        self._shown = ScreenPipe(shown, plain_screen())
        self._sandbox = sandbox
        self._assembly = Assembly(FROM_WORKER, room=room)
        self._launches = 0
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._over = False  # told to end; nothing is of use any more
        self._serial = 0
        self._ending = ""
        try:
            facts = self._supervisor.greet(host)
        except NotIsolated:
            self._close()
            raise
        if not facts:
            self._close()
            raise NotServed
        self.worker_pid: int = facts["worker_pid"]
        self._scratch: str = facts.get("scratch", "")
        self._poller = select.poll()
        # The order matters: output printed before an answer is then always seen together with the answer.
        for fd in (call.fileno(), out, err, shown, control.fileno(), self._woken):
            self._poller.register(fd, select.POLLIN)

    @property
    def holder(self) -> Holder:
        return self._supervisor.holder

    @property
    def containment(self) -> str:
        return self._supervisor.containment

    @property
    def ending(self) -> str:
        if not self._ending and self._supervisor.ended():
            self._ending = self._supervisor.why_ended()
        return self._ending

    # the lease's side

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        lease_environment.write_deadline(self._page, stop_us)
        self._supervisor.order({"deadline_us": kill_us, "answer": confirm})
        if confirm and self._supervisor.answer().get("obeyed") is not True:
            raise WorkerLost(f"the worker ended before it began: {self._supervisor.why_ended()}")

    def warn(self) -> None:
        lease_environment.write_warned(self._page)

    @property
    def scratch(self) -> str:
        """The folder of a sandboxed worker, which goes with it; '' for others."""
        return self._scratch

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        if self._sandbox is not None:
            self._begin_sealed(lease_id, epoch, environment)
            return
        mine = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
        folder = ""
        with contextlib.suppress(OSError):  # it was deleted under this process
            folder = os.getcwd()
        terms = worker.WorkerTerms(
            lease_id=lease_id,
            epoch=epoch,
            environment=mine | dict(environment),
            folder=folder,
            path=tuple(sys.path),
            arguments=tuple(sys.argv),
        )
        self.call(worker.set_up_worker, (terms,), {})

    def _begin_sealed(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        terms = {
            "lease_id": lease_id,
            "epoch": epoch,
            "environment": terms_of(self._scratch, environment, os.environ),
            "folder": self._scratch,
        }
        fine, answer = self.call_sealed(
            "sublet.processes.worker.sealed_calls:begin", [json.dumps(terms).encode()], SilentSink()
        )
        if not fine:
            raise WorkerLost(
                f"the worker could not begin: {bytes(answer[0][:500]).decode(errors='replace')}", begun=False
            )

    def end(self, why: str) -> None:
        if self._owner_pid != os.getpid():
            return
        self._supervisor.order({"end": why})
        if self._supervisor.ended(END_WAIT_US):
            self._ending = self._ending or why
        self._close()

    def _close(self) -> None:
        self._over = True
        if self._lock.acquire(timeout=0.1):
            try:
                self._let_go()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        """Close everything. Called with the lock held, by whoever has it when all is over."""
        self._channel.close()
        self._supervisor.control.close()
        # A tenant's output is for its caller, and nobody calls any more.
        nowhere = SealedScreen(SilentSink()) if self._sandbox is not None else None
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
        if self._ending:
            self._supervisor.forget()

    # the caller's side

    def call_sealed(
        self, target: str, parts: Sequence[Part], sink: CallSink
    ) -> tuple[bool, list[memoryview]]:
        if len(parts) >= PARTS_MOST:
            raise BadInput(
                f"{len(parts)} parts are more than the {PARTS_MOST - 1} a call may have",
                remedy="send fewer, larger ones",
            )
        screen = SealedScreen(sink)
        with self._turn():
            try:
                self._begin_call()
                if sink.interrupted:  # none of it may run, and a signal could come too late for that
                    lease_environment.write_interrupted(self._page, self._serial)
                self._shown.most_bytes = screen.most_bytes
                return self._sealed_trip(target, parts, screen, sink)
            finally:
                self._shown.most_bytes = SHOWN_MOST_BYTES

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with super()._turn():
            try:
                yield
            finally:
                if self._over:
                    self._let_go()

    def _begin_call(self) -> None:
        if self._ending or self._channel.fileno() < 0:
            raise WorkerLost(f"the worker had ended: {self._ending}", begun=False)
        self._serial += 1
        self._was_woken()  # for a call that is over

    def _sealed_trip(
        self, target: str, parts: Sequence[Part], screen: SealedScreen, sink: CallSink
    ) -> tuple[bool, list[memoryview]]:
        begun = False
        try:
            self._send_sealed(sealed_channel.CALL, 0, [target.encode(), *parts], screen)
            begun = True
            look_briefly(self._poller)
            return self._await_sealed(screen, sink)
        except ChannelClosed:
            raise self._lost(begun=begun, screen=screen) from None
        except (UnreadableMessage, UnreadableFrame) as e:
            # A worker that does not speak the protocol is ended.
            self._supervisor.order({"end": f"it sent what cannot be read: {e}"})
            raise self._lost(screen=screen) from e

    def _send_sealed(self, kind: int, number: int, parts: Sequence[Part], screen: SealedScreen) -> None:
        """Send a message, and take what the worker prints meanwhile: a worker that waits for its output to be
        read does not read its calls."""
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
                    waiting.register(self._supervisor.control.fileno(), select.POLLIN)
                    for pipe in (self._out, self._err, self._shown):
                        waiting.register(pipe.fd, select.POLLIN)
                fds = {fd for fd, _ in waiting.poll()}
                for fd in self._relay(fds, screen):
                    waiting.unregister(fd)
                    self._poller.unregister(fd)
                if self._supervisor.control.fileno() in fds:  # nothing was asked of the supervisor: it ended
                    raise ChannelClosed

    def _relay(self, fds: set[int], screen: SealedScreen) -> list[int]:
        """Pass on what was printed and shown; return the pipes that have closed."""
        over = [pipe.fd for pipe in (self._out, self._err) if pipe.fd in fds and not pipe.relay(screen)]
        if self._shown.fd in fds and not self._shown.relay(screen):
            over.append(self._shown.fd)
        return over

    def _await_sealed(self, screen: SealedScreen, sink: CallSink) -> tuple[bool, list[memoryview]]:
        interrupted = obeyed = False
        done: SealedMessage | None = None
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
                    elif self._supervisor.control.fileno() in fds:
                        obeyed = self._supervisor.obeyed(0)
                        if not obeyed:
                            raise ChannelClosed
                self._shown.drain(screen)
                if interrupted and not obeyed:
                    self._supervisor.obeyed(OBEY_MS)
                self._launches += done.number
                if done.dropped is not None:
                    return False, [_as_failure(done.dropped)]
                return done.kind == sealed_channel.DONE, done.parts
            except KeyboardInterrupt:
                if done is not None:
                    continue  # too late for it, and the answer counts
                if interrupted:
                    self._supervisor.order({"end": "interrupted twice"})
                    raise
                interrupted = True
                self._order_interrupt()
            except (ChannelClosed, UnreadableMessage, UnreadableFrame):
                raise
            except BaseException:
                if done is None:
                    self._order_interrupt()
                if done is None or (interrupted and not obeyed):
                    self._supervisor.obeyed(OBEY_MS)
                raise

    def _receive_sealed(self) -> SealedMessage | None:
        """Return a message of this call once it is whole. Messages of a call that was abandoned are
        dropped."""
        if self._sandbox is None:
            kind, serial, parts = self._channel.receive()
            if kind < SEALED_FIRST:
                return None
            packet = parts[0]
        else:
            found = read_sealed_packet(self._channel.receive_packet())
            if found is None:
                raise UnreadableMessage("a packet that is not sealed")
            kind, serial, packet = found
        whole = self._assembly.take(kind, serial, packet)
        return whole if whole is not None and whole.serial == self._serial else None

    def _answer_sealed(self, asked: SealedMessage, screen: SealedScreen, sink: CallSink) -> None:
        """Answer a question that the call asks while it runs."""
        self._shown.drain(screen)  # it was shown before it asked
        kind: int = sealed_channel.UNANSWERED
        told: Sequence[Part] = ()
        try:
            if asked.dropped is not None:
                told = [packed_head(_said_of(asked.dropped))]
                return
            if not asked.parts:
                raise UnreadableMessage("a question without a head")
            try:
                head = read_head(asked.parts[0])
            except BadInput as e:
                raise UnreadableMessage(e.message) from e
            fine, told = sink.ask(head, asked.parts[1:])
            if fine:
                kind = sealed_channel.ANSWERED
        finally:  # it waits for nothing else
            self._send_sealed(kind, asked.number, told, screen)

    @property
    def launches(self) -> int:
        return self._launches

    def interrupt(self) -> None:
        if self._caller and self._woken >= 0:
            with contextlib.suppress(OSError, ValueError):
                os.eventfd_write(self._woken, 1)

    def _order_interrupt(self) -> None:
        lease_environment.write_interrupted(self._page, self._serial)
        self._supervisor.order({"interrupt": True, "answer": True})

    def _was_woken(self) -> bool:
        try:
            return os.eventfd_read(self._woken) > 0
        except (BlockingIOError, OSError):
            return False

    def _trip(
        self,
        function: Callable[..., Any],
        values: Any,
        *,
        several: bool,
        screen: Screen | None = None,
        answer: Callable[[Any], Any] | None = None,
    ) -> tuple[bool, Any, bool]:
        if self._sandbox is not None:
            raise BadInput(
                "a sandboxed worker is called sealed only: its tenant opens what it answers",
                remedy="use Lease.run_sealed",
            )
        with self._turn():
            self._begin_call()
            parcel = self._send(function, values, several)
            look_briefly(self._poller)
            kind, value = self._await(parcel, _Manner(screen, answer))
            return kind == worker.RESULT, value, False

    def _send(self, function: Callable[..., Any], values: Any, several: bool) -> Parcel:
        try:
            with self._sendable():
                parcel = self._shipped.parcel(function, values, several)
                self._channel.send(worker.CALL, parcel.packed, self._serial)
        except ChannelClosed:
            raise self._lost(begun=False) from None
        parcel.packed = []
        return parcel

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
                            self._supervisor.obeyed(OBEY_MS)
                        if not interrupted or manner.returns_when_interrupted:
                            return kind, unpack(parts)
                        raise KeyboardInterrupt
                    del parts
                elif self._supervisor.control.fileno() in fds:
                    obeyed = self._supervisor.obeyed(0)
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
                    self._supervisor.order({"end": "interrupted twice"})
                    raise
                interrupted = True
                self._order_interrupt()
            except BaseException:
                if not arrived:
                    self._order_interrupt()
                    self._supervisor.obeyed(OBEY_MS)
                raise

    def _show_rest(self, manner: _Manner) -> None:
        """Show the rest of the output of a call whose answer is here. An interrupt comes too late for that
        call, so the answer counts."""
        while True:
            try:
                self._shown.drain(manner.screen)
                return
            except KeyboardInterrupt:
                if not manner.returns_when_interrupted:
                    raise

    def _answer(self, parts: list[memoryview], serial: int, manner: _Manner) -> None:
        """Answer a question that the call asks while it runs. A call that was abandoned gets no answer."""
        number, question = unpack(parts)
        told = pack((number, False, None))
        try:
            if serial == self._serial and manner.answer is not None:
                told = pack((number, True, manner.answer(question)))
        finally:  # it waits for nothing else
            self._channel.send(worker.ANSWERED, told, serial)

    def _lost(self, *, begun: bool = True, screen: Screen | SealedScreen | None = None) -> WorkerLost:
        if self._supervisor.watched and not self._supervisor.ended(END_WAIT_US):
            self._supervisor.order({"end": "it closed its end, and did not end"})
            self._supervisor.ended(END_WAIT_US)
        for pipe in (self._out, self._err):
            with contextlib.suppress(Exception):
                pipe.relay(screen if isinstance(screen, SealedScreen) else None)
        with contextlib.suppress(Exception):
            self._shown.end(screen)
        self._ending = self._ending or self._supervisor.why_ended()
        return WorkerLost(f"the worker ended: {self._ending}", begun=begun)


def _as_failure(error: SubletError) -> memoryview:
    """What a sealed call answers that failed, see `sealed_caller.failure_of`."""
    said = {"kind": type(error).__name__, "text": f"{error.message}; {error.remedy}", "trace": ""}
    return memoryview(json.dumps(said).encode())


def _said_of(error: SubletError) -> dict[str, str]:
    return {"code": error.code, "message": error.message, "remedy": error.remedy}
