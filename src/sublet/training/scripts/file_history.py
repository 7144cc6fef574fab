"""What a script does to files, so that it can be undone: an undo journal that survives kill -9.

    history = FileHistory(folder, cwd=Path.cwd(), left_alone=[home])
    history.watch()
    position = history.position()  # saved with a step
    …                              # killed. In the next process:
    history.undo(position)         # files are as they were at that step

Python raises an audit event before it opens, renames or removes a file. What the name or the file is like
by then is noted and on the disk before the event returns, once for each position (`files.notes` says what
follows from a note). What no event announces, a file that stays open for writing, is noted when a position
is taken.

Rules of this file:
- A note is made before its change, or the change does not happen: NotDurable is raised in the program's
  `open`.
- One lock for all threads. A thread that was let through before a position may act after it: the last changes
  of every other thread are noted again with the position.
- A forked child has no part in the journal. What it changes is named in a file of its own, and not undone.
- What sublet does itself, and what lies in caches and installations, is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from sublet.core.errors import BadInput, NotDurable
from sublet.machine.durable import make_folder, sync_path
from sublet.training.scripts.files.descriptors import (
    descriptors,
    held_by_files,
    path_of_descriptor,
    where_it_leads,
)
from sublet.training.scripts.files.events import (
    CHANGING,
    OUTSIDE,
    WRITES,
    changes_of,
    is_library,
    is_our_own,
    left_alone_paths,
    only_appends,
    outside_of,
    real_path,
    users_line,
)
from sublet.training.scripts.files.journal import ChangeJournal
from sublet.training.scripts.files.kept import KeptFiles
from sublet.training.scripts.files.native_writers import MADE_NUMBER, make_them_announce
from sublet.training.scripts.files.notes import (
    Forgotten,
    NameNote,
    Notes,
    PositionsUpTo,
    Record,
    Undone,
    by_name,
    wanted_at,
)
from sublet.training.scripts.files.noting import NoteTaker
from sublet.training.scripts.files.put_back import put_back

#: A file that is written over is copied before, up to here. A larger one is named as lost.
COPIED_AT_MOST = 1 << 30
#: So much of what the job found at first is kept to the end, for `rewind`.
REWOUND_AT_MOST = 4 << 30
_POSITIONS = 1000

_Event = tuple[str, tuple[Any, ...]]


class FileHistory:
    def __init__(
        self, folder: Path, *, cwd: Path, left_alone: Sequence[Path] = (), copy_at_most: int = COPIED_AT_MOST
    ) -> None:
        """`folder` is for the journal and what is kept. Sentences name paths as seen from `cwd`."""
        make_folder(folder)
        self._folder = folder.resolve()
        self._cwd = os.path.join(os.path.realpath(cwd), "")
        self._lock = threading.RLock()
        self._journal = ChangeJournal(self._folder / "journal")
        self._notes = Notes()
        self._records = 0  # in the journal
        for record in self._journal.read():
            self._notes.add(record)
            self._records += 1
        self._kept = KeptFiles(self._folder, self._notes, lambda shelf: self._write([shelf]), copy_at_most)
        self._is_left_alone = left_alone_paths([self._folder, *left_alone], dict(os.environ))
        self._taker = NoteTaker(self._kept, self._write, self._is_left_alone)
        self._outside: dict[str, str] = {}
        self._by_children = self._folder / "changed-by-children"
        self._by_number: dict[str, str] = {}  # what `os.open` opened for the program, and where
        self._made_numbers: dict[int, tuple[str, str]] = {}  # of what has no path: where it leads, and words
        self._appended: set[Any] = set()  # since the position; as the program calls them
        # The last change of each thread, in this position and in the one before:
        self._last: dict[int, _Event] = {}
        self._last_before: dict[int, _Event] = {}
        self._at = self._notes.reserved
        self._write([PositionsUpTo(below=self._at + _POSITIONS)])
        self._taker.begin(self._at)

    # what a run calls

    def watch(self) -> None:
        """From now on changes are noted. Of several histories in a process, the last that was asked to."""
        _watch(self)

    def position(self) -> int:
        """Now. What is in Python's buffers is not in a file yet: flush before."""
        with self._lock:
            self._next_position()
            for event, args in self._of_others():
                with contextlib.suppress(OSError):
                    self._note(event, args, coming=False)
            self._taker.open_files()
            return self._at

    def undo(self, position: int) -> list[str]:
        """Put files back as they were at that position; sentences about what could not be. Whoever is
        killed in its middle calls it again."""
        with self._lock:
            if position < self._notes.forgotten:
                raise BadInput(f"position {position} of the file history was forgotten; nothing was changed")
            said = put_back(wanted_at(self._notes.notes, position), self._kept, self._shown)
            self._write([Undone(at=position)])
            self._kept.drop_but(self._notes.held())
            self._next_position()
            self._taker.close()
            return said

    def rewind(self) -> list[str]:
        """Files as they were when the job began, so that its beginning runs as it did: it makes a folder
        that is there by now, or reads what it will write. `undo` to a position then goes forward again."""
        with self._lock:
            self._next_position()
            wanted = by_name(wanted_at(self._notes.notes, 0))
            self._taker.names(wanted.names)
            said = put_back(wanted, self._kept, self._shown, as_others=True)
            self._taker.close()
            return said

    def forget(self, before: int) -> None:
        """No position below this one will be asked for again."""
        with self._lock:
            self._write([Forgotten(before=before)])
            live = list(self._notes.records())
            if self._records > 2 * len(live) + 100:
                self._journal.replace(live)
                self._records = len(live)
            held = self._notes.held()
            too_much = self._kept.beyond(REWOUND_AT_MOST, held - self._notes.held(since=before))
            self._kept.drop_but(held - too_much)

    def sync(self) -> None:
        """What was written to files so far is on the disk: for a step that is to survive a power cut."""
        with self._lock:
            changed, self._taker.changed = self._taker.changed, set()
        for path in changed | {os.path.dirname(path) for path in changed}:
            with contextlib.suppress(OSError):  # it is gone by now, or not ours to read
                sync_path(Path(path))

    def clear(self) -> None:
        """The job is over: nothing is kept."""
        with self._lock:
            self._kept.clear()
            self._journal.replace([])
            self.close()

    def close(self) -> None:
        """Nothing is noted any more."""
        if self in _watching:
            stop_watching()
        self._journal.close()

    def has_made(self, path: str) -> bool:
        """Whether the job has written this file itself: it was not there when the job began."""
        real = os.path.realpath(path)
        with self._lock:
            first = next((n for n in self._notes.notes if isinstance(n, NameNote) and n.path == real), None)
        return first is not None and first.was == "absent"

    @property
    def held_by_number(self) -> tuple[str, ...]:
        """What the program opened with `os.open` and reads or writes by the number: in another process the
        number may be of another file."""
        named = self._by_number
        paths = [(fd, path_of_descriptor(fd)) for fd in descriptors()] if named else []
        found = {
            fd: f"{self._shown(path)}, opened with os.open{named[path]}"
            for fd, path in paths
            if fd > 2 and path in named and not self._is_left_alone(path)
        }
        made = self._made_numbers.items()
        found |= {fd: words for fd, (leads_to, words) in made if where_it_leads(fd) == leads_to}
        known = held_by_files() if found else set()
        return tuple(words for fd, words in found.items() if fd not in known)

    @property
    def outside(self) -> tuple[str, ...]:
        """What cannot be undone, each named once."""
        named = dict(self._outside)
        for path, why in self._taker.lost.items():
            named[path] = f"{self._shown(path)}, which cannot be put back: {why}"
        with contextlib.suppress(FileNotFoundError):
            named |= {line: line for line in os.fsdecode(self._by_children.read_bytes()).splitlines()}
        return tuple(named.values())

    # events

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        """An event that may say something, before its deed."""
        if event == "open" and only_appends(args[2]) and args[0] in self._appended:
            # Said before it is asked again: if a position comes between the two, it is in one of them.
            self._last[threading.get_ident()] = event, args
            if args[0] in self._appended:
                return
        frame = sys._getframe(2)
        if event == MADE_NUMBER:
            self._note_numbers(args[0], args[1], frame.f_back)
            return
        if _opens_by_number(event, args):
            if not is_our_own(frame) and (path := real_path(args[0], follow=True)):
                self._by_number[path] = users_line(frame)
            if not args[2] & WRITES:
                return
        if event in CHANGING:
            if not is_our_own(frame):
                self._last[threading.get_ident()] = event, args
                # What cannot even be looked at cannot be changed: the program will get the same error.
                with self._lock, contextlib.suppress(OSError):
                    if self._note(event, args, coming=True):
                        self._remember(event, args)
        elif event in _ABOUT_DESCRIPTORS:
            with self._lock, contextlib.suppress(OSError):
                self._about_descriptor(event, *args)
        elif event == "os.chdir":
            self._appended.clear()
        elif event == "sublet.file_put_back":
            self._taker.put_back(*args)
        elif not is_our_own(frame) and (words := outside_of(event, args)):
            self._outside.setdefault(words, words + users_line(frame))

    def _note_numbers(self, maker: str, made: int | tuple[int, ...], frame: FrameType | None) -> None:
        """Of those that the program's own code made: a library puts its own into an object."""
        if frame is None or is_our_own(frame) or is_library(frame.f_code.co_filename):
            return
        for fd in made if isinstance(made, tuple) else (made,):
            words = f"descriptor {fd}, made with os.{maker}{users_line(frame)}"
            self._made_numbers[fd] = where_it_leads(fd), words

    def _note(self, event: str, args: tuple[Any, ...], *, coming: bool) -> bool:
        """False where nothing can come of it, because a folder is not there."""
        changes = changes_of(event, args)
        if event != "os.rename":
            self._taker.change(changes, coming=coming)
        elif len(changes) == 2:
            self._taker.rename(changes[0].path, changes[1].path)
        return bool(changes)

    def _remember(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and only_appends(args[2]) and isinstance(args[0], str | bytes):
            self._appended.add(args[0])
        elif event not in _OF_THE_SAME_FILE:
            self._appended.clear()  # these names may mean other files from now on

    def _about_descriptor(self, event: str, fd: Any, *how: Any) -> None:
        if not isinstance(fd, int) or fd < 0:
            return
        if event == "mmap.__new__":
            self._taker.map(fd, how[1])
        elif event == "fcntl.lockf" or how[0] in (fcntl.F_SETLK, fcntl.F_SETLKW):
            self._taker.lock(fd)

    def _of_others(self) -> list[_Event]:
        """The last change of every other thread, that of the position before too: it may still be under
        way."""
        before, self._last_before, self._last = self._last_before, self._last, {}
        own = threading.get_ident()
        return [
            said for last in (before, self._last_before) for thread, said in last.items() if thread != own
        ]

    # in a child that was forked

    def as_a_child(self) -> None:
        """It has no memory of what its parent noted, and cannot wait for a lock that nobody will release."""
        self._appended = set()
        self._outside = {}

    def heard_in_child(self, event: str, args: tuple[Any, ...]) -> None:
        said: list[str] = []
        with contextlib.suppress(OSError):
            if event in CHANGING and not (event == "open" and args[0] in self._appended):
                found = [c.path for c in changes_of(event, args) if not self._is_left_alone(c.path)]
                said = [f"{self._shown(path)}, changed by a process that was forked" for path in found]
                if isinstance(args[0], str | bytes):
                    self._appended.add(args[0])
            elif event in OUTSIDE and (words := outside_of(event, args)):
                said = [f"{words}, by a process that was forked"]
            new = [words for words in said if words not in self._outside]
            if new and not is_our_own(sys._getframe(2)):
                self._outside.update(zip(new, new, strict=True))
                fd = os.open(self._by_children, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                os.write(fd, b"".join(os.fsencode(words) + b"\n" for words in new))
                os.close(fd)

    # the journal

    def _next_position(self) -> None:
        self._appended.clear()
        self._at += 1
        self._taker.begin(self._at)
        if self._at >= self._notes.reserved:
            self._write([PositionsUpTo(below=self._at + _POSITIONS)])

    def _write(self, records: Sequence[Record]) -> None:
        """They are on the disk when this returns, and so is what they speak of."""
        try:
            self._kept.settle()
            self._journal.append(records)
        except OSError as e:
            raise NotDurable(
                f"what is about to change cannot be noted in {self._folder}: {e}; it was not changed",
                remedy="make room there, and start again: it goes on at the last save",
            ) from e
        self._records += len(records)
        for record in records:
            self._notes.add(record)

    def _shown(self, path: str) -> str:
        return path.removeprefix(self._cwd)


def _opens_by_number(event: str, args: tuple[Any, ...]) -> bool:
    """`os.open`, which says no mode."""
    return event == "open" and args[1] is None and isinstance(args[2], int)


# --- the hook -----------------------------------------------------------------------------------------------

_ABOUT_DESCRIPTORS = frozenset(["mmap.__new__", "fcntl.lockf", "fcntl.fcntl"])
_OF_THE_SAME_FILE = frozenset(["open", "os.mkdir", "os.utime", "os.chmod", "os.chown", "os.truncate"])
_HEARD = CHANGING | OUTSIDE | _ABOUT_DESCRIPTORS | {"os.chdir", "sublet.file_put_back", MADE_NUMBER}
_watching: list[FileHistory] = []
#: Who is told of an event: the history that watches, or nobody.
_told: list[Callable[[str, tuple[Any, ...]], None]] = []
_installed: list[bool] = []


def _hook(
    event: str,
    args: tuple[Any, ...],
    # Bound here, because the last events come when modules are taken apart.
    heard: frozenset[str] = _HEARD,
    told: list[Callable[[str, tuple[Any, ...]], None]] = _told,
    writes: int = WRITES,
) -> None:
    """Every event of the process comes here: most leave at the first line."""
    if event not in heard:
        return
    if event == "open" and not (isinstance(args[2], int) and (args[2] & writes or args[1] is None)):
        return
    for tell in told:
        tell(event, args)


def _watch(history: FileHistory | None) -> None:
    _watching[:] = [history] if history is not None else []
    _told[:] = [history.heard] if history is not None else []
    if not _installed:
        _installed.append(True)
        make_them_announce()
        os.register_at_fork(after_in_child=_go_on_as_a_child)
        sys.addaudithook(_hook)


def stop_watching() -> None:
    _watch(None)


def _go_on_as_a_child() -> None:
    """A child of sublet's own is left alone as sublet is."""
    own = is_our_own(sys._getframe(1))
    for history in _watching:
        history.as_a_child()
        _told[:] = [] if own or not _told else [history.heard_in_child]
