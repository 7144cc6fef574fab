"""What a power cut may leave behind: calls are recorded while real code runs, and legal states of the disk are made from them.

    with recording(folder) as log:            # everything below `folder` that is done through `os`
        save_something(folder)
        log.mark("returned")                  # what the program believed, and when
    log.check_complete()                      # nothing went past the recorder
    for crash in crash_states(log, count=1000, seed=7):
        crash.write_to(elsewhere)             # the tree as it is found after the power came back
        assert loads(elsewhere) in (old, new), crash
        if "returned" in crash.marks: assert loads(elsewhere) == new, crash

What is legal, of any file system that keeps POSIX's word and no more:
- The power goes off between two calls: at each prefix of the log.
- What was synced is there: `fsync` or `fdatasync` of a file its bytes and length, `fsync` of a folder its names. A file's sync says
  nothing about its name, a folder's sync nothing about the bytes of what it names.
- Of everything else any part may be there: of writes each sector of 512 bytes by itself, in any order, the length with or without the
  bytes (which are then zeros, or what the disk held before); of names each change by itself, in any order. A rename within one folder
  happens whole or not at all; one into another folder is a new name there and a lost name here, and either may be missing.

Rules of this file:
- Calls are recorded under one lock: the log's order is the order in which they happened, whatever thread they came from.
- Recorded is what goes through `os`: `open(path, "w")` writes past it. `check_complete` finds such writes, because the log then does
  not lead to what is on the disk. A sync that goes past it only makes more states legal: never a bug that is not seen.
- The same log, count and seed give the same states. `repr(crash)` says how to get this one again.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECTOR = 512
#: What the disk held before, where a length came back without its bytes.
STALE = b"\xde\xad\xbe\xef" * (SECTOR // 4)


@dataclass(frozen=True, slots=True)
class Write:
    node: int
    at: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    node: int
    size: int


@dataclass(frozen=True, slots=True)
class Names:
    """Changes in one folder that happen together: names to what they lead to, None when they are gone."""

    node: int
    changes: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Sync:
    node: int


@dataclass(frozen=True, slots=True)
class Mark:
    label: str
    node: int = -1


Op = Write | Resize | Names | Sync | Mark


@dataclass(slots=True)
class Log:
    root: Path
    ops: list[Op] = field(default_factory=list)
    files: dict[int, bytes] = field(default_factory=dict)  # before the first op
    folders: dict[int, dict[str, int]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def mark(self, label: str) -> None:
        """From here on it is true: states of later prefixes have it in `marks`."""
        with self._lock:
            self.ops.append(Mark(label))

    def check_complete(self) -> None:
        """Replayed, the log gives what is on the disk. Otherwise something wrote past the recorder, and nothing it says counts."""
        made, there = self.at_end(), _tree_of(self.root)
        wrong = sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))
        if wrong:
            raise AssertionError(f"written past the recorder: {', '.join(wrong[:5])}")

    def at_end(self) -> dict[str, bytes | None]:
        """Path to content, None for a folder, with everything that was recorded."""
        return Crash(self, len(self.ops), "all", 0).tree()


def _tree_of(root: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))
    }


# --- recording -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Log]:
    """Every call below `root` that changes something, until the end of the block. `root` itself is there, and durable."""
    recorder = _Recorder(root)
    recorder.install()
    try:
        yield recorder.log
    finally:
        recorder.remove()


class _Recorder:
    def __init__(self, root: Path) -> None:
        self.log = Log(root)
        self._known: dict[tuple[int, int], int] = {}  # device and inode to node
        self._count = 0
        self._real: dict[str, Any] = {}
        self._scan(root)

    def _node(self, info: os.stat_result) -> int:
        """A new one. The kernel gives numbers of what is gone to what is new, so they are not enough by themselves."""
        self._known[info.st_dev, info.st_ino] = self._count
        self._count += 1
        return self._count - 1

    def _scan(self, folder: Path) -> int:
        node = self._node(os.stat(folder))
        names: dict[str, int] = {}
        for path in sorted(folder.iterdir()):
            info = path.lstat()
            if stat.S_ISDIR(info.st_mode):
                names[path.name] = self._scan(path)
            elif stat.S_ISREG(info.st_mode):
                known = self._known.get((info.st_dev, info.st_ino))
                names[path.name] = self._node(info) if known is None else known
                self.log.files[names[path.name]] = path.read_bytes()
        self.log.folders[node] = names
        return node

    def _of(self, info: os.stat_result) -> int | None:
        return self._known.get((info.st_dev, info.st_ino))

    def _of_fd(self, fd: int) -> int | None:
        return self._of(os.fstat(fd))

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        """The folder's node and the name in it, if the folder is one of ours."""
        parent, name = os.path.split(os.fspath(path))
        try:
            folder = self._of(os.stat(parent or ".", dir_fd=dir_fd))
        except OSError:
            return None
        return None if folder is None else (folder, name)

    @staticmethod
    def _look(path: Any, dir_fd: int | None) -> os.stat_result | None:
        try:
            return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        except OSError:
            return None

    def _add(self, op: Op) -> None:
        self.log.ops.append(op)

    def install(self) -> None:
        for name in (
            "open", "write", "writev", "pwrite", "pwritev", "ftruncate", "truncate", "posix_fallocate", "fsync", "fdatasync",
            "link", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "symlink",
        ):  # fmt: skip
            self._real[name] = getattr(os, name)
            setattr(os, name, self._locked(getattr(self, f"_{name}")))

    def remove(self) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _locked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*args: Any, **kwargs: Any) -> Any:
            with self.log._lock:
                return call(*args, **kwargs)

        return locked

    # bytes

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = self._place(path, dir_fd) if flags & (os.O_CREAT | os.O_TRUNC) else None
        before = self._look(path, dir_fd) if place else None
        fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if place is not None and flags & os.O_TMPFILE != os.O_TMPFILE:
            if before is None:
                self._add(Names(place[0], ((place[1], self._node(os.fstat(fd))),)))
            elif flags & os.O_TRUNC:
                node = self._of_fd(fd)
                assert node is not None
                self._add(Resize(node, 0))
        return fd

    def _wrote(self, fd: int, at: int, buffers: Any, done: int) -> int:
        node = self._of_fd(fd)
        if node is not None:
            self._add(Write(node, at, b"".join(bytes(b) for b in buffers)[:done]))
        return done

    def _position(self, fd: int) -> int:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return 0
        import fcntl

        return info.st_size if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND else os.lseek(fd, 0, os.SEEK_CUR)

    def _write(self, fd: int, data: Any) -> int:
        at = self._position(fd)
        return self._wrote(fd, at, [data], self._real["write"](fd, data))

    def _writev(self, fd: int, buffers: Any) -> int:
        at = self._position(fd)
        return self._wrote(fd, at, buffers, self._real["writev"](fd, buffers))

    def _pwrite(self, fd: int, data: Any, at: int) -> int:
        return self._wrote(fd, at, [data], self._real["pwrite"](fd, data, at))

    def _pwritev(self, fd: int, buffers: Any, at: int, flags: int = 0) -> int:
        return self._wrote(fd, at, buffers, self._real["pwritev"](fd, buffers, at, flags))

    def _ftruncate(self, fd: int, size: int) -> None:
        self._real["ftruncate"](fd, size)
        node = self._of_fd(fd)
        if node is not None:
            self._add(Resize(node, size))

    def _truncate(self, path: Any, size: int) -> None:
        if isinstance(path, int):
            return self._ftruncate(path, size)
        self._real["truncate"](path, size)
        node = self._of(os.stat(path))
        if node is not None:
            self._add(Resize(node, size))
        return None

    def _posix_fallocate(self, fd: int, at: int, size: int) -> None:
        before = os.fstat(fd).st_size
        self._real["posix_fallocate"](fd, at, size)
        node = self._of_fd(fd)
        if node is not None and at + size > before:
            self._add(Resize(node, at + size))

    def _synced(self, fd: Any) -> None:
        node = self._of_fd(fd if isinstance(fd, int) else fd.fileno())
        if node is not None:
            self._add(Sync(node))

    def _fsync(self, fd: Any) -> None:
        self._real["fsync"](fd)
        self._synced(fd)

    def _fdatasync(self, fd: Any) -> None:
        self._real["fdatasync"](fd)
        self._synced(fd)

    # names

    def _name(self, place: tuple[int, str] | None, node: int | None) -> None:
        if place is not None:
            self._add(Names(place[0], ((place[1], node),)))

    def _link(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **more: Any
    ) -> None:
        self._real["link"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **more)
        place = self._place(dst, dst_dir_fd)
        if place is not None:
            info = self._look(dst, dst_dir_fd)
            assert info is not None
            node = self._of(info)
            assert node is not None, "linked from outside of what is recorded"
            self._name(place, node)

    def _rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        info = self._look(src, src_dir_fd)
        self._real["rename"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        here, there = self._place(src, src_dir_fd), self._place(dst, dst_dir_fd)
        assert info is not None
        node = self._of(info)
        if here is not None and there is not None and here[0] == there[0]:
            self._add(Names(here[0], ((here[1], None), (there[1], node))))
            return
        assert there is None or node is not None, "renamed from outside of what is recorded"
        self._name(there, node)
        self._name(here, None)

    _replace = _rename

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._real["unlink"](path, dir_fd=dir_fd)
        self._name(self._place(path, dir_fd), None)

    _remove = _unlink

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        place = self._place(path, dir_fd)
        if place is not None:
            node = self._node(os.stat(path, dir_fd=dir_fd))
            self.log.folders[node] = {}
            self._name(place, node)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._real["rmdir"](path, dir_fd=dir_fd)
        self._name(self._place(path, dir_fd), None)

    def _symlink(self, src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> None:
        assert self._place(dst, dir_fd) is None, "symbolic links are not modelled"
        self._real["symlink"](src, dst, *args, dir_fd=dir_fd, **more)


# --- states --------------------------------------------------------------------------------------------------

#: What is certainly looked at for each prefix, before chance has its turn.
KINDS = ("nothing", "all", "names", "bytes", "torn")


@dataclass(frozen=True, slots=True)
class Crash:
    """The power went off after `prefix` calls. `kind` and `seed` say what of the unsynced was there all the same."""

    log: Log
    prefix: int
    kind: str
    seed: int

    def __repr__(self) -> str:
        last = self.log.ops[self.prefix - 1] if self.prefix else "nothing"
        shown = f"{last!r:.120}"
        return f"Crash(log, {self.prefix}, {self.kind!r}, {self.seed}) of {len(self.log.ops)} calls, after {shown}"

    @property
    def marks(self) -> frozenset[str]:
        return frozenset(op.label for op in self.log.ops[: self.prefix] if isinstance(op, Mark))

    def _durable(self) -> set[int]:
        """Which calls of the prefix are certainly on the disk."""
        waiting: dict[int, list[int]] = {}
        durable: set[int] = set()
        for number, op in enumerate(self.log.ops[: self.prefix]):
            if isinstance(op, Sync):
                durable.update(waiting.pop(op.node, ()))
            elif not isinstance(op, Mark):
                waiting.setdefault(op.node, []).append(number)
        return durable

    def tree(self) -> dict[str, bytes | None]:
        """Path below the root to content; None is a folder."""
        rng = random.Random(f"{self.prefix} {self.kind} {self.seed}")
        share = rng.choice([0.1, 0.5, 0.9])
        durable = self._durable()
        files = {node: bytearray(data) for node, data in self.log.files.items()}
        folders = {node: dict(names) for node, names in self.log.folders.items()}
        for number, op in enumerate(self.log.ops[: self.prefix]):
            sure = number in durable
            match op:
                case Names(node, changes):
                    if sure or self._happens(rng, share, "names"):
                        for name, target in changes:
                            if target is None:
                                folders[node].pop(name, None)
                            else:
                                folders[node][name] = target
                case Resize(node, size):
                    if sure or self._happens(rng, share, "bytes"):
                        content = files.setdefault(node, bytearray())
                        del content[size:]
                        content.extend(bytes(size - len(content)))
                case Write(node, at, data):
                    content = files.setdefault(node, bytearray())
                    if sure or self.kind in ("all", "bytes"):
                        _put(content, at, data)
                    elif self.kind in ("torn", "chance"):
                        self._tear(content, at, data, rng, share)
        found: dict[str, bytes | None] = {}
        pending = [("", 0)]
        while pending:
            path, folder = pending.pop()
            for name, node in folders[folder].items():
                if node in folders:
                    found[path + name] = None
                    pending.append((f"{path}{name}/", node))
                else:
                    found[path + name] = bytes(files.get(node, b""))
        return found

    def _happens(self, rng: random.Random, share: float, what: str) -> bool:
        if self.kind in ("chance", "torn"):
            return what == "names" if self.kind == "torn" else rng.random() < share
        return self.kind in ("all", what)

    @staticmethod
    def _tear(content: bytearray, at: int, data: bytes, rng: random.Random, share: float) -> None:
        """Each sector by itself; the length perhaps without what should fill it."""
        if rng.random() < 0.5 and at + len(data) > len(content):
            missing = at + len(data) - len(content)
            content.extend(
                (STALE * (missing // SECTOR + 1))[:missing] if rng.random() < 0.5 else bytes(missing)
            )
        place = at
        while place < at + len(data):
            end = min((place // SECTOR + 1) * SECTOR, at + len(data))
            if rng.random() < share:
                _put(content, place, data[place - at : end - at])
            place = end

    def write_to(self, folder: Path) -> None:
        """`folder` becomes what the root was, whatever it held before."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path, content in self.tree().items():
            if content is None:
                (folder / path).mkdir()
            else:
                (folder / path).write_bytes(content)


def _put(content: bytearray, at: int, data: bytes) -> None:
    if at > len(content):
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data


def crash_states(log: Log, *, count: int, seed: int) -> Iterator[Crash]:
    """At most `count` different ones, in turns of `KINDS` at every prefix, in no order, and by chance. Those that look like one before
    are left out, unless the program believed something else by then."""
    rng = random.Random(seed)
    prefixes = range(len(log.ops) + 1)
    planned = [Crash(log, prefix, kind, seed) for prefix in prefixes for kind in KINDS]
    rng.shuffle(planned)  # so that a small count is spread over all of them
    seen: set[int] = set()
    given = idle = 0
    while given < count and idle < 1000:
        chance = Crash(log, rng.choice(prefixes), "chance", rng.randrange(1 << 32))
        crash = planned.pop() if planned and rng.random() < 0.5 else chance
        looks = hash((crash.marks, tuple(sorted(crash.tree().items()))))
        if looks in seen:
            idle += not planned
            continue
        seen.add(looks)
        idle = 0
        given += 1
        yield crash
