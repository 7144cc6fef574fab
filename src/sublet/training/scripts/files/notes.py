"""What is known of files as they were at a position, how it is written down, and what follows from it.

A note is a fact about one position: "at 7 the name a.csv was absent", "at 7 the file 0:4711 was 120 bytes
long". It is not an account of what a program did. So the state at a position follows from the first note
about each name and each file since then, in whatever order they were made, and putting that state back may
be begun again as often as it is cut off.

Rules of this file:
- Nothing here touches a file: `noting` looks at them, `put_back` changes them.
- A name (a path whose folders are real, not symbolic links) and a file (its inode) are noted apart: a name
  can come to mean another file, and a file can get other contents under the same name.
- A record is one line with a checksum. A last record that is torn was never acted upon; any other that does
  not fit its checksum is damage.
- The first note ever about a name or a file is never forgotten: it is how things were when the job began.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from sublet.core.errors import Damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class NameNote:
    """What a name meant."""

    at: int
    path: str
    was: Literal["absent", "folder", "link", "file"]
    mode: int = 0
    uid: int = -1
    gid: int = -1
    target: str = ""  # of a symbolic link
    inode: str = ""  # of a file
    kept: str = ""  # a second name of that file, or a copy of it
    lost: str = ""  # why there is no second name and no copy


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentNote:
    """What was in a file."""

    at: int
    path: str  # a name it had
    inode: str
    length: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    copy: str = ""  # a file with its bytes, where more than its end was about to change
    check: str = ""  # what its bytes are known by, where they were left in it
    lost: str = ""  # why there is no copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A folder of the same file system as the files whose second names and copies lie in it."""

    number: int
    mount: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionsUpTo:
    """Positions below this one may have been given out."""

    below: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """Positions below this one will never be asked for."""

    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    """Files are again as they were at this position. Later ones never were."""

    at: int


Note = NameNote | ContentNote
Record = Note | Shelf | PositionsUpTo | Forgotten | Undone
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (NameNote, ContentNote, Shelf, PositionsUpTo, Forgotten, Undone)
}


def encode(records: Iterable[Record]) -> bytes:
    """One line: these records are there together or not at all."""
    plain = [[type(r).__name__, {k: v for k, v in asdict(r).items() if v not in ("", -1)}] for r in records]
    text = json.dumps(plain, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _told(record: Record) -> dict[str, Any]:
    """What is as usual is left out."""
    usual = {f.name: f.default for f in fields(record)}
    return {name: value for name, value in asdict(record).items() if value != usual[name]}


def decode(data: bytes) -> tuple[list[Record], int]:
    """The records, and how many bytes of `data` they are. What is behind is a record that was being
    written."""
    found: list[Record] = []
    good = 0
    while good < len(data):
        end = data.find(b"\n", good) + 1
        line = data[good : end or len(data)]
        if not end or len(line) < 10 or line[:8] != b"%08x" % zlib.crc32(line[9:-1]):
            # Each record is on the disk before the next one is begun.
            if end and any(_is_whole(rest) for rest in data[end:].split(b"\n")):
                raise Damaged(f"the journal of file changes is damaged at byte {good}; nothing was changed")
            break
        found += [_KINDS[kind](**told) for kind, told in json.loads(line[9:])]
        good = end
    return found, good


def _is_whole(line: bytes) -> bool:
    return len(line) > 9 and line[:8] == b"%08x" % zlib.crc32(line[9:])


@dataclass(slots=True)
class Notes:
    """All that is noted and still counts, in the order of writing."""

    notes: list[Note] = field(default_factory=list)
    shelves: list[Shelf] = field(default_factory=list)
    reserved: int = 1
    forgotten: int = 0

    def add(self, record: Record) -> None:
        match record:
            case Forgotten():
                self.forget(record.before)
            case Shelf():
                self.shelves.append(record)
            case PositionsUpTo():
                self.reserved = max(self.reserved, record.below)
            case Undone():
                self._undo(record.at)
            case _:
                self.notes.append(record)

    def records(self) -> Iterator[Record]:
        yield PositionsUpTo(below=self.reserved)
        yield Forgotten(before=self.forgotten)
        yield from self.shelves
        yield from self.notes

    def _undo(self, at: int) -> None:
        """What was first said since then stays true: a file that goes on being written to is known by it."""
        first = _Firsts()
        self.notes = [note for note in self.notes if note.at < at or first.tells(note)]

    def forget(self, before: int) -> None:
        """As if no position below that one had been taken, but for how things were when the job began."""
        first = _Firsts()
        self.notes = [note for note in self.notes if first.tells(note) or note.at >= before]
        self.forgotten = max(self.forgotten, before)

    def held(self, since: int = 0) -> set[str]:
        """The second names and copies that some note speaks of."""
        return {ref for note in self.notes if note.at >= since and (ref := _reference(note))}


def _reference(note: Note) -> str:
    return note.kept if isinstance(note, NameNote) else note.copy


class _Firsts:
    """Which notes are the first about something: only they say how it was."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, ...]] = set()

    def tells(self, note: Note) -> bool:
        about: tuple[str, ...]
        if isinstance(note, NameNote):
            about = ("name", note.path)
        else:  # its length, and later perhaps its bytes
            about = ("bytes" if note.copy or note.lost else "facts", note.inode)
        if about in self._seen:
            return False
        self._seen.add(about)
        return True


@dataclass(frozen=True, slots=True)
class WantedContent:
    """What is to be in a file again."""

    facts: ContentNote
    copy: str
    lost: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Files as they were at one position, where they may be different now."""

    names: dict[str, NameNote]
    contents: dict[str, WantedContent]  # by inode


def wanted_at(notes: Iterable[Note], position: int) -> Wanted:
    """The first note since then about each name and each file."""
    names: dict[str, NameNote] = {}
    facts: dict[str, ContentNote] = {}
    copies: dict[str, ContentNote] = {}
    for note in notes:
        if note.at < position:
            continue
        if isinstance(note, NameNote):
            names.setdefault(note.path, note)
            continue
        facts.setdefault(note.inode, note)
        if note.copy or note.lost:
            copies.setdefault(note.inode, note)
    contents = {}
    for inode, fact in facts.items():
        source = copies.get(inode, fact)
        contents[inode] = WantedContent(fact, source.copy, source.lost)
    return Wanted(names, contents)


def by_name(wanted: Wanted) -> Wanted:
    """The same, when a file is not to be changed but replaced by another with the wanted contents."""
    names = dict(wanted.names)
    named = {note.inode for note in names.values()}
    for inode, content in wanted.contents.items():
        facts = content.facts
        if inode not in named and facts.path not in names:
            names[facts.path] = NameNote(
                at=facts.at,
                path=facts.path,
                was="file",
                mode=facts.mode,
                uid=facts.uid,
                gid=facts.gid,
                inode=inode,
            )
    return Wanted(names, wanted.contents)
