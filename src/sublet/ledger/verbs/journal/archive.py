"""Files of journal rows that were pruned: written once, read to verify and to audit.

Rules of this file:
- One line of JSON for what it is, then one for each row, as stored. It is complete and synced under its name,
  or not there.
- A file is known by its digest, which the journal has; its name only helps to find it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sublet.core.errors import BadInput
from sublet.core.journal.chain import Entry
from sublet.machine.durable import sync_path

FORMAT = "sublet journal archive 1"


def write(folder: Path, ledger: str, first: int, last: int, entries: Iterable[Entry]) -> tuple[Path, str]:
    """Write a file. Returns its path and its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"journal-{ledger[:8]}-{first:012d}-{last:012d}.jsonl"
    partly = path.with_name(f".{path.name}.{os.getpid()}")
    told = hashlib.sha256()
    try:
        with partly.open("wb") as out:
            head = {"format": FORMAT, "ledger": ledger, "first": first, "last": last}
            for line in (head, *(_fields(entry) for entry in entries)):
                data = (json.dumps(line, ensure_ascii=True, separators=(",", ":")) + "\n").encode()
                told.update(data)
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
        partly.replace(path)
    finally:
        partly.unlink(missing_ok=True)
    sync_path(folder)
    return path, told.hexdigest()


def _fields(entry: Entry) -> list[object]:
    return [
        entry.strand,
        entry.seq,
        entry.at,
        entry.kind,
        entry.tenant,
        entry.subject,
        entry.body,
        entry.hash,
    ]


class Archive:
    """Files in the order of their rows."""

    def __init__(self, given: Sequence[Path]) -> None:
        found: dict[int, Path] = {}
        for path in given:
            for file in sorted(path.glob("journal-*.jsonl")) if path.is_dir() else [path]:
                found[self._first(file)] = file
        self.files = [found[first] for first in sorted(found)]

    def __bool__(self) -> bool:
        return bool(self.files)

    @staticmethod
    def _first(path: Path) -> int:
        try:
            with path.open("rb") as file:
                head = json.loads(file.readline(10_000))
            if head["format"] == FORMAT:
                return int(head["first"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise BadInput(
            f"{path.name[:80]} is not an archive of a journal",
            remedy="name what 'sublet journal prune' wrote, or its folder",
        )

    def entries(self) -> Iterator[Entry]:
        for path in self.files:
            with path.open("rb") as file:
                file.readline()
                for number, line in enumerate(file, 2):
                    yield _entry(path, number, line)

    def digests(self) -> dict[str, str]:
        """The name of each file, by its digest."""
        found = {}
        for path in self.files:
            with path.open("rb") as file:
                found[hashlib.file_digest(file, "sha256").hexdigest()] = path.name
        return found


def _entry(path: Path, number: int, line: bytes) -> Entry:
    try:
        strand, seq, at, kind, tenant, subject, body, digest = json.loads(line)
        return Entry(
            str(strand), int(seq), int(at), str(kind), str(tenant), str(subject), str(body), str(digest)
        )
    except (ValueError, TypeError):
        raise BadInput(
            f"line {number} of {path.name[:80]} cannot be read as a row of a journal",
            remedy="its digest is in the journal: find the copy that has it",
        ) from None
