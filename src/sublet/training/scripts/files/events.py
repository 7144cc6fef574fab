"""What an audit event of Python says: which files may change next, and what lies outside of all files.

Rules of this file:
- An event comes before its deed, and the deed may fail: a change is one that may happen.
- Events that announce others are not looked at (`shutil.rmtree`, `tempfile.mkstemp`): the others come too.
- Only where a link or a descriptor leads is read here. `noting` acts on what is said.
- What is outside is said in words a user can read.
"""

from __future__ import annotations

import os
import site
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

from sublet.training.scripts.files.descriptors import path_of_descriptor


class FileChange(Enum):
    """What may become of a file or a name."""

    APPENDED = "bytes are added at its end"
    READ_AND_APPENDED = "bytes are added at its end, if it is not cut before"
    EMPTIED = "it is cut to nothing, and perhaps filled again"
    WRITTEN = "its bytes are written over where they are"
    TOUCHED = "its mode, owner or times change"
    MADE = "a name that is not there comes to be; if it is there, nothing happens"
    NAMED = "the name goes away, or means something else"
    LINKED = "another name is given to the file"


@dataclass(frozen=True, slots=True)
class Change:
    what: FileChange
    path: str  # absolute, and no folder in it is a symbolic link


#: An open with none of these changes nothing.
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_O_TMPFILE = getattr(os, "O_TMPFILE", 0)

#: What, which path or descriptor, and the descriptor of the folder it is in.
_Said = tuple[FileChange, Any, int]


def _opened(path: Any, mode: Any, flags: int) -> Iterable[_Said]:
    if isinstance(path, int) or (_O_TMPFILE and flags & _O_TMPFILE == _O_TMPFILE):
        return ()  # whatever opened the descriptor said so; the other has no name
    if flags & os.O_EXCL and flags & os.O_CREAT:
        return ((FileChange.MADE, path, -1),)
    if flags & os.O_TRUNC:
        return ((FileChange.EMPTIED, path, -1),)
    if only_appends(flags):
        return ((FileChange.APPENDED, path, -1),)
    # "a+" is also how a small file is read, cut and filled again.
    return ((FileChange.READ_AND_APPENDED if flags & os.O_APPEND else FileChange.WRITTEN, path, -1),)


def only_appends(flags: int) -> bool:
    return flags & (os.O_APPEND | os.O_TRUNC | os.O_ACCMODE) == os.O_APPEND | os.O_WRONLY


def _database(path: Any) -> Iterable[_Said]:
    """SQLite writes by itself, and beside its file too."""
    name = os.fsdecode(os.fspath(path))
    if name.startswith("file:"):
        name = name[5:].partition("?")[0]
    if not name or name.startswith(":"):
        return ()  # in memory
    return [(FileChange.WRITTEN, name + end, -1) for end in ("", "-journal", "-wal", "-shm")]


_CHANGES: dict[str, Callable[..., Iterable[_Said]]] = {
    "open": _opened,
    "os.rename": lambda source, target, source_dir, target_dir: (
        (FileChange.NAMED, source, source_dir),
        (FileChange.NAMED, target, target_dir),
    ),
    "os.remove": lambda path, folder: ((FileChange.NAMED, path, folder),),
    "os.rmdir": lambda path, folder: ((FileChange.NAMED, path, folder),),
    "os.mkdir": lambda path, mode, folder: ((FileChange.MADE, path, folder),),
    "os.link": lambda source, target, source_dir, target_dir: (
        (FileChange.LINKED, source, source_dir),
        (FileChange.MADE, target, target_dir),
    ),
    "os.symlink": lambda source, target, folder: ((FileChange.MADE, target, folder),),
    "os.truncate": lambda path, length: ((FileChange.WRITTEN, path, -1),),
    "os.chmod": lambda path, mode, folder: ((FileChange.TOUCHED, path, folder),),
    "os.chown": lambda path, uid, gid, folder: ((FileChange.TOUCHED, path, folder),),
    "os.utime": lambda path, times, ns, folder: ((FileChange.TOUCHED, path, folder),),
    "sqlite3.connect": _database,
}
CHANGING = frozenset(_CHANGES)


def changes_of(event: str, args: Sequence[Any]) -> list[Change]:
    """What may happen next. Nothing where the folder is not there: then it cannot."""
    found = []
    for what, path, folder in _CHANGES[event](*args):
        real = real_path(path, folder, follow=what not in (FileChange.MADE, FileChange.NAMED))
        if real:
            found.append(Change(what, real))
    return found


