"""What the tests of sealed calls call. In a file without pytest: every worker imports it."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sublet.processes.channel import sealed_channel
from sublet.processes.channel.channel import sealed_packet
from sublet.processes.channel.pickling import pack
from sublet.processes.worker import worker


def echo(parts: list[memoryview]) -> list[memoryview]:
    return parts


def nothing(parts: list[memoryview]) -> list[bytes]:
    return []


def talk(parts: list[memoryview]) -> list[bytes]:
    print("out")
    print("err", file=sys.stderr)
    ctypes.CDLL(None).puts(b"from C")
    os.write(2, b"raw \xff\n")
    return [b"said"]


def flood(parts: list[memoryview]) -> list[bytes]:
    """Threads that print all the while."""
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            os.write(1, b"x" * 4096)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    time.sleep(0.3)
    over.set()
    thread.join()
    return [b"over"]


def fail(parts: list[memoryview]) -> list[bytes]:
    raise LookupError("there")


def wrong(parts: list[memoryview]) -> Any:
    return ["a text", 7]


def ask(parts: list[memoryview]) -> list[bytes]:
    answers = []
    for part in parts:
        print("before", bytes(part[:10]).decode())
        fine, found = worker.ask_sealed({"ask": "echo", "n": len(part)}, [part])
        answers += [b"yes" if fine else b"no", *map(bytes, found)]
    return answers


def sleep(parts: list[memoryview]) -> list[bytes]:
    try:
        print("began")
        sys.stdout.flush()
        for _ in range(3000):
            time.sleep(0.01)
    except KeyboardInterrupt:
        return [b"interrupted"]
    return [b"slept"]


def die(parts: list[memoryview]) -> list[bytes]:
    print("last words")
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
    return []


def write_all_and_wait(parts: list[memoryview]) -> list[bytes]:
    Path(bytes(parts[0]).decode()).write_text(str(os.getpid()))
    time.sleep(60)
    return []


class Bomb:
    """Opened by whoever unpickles it: the file is then there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return _explode, (self.path, "opened")


def _explode(path: str, text: str) -> str:
    with open(path, "a") as file:
        file.write(f"{text} by {os.getpid()}\n")
    return path


def bombs(parts: list[memoryview]) -> list[bytes]:
    """One on every way out."""
    bomb = Bomb(bytes(parts[0]).decode())
    import pickle

    packed = pickle.dumps(bomb)
    from sublet.processes.worker import screen

    screen.installed(worker.screen_fd).show({"what": "display", "data": {"x": packed}})
    os.write(worker.screen_fd, struct.pack("<BI", 3, len(packed)) + packed)
    worker.ask_sealed({"ask": "x"}, [packed])
    assert worker._channel is not None
    raw = pack((worker._questions, bomb))
    for kind in (worker.ASKED, worker.RESULT, worker.RAISED, worker.NOT_BEGUN):
        if len(parts) > 1:  # not sealed at all
            worker._channel.send(kind, raw, worker._serial)
    if len(parts) > 2:
        raise RuntimeError(packed)
    return [packed]


def say(parts: list[memoryview]) -> list[bytes]:
    """Hostile words to whoever called: which of them is in the first part."""
    assert worker._channel is not None
    out = worker._channel.socket
    serial = worker._serial
    _WORDS[bytes(parts[0]).decode()](out, serial)
    time.sleep(30)
    return []


def _intro(number: int, *sizes: int, count: int | None = None) -> bytes:
    return struct.pack("<II", number, len(sizes) if count is None else count) + b"".join(
        struct.pack("<Q", n) for n in sizes
    )


def _sealed(kind: int, serial: int, *pieces: bytes) -> bytes:
    return sealed_packet(kind, serial, pieces)


def _with_fd(out: socket.socket, serial: int) -> None:
    fd = os.memfd_create("x")
    packet = struct.pack("<BxHHHIIQ", worker.RESULT, 0, 0, 0, serial, 1, 1 << 40)
    socket.send_fds(out, [packet], [fd] * 10)


_WORDS: Mapping[str, Callable[[socket.socket, int], Any]] = {
    "garbage": lambda out, serial: out.send(os.urandom(500).replace(b"\x20", b"\x01")),
    "short": lambda out, serial: out.send(b"\x21"),
    "empty": lambda out, serial: out.send(b""),
    "huge": lambda out, serial: out.send(_sealed(sealed_channel.DONE, serial, _intro(0, 1 << 63))),
    "sum": lambda out, serial: out.send(_sealed(sealed_channel.DONE, serial, _intro(0, 3 << 30, 3 << 30))),
    "many": lambda out, serial: out.send(_sealed(sealed_channel.DONE, serial, _intro(0, count=0xFFFFFFFF))),
    "lies": lambda out, serial: out.send(_sealed(sealed_channel.DONE, serial, _intro(0, 4, 4), b"123456789")),
    "middle": lambda out, serial: out.send(_sealed(sealed_channel.MORE, serial, b"123")),
    "call": lambda out, serial: out.send(_sealed(sealed_channel.CALL, serial, _intro(0, 1), b"1")),
    "unknown": lambda out, serial: out.send(_sealed(200, serial, _intro(0, 1), b"1")),
    "headless": lambda out, serial: out.send(_sealed(sealed_channel.ASKED, serial, _intro(1))),
    "no json": lambda out, serial: out.send(_sealed(sealed_channel.ASKED, serial, _intro(1, 2), b"[]")),
    "head": lambda out, serial: [
        out.send(p)
        for p in sealed_channel.packets(sealed_channel.ASKED, serial, 1, [b"{" + b" " * 70_000 + b"}"])
    ],
    "ordinary": lambda out, serial: out.send(
        struct.pack("<BxHHHIIQI", worker.RESULT, 1, 0, 0, serial, 0, 0, 3) + b"abc"
    ),
    "descriptors": _with_fd,
    "frame": lambda out, serial: os.write(worker.screen_fd, struct.pack("<BI", 9, 5) + b"12345"),
    "large frame": lambda out, serial: os.write(worker.screen_fd, struct.pack("<BI", 3, (64 << 20) + 1)),
    "page": lambda out, serial: _cut_page(),
}


def _cut_page() -> None:
    """The page both map: to make it shorter would end whoever writes to it."""
    for name in os.listdir("/proc/self/map_files") if os.access("/proc/self/map_files", os.R_OK) else ():
        path = f"/proc/self/map_files/{name}"
        try:
            if "sublet-tenure" in os.readlink(path):
                os.truncate(path, 0)
        except OSError as e:
            print(type(e).__name__)
    raise SystemError("told")


def words() -> Sequence[str]:
    return sorted(set(_WORDS) - {"page"})


def whole_environment(parts: list[memoryview]) -> list[bytes]:
    return [json.dumps(dict(os.environ)).encode()]
