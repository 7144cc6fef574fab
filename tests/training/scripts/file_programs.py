"""Programs that do anything to the files of a small tree, and what the tree looked like.

An operation is plain data, so that a property can make it, shrink it and send it to a child. One that is not
possible when its turn comes (no such file, a folder in the way) fails as it would in a script, and the program
goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: Few names, so that they meet; `l` becomes a link.
NAMES = [
    ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "l", "l/a", "new/x/y"],
    ["a", "b"],
    ["a", "d", "d/a", "l", "l/a"],
]
TEXTS = [b"", b"1", b"two\n", b"three of them\n", b"x" * 40]
text = st.sampled_from(TEXTS)
place = st.integers(0, 30)
held = st.integers(0, 3)


def _operation(names: list[str]) -> st.SearchStrategy[tuple[Any, ...]]:
    name = st.sampled_from(names)
    kinds: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
        "write": (name, text), "append": (name, text), "exclusive": (name, text), "over": (name, place, text),
        "cut_and_fill": (name, text), "low_level": (name, st.sampled_from(["w", "wct", "wc", "wca", "rwc"]), text),
        "remove": (name,), "rename": (name, name), "link": (name, name), "symlink": (st.sampled_from([*names, "nowhere"]), name),
        "mkdir": (name,), "makedirs": (name,), "rmdir": (name,), "rmtree": (name,), "truncate": (name, place),
        "chmod": (name, st.sampled_from([0o600, 0o640, 0o755, 0o444, 0o700])), "utime": (name, st.integers(0, 10**9)),
        "copy": (name, name), "copytree": (name, name), "move": (name, name),
        "in_a_folder": (name, st.sampled_from("abe"), text), "chdir": (st.sampled_from([".", "d"]),),
        "hold": (name, st.sampled_from(["w", "a", "x", "r+"]), st.sampled_from(["", "b"])), "held_write": (held, text),
        "held_over": (held, place, text), "let_go": (held,),
    }  # fmt: skip
    often = ("write", "append", "rename", "remove") * 2  # what scripts do all the time
    return st.one_of(*(st.tuples(st.just(kind), *kinds[kind]) for kind in (*kinds, *often)))


def programs(*parts: int, but: str = "") -> st.SearchStrategy[list[list[Any]]]:
    """As many lists of operations, each of at most so many, about the same few names."""
    return st.sampled_from(NAMES).flatmap(
        lambda names: st.tuples(
            *(st.lists(_operation(names).filter(lambda o: o[0] != but), max_size=size) for size in parts)
        ).map(list)
    )


def tree(root: Path) -> dict[str, Any]:
    """Names, kinds, modes, contents, times of files, targets, and which names are of one file."""
    found: dict[str, Any] = {}
    first: dict[tuple[int, int], str] = {}
    for parent, folders, files in os.walk(root):
        for entry in sorted((*folders, *files)):
            path = Path(parent, entry)
            info, at = path.lstat(), str(path.relative_to(root))
            mode = stat.S_IMODE(info.st_mode)
            if path.is_symlink():
                found[at] = ("link", os.readlink(path))
            elif path.is_dir():
                found[at] = ("folder", mode)
            else:
                same_as = first.setdefault((info.st_dev, info.st_ino), at)
                found[at] = ("file", mode, path.read_bytes(), info.st_mtime_ns, same_as)
    return found


class Program:
    """In its root; what it holds open is known, so that it can be flushed and let go of."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: list[tuple[Any, str]] = []

    def do(self, operation: tuple[Any, ...]) -> bool:
        kind, *arguments = operation
        try:
            done = getattr(self, f"_{kind}")(*arguments)
        except (OSError, shutil.Error):
            return False
        return done is not False

    def flush(self) -> None:
        for file, _ in self._held:
            file.flush()

    def end(self) -> None:
        for file, _ in self._held:
            file.close()
        self._held.clear()

    def _write(self, path: str, data: bytes) -> None:
        Path(path).write_bytes(data)

    def _append(self, path: str, data: bytes) -> None:
        with open(path, "ab") as f:
            f.write(data)

    def _exclusive(self, path: str, data: bytes) -> None:
        with open(path, "xb") as f:
            f.write(data)

    def _over(self, path: str, at: int, data: bytes) -> None:
        with open(path, "r+b") as f:
            f.seek(at)
            f.write(data)

    def _cut_and_fill(self, path: str, data: bytes) -> None:
        with open(path, "a+b") as f:
            f.truncate(0)
            f.write(data)

    def _low_level(self, path: str, how: str, data: bytes) -> None:
        flags = os.O_RDWR if "r" in how else os.O_WRONLY
        for letter, flag in (("c", os.O_CREAT), ("t", os.O_TRUNC), ("a", os.O_APPEND)):
            flags |= flag if letter in how else 0
        fd = os.open(path, flags, 0o644)
        os.write(fd, data)
        os.close(fd)

    def _in_a_folder(self, folder: str, path: str, data: bytes) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.rename(path, path + "2", src_dir_fd=fd, dst_dir_fd=fd)
            os.mkdir(path, dir_fd=fd)
            os.remove(path + "2", dir_fd=fd)
        finally:
            os.close(fd)

    def _remove(self, path: str) -> None:
        os.remove(path)

    def _rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def _link(self, source: str, target: str) -> None:
        os.link(source, target)

    def _symlink(self, source: str, target: str) -> None:
        os.symlink(source, target)

    def _mkdir(self, path: str) -> None:
        os.mkdir(path)

    def _makedirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def _rmdir(self, path: str) -> None:
        os.rmdir(path)

    def _rmtree(self, path: str) -> None:
        shutil.rmtree(path)

    def _truncate(self, path: str, length: int) -> None:
        os.truncate(path, length)

    def _chmod(self, path: str, mode: int) -> None:
        os.chmod(path, mode)

    def _utime(self, path: str, at: int) -> None:
        os.utime(path, (at, at))

    def _copy(self, source: str, target: str) -> None:
        shutil.copy2(source, target)

    def _copytree(self, source: str, target: str) -> None:
        if not os.path.realpath(target).startswith(os.path.realpath(source)):  # or it has no end
            shutil.copytree(source, target, symlinks=True)

    def _move(self, source: str, target: str) -> None:
        shutil.move(source, target)

    def _chdir(self, path: str) -> None:
        os.chdir(self.root / path)

    def _hold(self, path: str, mode: str, binary: str) -> None:
        if len(self._held) > 3:
            self._held.pop(0)[0].close()
        file: Any = open(path, mode + binary)  # noqa: SIM115
        self._held.append((file, mode))

    def _held_write(self, which: int, data: bytes) -> None:
        if self._held:
            file, _ = self._held[which % len(self._held)]
            file.seek(0, 2)
            file.write(data if "b" in file.mode else data.decode())
            file.flush()

    def _held_over(self, which: int, at: int, data: bytes) -> None:
        """Only where it is seen: a file that was opened to be emptied is not written over later."""
        files = [file for file, mode in self._held if mode == "r+"]
        if files:
            file = files[which % len(files)]
            file.seek(at)
            file.write(data if "b" in file.mode else data.decode())
            file.flush()

    def _let_go(self, which: int) -> None:
        if self._held:
            self._held.pop(which % len(self._held))[0].close()


@contextlib.contextmanager
def inside(folder: Path):  # type: ignore[no-untyped-def]
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def play(root: Path, operations: list[tuple[Any, ...]], between: Callable[[int], None]) -> None:
    """`between` is called before each of them and at the end, when all that was written is in the files."""
    program = Program(root)
    try:
        for number, one in enumerate(operations):
            program.flush()
            between(number)
            program.do(one)
        program.flush()
        between(len(operations))
    finally:
        program.end()
        os.chdir(root)