def real_path(path: Any, folder: int = -1, *, follow: bool) -> str:
    """Where it is; "" where nothing can be. `follow`: not a link at the end is meant, but where it leads."""
    if isinstance(path, int):
        return path_of_descriptor(path)
    name = os.fsdecode(os.fspath(path))
    if not name:
        return ""
    if folder >= 0 and not os.path.isabs(name):
        name = os.path.join(path_of_descriptor(folder), name)
    parent, last = os.path.split(name.rstrip("/"))
    if follow or last in ("", ".", ".."):
        name = os.path.realpath(name)
        return name if os.path.isdir(os.path.dirname(name)) else ""
    try:
        return os.path.join(os.path.realpath(parent or ".", strict=True), last)
    except OSError:
        return ""


# --- what is left alone -------------------------------------------------------------------------------------

# As in the frames of our own modules, which were found the same way.
_OURS = os.path.join(os.path.abspath(__file__).rsplit(os.sep, 4)[0], "")
#: They speak for whoever calls them.
SPOKESMEN = {os.path.join(_OURS, "training", "scripts", "files", "native_writers.py")}
_STANDARD = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
_INSTALLED = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
_INSTALLED += [*site.getsitepackages(), site.getusersitepackages()]


def _folders(*paths: str) -> tuple[str, ...]:
    return tuple({os.path.join(path, "") for folder in paths for path in (folder, os.path.realpath(folder))})


_SITE_PACKAGES = _folders(*_INSTALLED)
_LIBRARIES = _folders(*_STANDARD, *_INSTALLED)
_CACHES = (
    "XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "HUGGINGFACE_HUB_CACHE", "TORCH_HOME",
    "MPLCONFIGDIR", "PYTHONPYCACHEPREFIX", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR",
    "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH", "JAX_COMPILATION_CACHE_DIR",
)  # fmt: skip


def left_alone_paths(more: Iterable[Path], environment: dict[str, str]) -> Callable[[str], bool]:
    """Whether a path is of the machine, of an installation or of a cache: there, nothing is a result."""
    home = Path(environment.get("HOME", "/nonexistent"))
    folders = [
        Path("/dev"),
        Path("/proc"),
        Path("/sys"),
        home / ".cache",
        home / ".triton",
        home / ".nv",
        *more,
    ]
    folders += [Path(environment[name]) for name in _CACHES if environment.get(name)]
    # A cache of compiled kernels, by its user's name; sockets and such between processes, by chance.
    temporary = [
        os.path.join(tempfile.gettempdir(), start) for start in ("torchinductor_", "pymp-", "torch-shm-dir-")
    ]
    starts = (*_LIBRARIES, *(os.path.join(os.path.realpath(f), "") for f in folders), *temporary)

    def is_left_alone(path: str) -> bool:
        return path.startswith(starts) or "/__pycache__/" in path or path.endswith(("/__pycache__", ".pyc"))

    return is_left_alone


def is_our_own(frame: FrameType | None) -> bool:
    """Whether sublet itself is doing it, if need be through the standard library. A script that was installed
    as a package is not sublet's, though sublet has started it."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in SPOKESMEN:
            if name.startswith(_OURS):
                return True
            if not is_library(name) or name.startswith(_SITE_PACKAGES):
                return False
        frame = frame.f_back
    return False


def is_library(name: str) -> bool:
    return name.startswith(("<frozen ", *_LIBRARIES))


def users_line(frame: FrameType | None) -> str:
    """Where in the user's own code we are: " at train.py:31", or ""."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, "<")) and not is_library(name):
            return f" at {os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# --- what is outside of all files ---------------------------------------------------------------------------


def _connected(_: Any, address: Any) -> str:
    if isinstance(address, tuple) and len(address) >= 2:
        return f"a connection to {address[0]}:{address[1]}"
    name = os.fsdecode(address) if isinstance(address, (str, bytes)) else ""
    return "" if not name or "/pymp-" in name or name.startswith("\0") else f"a connection to {name}"


#: They only look. Libraries start them to learn where they are.
_LOOKING = frozenset(["ldconfig", "uname", "lscpu", "nvidia-smi", "rocm-smi", "getconf", "hostname", "id"])


def _program(name: Any) -> str:
    short = os.path.basename(os.fsdecode(os.fspath(name)))
    return f"the program {short}" if short not in _LOOKING else ""


def _imported(module: str, *_: Any) -> str:
    started = module in ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")
    return "processes of multiprocessing that are not forked" if started else ""


_OUTSIDE: dict[str, Callable[..., str]] = {
    "socket.connect": _connected,
    "socket.sendto": _connected,
    "subprocess.Popen": lambda executable, args, *_: _program(executable),
    "os.system": lambda command: f"the command {os.fsdecode(command)!r:.60}",
    "os.exec": lambda path, *_: _program(path),
    "os.posix_spawn": lambda path, *_: _program(path),
    "pty.spawn": lambda argv: _program(argv[0]),
    "import": _imported,
}
OUTSIDE = frozenset(_OUTSIDE)


def outside_of(event: str, args: Sequence[Any]) -> str:
    """In words; "" where it is nothing that leaves this process."""
    return _OUTSIDE[event](*args)
