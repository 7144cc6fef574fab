"""The leased worker: the process in which user code runs.

Rules of this file:
- It does one thing at a time: take a message, run it, answer. Output goes through pipes as it is written; the answer is sent
  after the output it belongs to.
- SIGTERM ends the code that runs by an exception, so that its `finally` blocks see it; SIGINT is the user's own interrupt.
- It knows the lease it works under (`sublet.inside`), not the ledger: no address, no token, no secret is in here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import select
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from sublet import inside
from sublet.hosting.channel import Channel, ChannelClosed, look_briefly
from sublet.hosting.pickling import main_globals, pack, pack_whole, unpack, unpack_whole

CALL, RESULT, RAISED, NOT_UNDERSTOOD = 1, 2, 3, 4
_libc = ctypes.CDLL(None)


class Ending(BaseException):
    """The lease is over; raised in whatever runs. Not an Exception: user code must not swallow it by accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a worker must know before its first call."""

    lease_id: str
    epoch: int
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    path: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way: itself if it can travel, and its traceback as text in any case."""

    pickled: bytes
    kind: str
    text: str
    trace: str


_page: mmap.mmap | None = None


def move_in(terms: Terms) -> int:
    """The first call: become the place the caller's code expects to run in."""
    assert _page is not None
    os.environ.clear()
    os.environ.update(terms.environment)
    with contextlib.suppress(OSError):
        os.chdir(terms.folder)
    sys.path[:] = terms.path
    sys.argv[:] = terms.arguments or [""]
    inside.move_in(inside.Tenancy(terms.lease_id, terms.epoch, _page))
    threads = terms.environment.get("OMP_NUM_THREADS", "")
    torch = sys.modules.get("torch")
    if torch is not None and threads.isdigit() and int(threads):
        torch.set_num_threads(int(threads))  # it read the zygote's environment, not the caller's
    return os.getpid()


def serve(call_fd: int, out_fd: int, err_fd: int, page_fd: int) -> NoReturn:
    global _page
    for fd, standard in ((out_fd, 1), (err_fd, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    _page = mmap.mmap(page_fd, inside.PAGE_BYTES)
    os.close(page_fd)
    sys.modules["__main__"] = types.ModuleType("__main__")
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.unfreeze()
    channel = Channel(socket.socket(fileno=call_fd))
    code = 0
    try:
        _loop(channel)
    except ChannelClosed:
        pass
    except Ending:
        code = 143
    except BaseException:  # what the caller will read in its log when all else is lost
        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        _flush()
    os._exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ending


def _loop(channel: Channel) -> None:
    functions: dict[int, Callable[..., Any]] = {}
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    while True:
        try:
            look_briefly(poller)  # for the next call of a loop
            parts = channel.receive()[1]
        except KeyboardInterrupt:
            continue  # meant for a call that is over
        answer = NOT_UNDERSTOOD
        try:
            function, values, several = _understand(functions, parts)
            answer = RAISED
            packed = pack(_call(function, values, several))
            answer = RESULT
        except Ending:
            raise
        except BaseException as e:
            packed = pack(_failure(e))
        values = None
        _flush()
        channel.send(answer, packed)
        del packed


def _understand(
    functions: dict[int, Callable[..., Any]], parts: list[memoryview]
) -> tuple[Callable[..., Any], Any, bool]:
    """What is to be called, with what. Definitions come first: the values may be made of what they define."""
    message = unpack(parts)
    for name, blob in message[1]:
        if isinstance(name, int):
            functions[name] = unpack_whole(blob)
        else:
            main_globals()[name] = unpack_whole(blob)
    values = message[3] if len(message) == 4 else unpack(parts[1:])
    parts.clear()  # what the arguments lie in is free again when the function lets go of them
    return functions[message[0]], values, message[2]


def _call(function: Callable[..., Any], values: Any, several: bool) -> Any:
    if not several:
        args, kwargs = values
        return function(*args, **kwargs)
    results: list[tuple[bool, Any]] = []
    for args, kwargs in values:
        try:
            results.append((True, function(*args, **kwargs)))
        except Exception as e:
            results.append((False, _failure(e)))
    return results


def _failure(error: BaseException) -> Failure:
    # The frames of this file are of no use to who reads it.
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    error = error.with_traceback(None)
    try:
        pickled = pack_whole(error)
        unpack_whole(pickled)
    except BaseException:
        pickled = b""
    return Failure(pickled, type(error).__name__, str(error)[:10_000], text)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    _libc.fflush(None)  # what C code printed
