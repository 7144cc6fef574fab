"""What a folder takes on disk, whatever its owner did so that it is not counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sublet.core.studio import scratch_quota
from sublet.processes.sandbox import scratch_use as counting
from sublet.processes.sandbox.scratch_use import scratch_use

MIB = 1 << 20
NOBODY = 1 << 30  # larger than any pid


def _use(folder: Path, limit: int = 0, supervisor: int = NOBODY) -> scratch_quota.ScratchUse:
    return scratch_use(str(folder), supervisor, limit)


def test_what_lies_in_it_is_counted_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x" * 3 * MIB)
    (tmp_path / "file").write_bytes(b"x" * MIB)
    found = _use(tmp_path)
    assert 4 * MIB <= found.bytes < 5 * MIB
    assert found.files == 4
    assert not found.too_deep


def test_a_file_with_two_names_counts_once_and_a_link_leads_nowhere(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (outside / "large").write_bytes(b"x" * 4 * MIB)
    (inside / "file").write_bytes(b"x" * MIB)
    os.link(inside / "file", inside / "again")
    (inside / "link").symlink_to(outside)
    (inside / "to_file").symlink_to(outside / "large")
    assert MIB <= _use(inside).bytes < 2 * MIB


def test_a_hole_takes_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "holes", "wb") as made:
        made.truncate(100 * MIB)
    assert _use(tmp_path).bytes < MIB


def test_a_folder_its_owner_closed_is_counted(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "file").write_bytes(b"x" * 2 * MIB)
    closed.chmod(0)
    try:
        assert _use(tmp_path).bytes >= 2 * MIB
    finally:
        closed.chmod(0o700)


def test_what_has_no_name_and_is_open_is_counted(tmp_path: Path) -> None:
    hides = (
        "import os, sys\n"
        f"kept = open({str(tmp_path / 'gone')!r}, 'wb')\n"
        f"kept.write(b'x' * {3 * MIB})\n"
        "kept.flush()\n"
        "os.unlink(kept.name)\n"
        "print('hidden', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", hides], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "hidden\n"
        assert list(tmp_path.iterdir()) == []
        assert _use(tmp_path, supervisor=os.getpid()).bytes >= 3 * MIB
        assert child.stdin is not None
        child.stdin.close()
    assert _use(tmp_path, supervisor=os.getpid()).bytes < MIB


def test_counting_stops_at_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        (tmp_path / str(number)).write_bytes(b"x" * 100_000)
    assert MIB < _use(tmp_path, limit=MIB).bytes < 2 * MIB
    monkeypatch.setattr(counting, "FILES_MOST", 10)
    assert _use(tmp_path).files == 11


def test_folders_too_deep_to_be_counted_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "DEPTH_MOST", 3)
    (tmp_path / "1/2/3").mkdir(parents=True)
    assert not _use(tmp_path).too_deep
    (tmp_path / "1/2/3/4/5").mkdir(parents=True)
    assert _use(tmp_path).too_deep


def test_a_folder_that_is_gone_takes_nothing(tmp_path: Path) -> None:
    assert _use(tmp_path / "gone").bytes == 0
