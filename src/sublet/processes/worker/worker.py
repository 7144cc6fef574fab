"""The leased worker: the process in which user code runs.

Rules of this file:
- It does one thing at a time: take a message, run it, answer. Output goes through pipes as it is written; the
  answer is sent after the output it belongs to.
- SIGTERM ends the code that runs by an exception, so that its `finally` blocks see it; SIGINT is the user's
  own interrupt, and counts only while the user's code runs.
- A child that the user's code forks is not the worker: it answers nothing, and ends where it would have come
  back.
- A sealed call is bytes in and bytes out ("module:function", parts): whoever made it opens nothing that comes
  from here.
- It knows the lease it works under (`sublet.machine.lease_environment`), not the ledger: no address, no
  token, no secret is in here. What it needs from them in the middle of a call, it asks of the calling process
  (`ask_caller`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from sublet.core.studio.frames import packed_head
from sublet.machine import lease_environment
from sublet.ports.worker import Part
from sublet.processes.channel import sealed_channel
from sublet.processes.channel.channel import SEALED_FIRST, Channel, ChannelClosed, look_briefly
from sublet.processes.channel.pickling import Pickled, main_globals, pack, pack_whole, unpack, unpack_whole
from sublet.processes.worker.remote_exception import Failure

#: NOT_BEGUN: the call could not be unpacked here and is to be sent again. ASKED: a question in the middle of
#: a call.
CALL, RESULT, RAISED, NOT_BEGUN, ASKED, ANSWERED = 1, 2, 3, 4, 5, 6
_libc = ctypes.CDLL(None)


class LeaseEnding(BaseException):
    """The lease is over; raised in whatever runs. Not an Exception, so that user code does not swallow it by
    accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTerms:
    """What a worker must know before its first call."""

    lease_id: str
    epoch: int
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    path: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


class SealedFailure(Exception):
    """Raised by a sealed call's function to answer (False, parts) with parts of its own."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__("the sealed call failed")
        self.parts = parts


#: Of a sealed call or an ordinary one.
_Taken = tuple[int, int, list[memoryview]]
_page: mmap.mmap | None = None
_channel: Channel | None = None
_serial = 0
_questions = 0
#: Calls that arrived where an answer was waited for.
_put_back: list[_Taken] = []
_assembly = sealed_channel.Assembly(sealed_channel.TO_WORKER)
#: Whether the call that runs is a sealed one.
_in_sealed = False
#: Functions of ordinary calls and of those sealed as `pickled`, by the caller's numbers.
functions: dict[int, Callable[..., Any]] = {}
#: Where output goes that must stay in one order with displays: see `processes/worker/screen.py`.
screen_fd = -1
#: What SIGINT does while user code runs. Between calls it is ignored, because it was meant for a call that is
#: over.
_on_interrupt: Any = signal.default_int_handler


def set_up_worker(terms: WorkerTerms) -> int:
    """The first call: set up the environment, folder and paths that the caller's code expects."""
    assert _page is not None
    os.environ.clear()
    os.environ.update(terms.environment)
    with contextlib.suppress(OSError):
        os.chdir(terms.folder)
    sys.path[:] = terms.path
    sys.argv[:] = terms.arguments or [""]
    lease_environment.set_process_lease(lease_environment.ProcessLease(terms.lease_id, terms.epoch, _page))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # every fork of the zygote has its state
    threads = terms.environment.get("OMP_NUM_THREADS", "")
    torch = sys.modules.get("torch")
    if torch is not None and threads.isdigit() and int(threads):
        torch.set_num_threads(int(threads))  # it read the zygote's environment, not the caller's
    return os.getpid()


def ask_caller(question: Any) -> Any:
    """Ask the process that made the current call. Raises KeyboardInterrupt when that process no longer waits
    for it."""
    if _in_sealed:
        answered, parts = ask_sealed({"ask": "pickled"}, pack(question))
        if not answered:
            raise KeyboardInterrupt
        return unpack(parts)
    channel, asked = _new_question()
    packed = pack((asked, question))
    with interrupts_held_back():
        channel.send(ASKED, packed, _serial)
        while True:
            kind, _, parts = _next_but_a_call(channel)
            if kind != ANSWERED:
                continue
            number, answered, answer = unpack(parts)
            if number == asked:
                break
    if not answered:
        raise KeyboardInterrupt
    return answer


