"""Wake-ups on one host: a file per topic, touched to ring and watched through inotify.

Rules of this file:
- Ringing a bell nobody listens to costs one failed system call. Nothing is ever read from the files.
- A lost wake-up only costs the listener its polling interval.
- A user may have few inotify instances (often 128). A listener that gets none polls the files instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
from pathlib import Path

from sublet.machine.private_files import make_private_folder, open_private

_IN_ATTRIB = 0x4
_IN_NONBLOCK = 0o4000
_IN_CLOEXEC = 0o2000000
_libc = ctypes.CDLL(None, use_errno=True)
_LOOK_SECONDS = 0.02


def _file(folder: str, topic: str) -> str:
    return f"{folder}/{topic.replace(':', '_')}"


def ring(folder: str, topics: set[str]) -> None:
    for topic in topics:
        path = _file(folder, topic)
        if os.access(path, os.F_OK):  # mostly nobody listens, and an exception costs more than a question
            with contextlib.suppress(OSError):
                os.utime(path)


class FileBell:
    """Implements `ports.bell.Bell`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        make_private_folder(Path(folder))
        self._fd = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        self._watches: dict[str, int] = {}
        self._rung_at: dict[str, int] = {}  # of each topic, where there is no inotify

    def listen(self, topic: str) -> None:
        if topic in self._watches:
            return
        path = _file(self._folder, topic)
        os.close(open_private(path, os.O_WRONLY))
        if self._fd < 0:
            self._watches[topic] = -1
            self._rung_at[topic] = _touched(path)
            return
        watch = _libc.inotify_add_watch(self._fd, path.encode(), _IN_ATTRIB)
        if watch >= 0:
            self._watches[topic] = watch

    def unlisten(self, topic: str) -> None:
        watch = self._watches.pop(topic, None)
        if watch is None:
            return
        self._rung_at.pop(topic, None)
        if self._fd >= 0:
            _libc.inotify_rm_watch(self._fd, watch)
        if topic.startswith("lease:"):  # one listener each: the file goes with it
            with contextlib.suppress(OSError):
                os.unlink(_file(self._folder, topic))

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._fd, 65536):
                pass

    def _looked(self) -> bool:
        """Whether any topic was rung since the last look."""
        now = {topic: _touched(_file(self._folder, topic)) for topic in list(self._rung_at)}
        rung = any(at != self._rung_at.get(topic, at) for topic, at in now.items())
        self._rung_at.update((topic, at) for topic, at in now.items() if topic in self._rung_at)
        return rung

    def wait(self, timeout_us: int) -> bool:
        if self._fd < 0:
            until = time.monotonic() + max(0, timeout_us) / 1e6
            while not self._looked():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(left, _LOOK_SECONDS))
            return True
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(max(0, timeout_us) / 1000):
            return False
        self._drain()
        return True

    def close(self) -> None:
        for topic in list(self._watches):
            self.unlisten(topic)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _touched(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
