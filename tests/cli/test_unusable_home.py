"""A home that cannot be used is a sentence for every command: a file, a read-only disk, a full one, somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import need

#: One for each way into the home: the ledger, the schema, the warden's lock, the run folder.
COMMANDS = ["ps", "lease acquire --ttl 10s", "migrate", "warden --idle-exit 100ms", "run -- true"]

#: The home, made by a shell that sees file systems of its own; `sublet` is run where `"$@"` stands.
READ_ONLY = """
mount -t tmpfs none "$SUBLET_HOME" && mount -o remount,ro "$SUBLET_HOME" && "$@"
"""
READ_ONLY_LATER = """
mount -t tmpfs none "$SUBLET_HOME" && "$PYTHON" -m sublet tenant add ada >/dev/null \
  && mount -o remount,ro "$SUBLET_HOME" && "$@"
"""
FULL = """
mount -t tmpfs -o size=64k none "$SUBLET_HOME"
head -c 1000000 /dev/zero > "$SUBLET_HOME/filled" 2>/dev/null
"$@"
"""


def said(home: Path, command: str, around: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "sublet", *command.split()]
    if around:
        words = ["unshare", "--mount", "sh", "-c", around, "sh", *words]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")},
        "PYTHON": sys.executable,
        "SUBLET_HOME": str(home),
        "SUBLET_DEVICES": "host:1x1GiB",
        "SUBLET_PRELOAD": "none",
    }
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)


def in_words(done: subprocess.CompletedProcess[str], words: str, code: int) -> None:
    assert "Traceback" not in done.stderr, done.stderr
    assert words in done.stderr, done.stderr
    assert done.returncode == code, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    need(os.getuid() == 0, "root, to mount a disk of its own")
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_home_is_a_file(tmp_path: Path, command: str) -> None:
    (tmp_path / "home").write_text("not a folder")
    in_words(said(tmp_path / "home", command), "cannot be", 78)
    assert (tmp_path / "home").read_text() == "not a folder"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_home_is_read_only(folder: Path, command: str) -> None:
    in_words(said(folder, command, READ_ONLY), "cannot be", 78)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_home_became_read_only(folder: Path, command: str) -> None:
    """Its ledger is its user's own, and is not said to be somebody else's."""
    done = said(folder, command, READ_ONLY_LATER)
    in_words(done, "it lies on a read-only file system", 78)
    assert "somebody else" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_home_is_full(folder: Path, command: str) -> None:
    done = said(folder, command, FULL)
    in_words(done, "", 74)
    assert "full" in done.stderr or "no room" in done.stderr