def ask_sealed(head: Mapping[str, Any], parts: Sequence[Part]) -> tuple[bool, list[memoryview]]:
    """Ask who made the current sealed call, in bytes. (False, ...): it was refused, or nobody answers such a
    question."""
    if not _in_sealed:
        raise RuntimeError("only a sealed call can ask in bytes")
    channel, asked = _new_question()
    question = [packed_head(head), *parts]
    _flush()  # what was printed before it was asked is seen before it is answered
    with interrupts_held_back():
        for packet in sealed_channel.packets(sealed_channel.ASKED, _serial, asked, question):
            channel.send_packet(packet)
        while True:
            kind, number, found = _next_but_a_call(channel)
            if number == asked and kind in (sealed_channel.ANSWERED, sealed_channel.UNANSWERED):
                break
    return kind == sealed_channel.ANSWERED, found


def _new_question() -> tuple[Channel, int]:
    global _questions
    assert _channel is not None
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("only the thread the call runs in can ask the process that made it")
    _questions += 1
    return _channel, _questions


def _next_but_a_call(channel: Channel) -> _Taken:
    """Receive what arrives while an answer is waited for. A call that arrives then means that the current one
    was given up."""
    kind, serial, parts = _take(channel)
    if kind in (CALL, sealed_channel.CALL):
        _put_back.append((kind, serial, parts))
        raise KeyboardInterrupt
    return kind, serial, parts


def _take(channel: Channel) -> _Taken:
    """Receive the next whole message: kind, serial and parts. An answer to a sealed question has its number
    instead of the serial."""
    while True:
        kind, serial, parts = channel.receive()
        if kind < SEALED_FIRST:
            return kind, serial, parts
        whole = _assembly.take(kind, serial, parts[0])
        if whole is not None:
            return whole.kind, serial if whole.kind == sealed_channel.CALL else whole.number, whole.parts


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Hold interrupts back without the thread's signal mask: with several threads the kernel picks another
    one, and the handler still runs in this one."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def serve(call_fd: int, out_fd: int, err_fd: int, page_fd: int, show_fd: int) -> NoReturn:
    global _page, _channel, screen_fd
    for fd, standard in ((out_fd, 1), (err_fd, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    _page = mmap.mmap(page_fd, lease_environment.PAGE_BYTES)
    os.close(page_fd)
    sys.modules["__main__"] = types.ModuleType("__main__")
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.register_at_fork(after_in_child=_in_child)
    gc.unfreeze()
    screen_fd = show_fd
    _channel = Channel(socket.socket(fileno=call_fd))
    code = 0
    try:
        _loop(_channel)
    except ChannelClosed:
        pass
    except LeaseEnding:
        code = 143
    except BaseException:  # what the caller will read in its log when all else is lost
        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        _flush()
    os._exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise LeaseEnding


def _in_child() -> None:
    """Give SIGTERM its default meaning in a forked child, so that `Process.terminate()` ends it."""
    if signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ignore_interrupts() -> None:
    global _on_interrupt
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        _on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN) or signal.default_int_handler


def _loop(channel: Channel) -> None:
    global _serial
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    while True:
        if _put_back:
            kind, serial, parts = _put_back.pop()
        else:
            look_briefly(poller)  # for the next call of a loop
            kind, serial, parts = _take(channel)
        if kind == CALL:
            _serial = serial
            _serve_call(channel, parts)
        elif kind == sealed_channel.CALL:
            _serial = serial
            _serve_sealed(channel, parts)
        del parts  # else: the answer to a question that nobody asks any more


def _serve_call(channel: Channel, parts: list[memoryview]) -> None:
    try:
        answer, packed = _answer(parts)
    except KeyboardInterrupt as e:  # another, while the first was being dealt with
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        answer, packed = RAISED, pack(failure_of(e))
    _flush()
    try:
        channel.send(answer, packed, _serial)
    except (OSError, MemoryError) as e:  # no room for so large a value
        channel.send(RAISED, pack(failure_of(e)), _serial)


def _serve_sealed(channel: Channel, parts: list[memoryview]) -> None:
    global _in_sealed
    launched = lease_environment.launches()
    _in_sealed = True
    try:
        fine, answer = _answer_sealed(parts)
    except KeyboardInterrupt as e:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        fine, answer = False, [told(e)]
    finally:
        _in_sealed = False
    _flush()
    try:
        made = sealed_channel.packets(
            sealed_channel.DONE if fine else sealed_channel.FAILED,
            _serial,
            lease_environment.launches() - launched,
            answer,
        )
        first = next(made)
    except (ValueError, TypeError, BufferError, MemoryError) as e:  # it returned something else than bytes
        made = sealed_channel.packets(sealed_channel.FAILED, _serial, 0, [told(e)])
        first = next(made)
    channel.send_packet(first)
    for packet in made:
        channel.send_packet(packet)


def _is_interrupted() -> bool:
    """Whether the call was interrupted before it was read, when the signal could not reach it."""
    return _page is not None and lease_environment.read_interrupted(_page) == _serial


def _answer(parts: list[memoryview]) -> tuple[int, Pickled]:
    worker = os.getpid()
    failed = NOT_BEGUN
    try:
        came: list[int] = []
        try:
            # An interrupt that comes before the user's code runs is kept for it, because its imports may take
            # a while.
            signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
            try:
                function, values, several = prepare(parts)
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            failed = RAISED
            signal.signal(signal.SIGINT, _on_interrupt)
            if came or _is_interrupted():
                signal.raise_signal(signal.SIGINT)
            result = call_many(function, values) if several else call_once(function, values)
            if os.getpid() == worker:
                return RESULT, pack(result)
        finally:
            ignore_interrupts()
    except LeaseEnding:
        raise
    except BaseException as e:
        ignore_interrupts()  # it may have been one that came just before the line above
        if os.getpid() == worker:
            return failed, pack(failure_of(e))
        _leave(e)
    return _leave(None)


def _answer_sealed(parts: list[memoryview]) -> tuple[bool, Sequence[Part]]:
    """Answer a sealed call like an ordinary one. Its function is found first, with interrupts held back."""
    worker = os.getpid()
    try:
        came: list[int] = []
        try:
            signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
            try:
                function = _found(bytes(parts.pop(0)).decode())
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGINT, _on_interrupt)
            if came or _is_interrupted():
                signal.raise_signal(signal.SIGINT)
            result: Sequence[Part] = function(parts)
            if os.getpid() == worker:
                return True, result
        finally:
            ignore_interrupts()
    except LeaseEnding:
        raise
    except SealedFailure as e:
        ignore_interrupts()
        if os.getpid() == worker:
            return False, e.parts
    except BaseException as e:
        ignore_interrupts()
        if os.getpid() == worker:
            return False, [told(e)]
        _leave(e)
    return _leave(None)


def _found(target: str) -> Callable[[list[memoryview]], Sequence[Part]]:
    module, _, name = target.partition(":")
    found: Callable[[list[memoryview]], Sequence[Part]] = getattr(importlib.import_module(module), name)
    return found


def prepare(parts: list[memoryview]) -> tuple[Callable[..., Any], Any, bool]:
    message = unpack(
        parts
    )  # with its values if they are plain; else they follow, made of what is defined here first
    for name, blob in message[1]:
        space: dict[Any, Any] = functions if isinstance(name, int) else main_globals()
        if blob:
            space[name] = unpack_whole(blob)
        else:
            space.pop(name, None)
    values = message[3] if len(message) == 4 else unpack(parts[1:])
    parts.clear()  # what the arguments lie in is free again when the function lets go of them
    return functions[message[0]], values, message[2]


def call_once(function: Callable[..., Any], values: Any) -> Any:
    args, kwargs = values
    del values
    return function(*args, **kwargs)


def call_many(function: Callable[..., Any], calls: Any) -> list[tuple[bool, Any]]:
    worker = os.getpid()
    results: list[tuple[bool, Any]] = []
    for args, kwargs in calls:
        try:
            results.append((True, function(*args, **kwargs)))
        except Exception as e:
            results.append((False, failure_of(e)))
        if os.getpid() != worker:
            break
    return results


def _leave(error: BaseException | None) -> NoReturn:
    """End a forked child whose code came back, by a return or by an exception."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    _flush()
    os._exit(code & 0xFF)


def failure_of(error: BaseException, *, begun: bool = True) -> Failure:
    text = trace_of(error)
    error = error.with_traceback(None)
    try:
        pickled = pack_whole(error)
        unpack_whole(pickled)
    except LeaseEnding:
        raise
    except BaseException:
        pickled = b""
    return Failure(pickled, type(error).__name__, _message_of(error), text, begun)


def told(error: BaseException, **more: Any) -> bytes:
    """Describe what a sealed call raised, for a reader that opens no pickle."""
    fields = {"kind": type(error).__name__, "text": _message_of(error), "trace": trace_of(error), **more}
    return json.dumps(fields).encode()


#: Files whose frames are of no use in a traceback.
_OURS = {__file__}


def not_shown(file: str) -> None:
    """Whether a traceback frame is ours and comes before the user's."""
    _OURS.add(file)


def trace_of(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _message_of(error: BaseException) -> str:
    try:
        return str(error)[:10_000]
    except Exception:
        return "its message cannot be shown"


def _flush() -> None:
    # Restore ours if the user's code replaced them; theirs may be anything.
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
    _libc.fflush(None)  # what C code printed
