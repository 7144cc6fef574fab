"""Containers of one node that share its processes and a home, as the pods of deploy/kubernetes do: one warden, and each its own workers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet import wiring
from sublet.core.leasing.lease import EndReason
from sublet.leases.warden import warden_process
from sublet.settings import load_settings
from tests.conftest import need
from tests.homes import Home, close_home, make_home, wait_until

#: Runs a function in a leased worker, which says what it sees of a file.
SEES = """
    import sublet, sys
    def look(path):
        try:
            with open(path) as file:
                return file.read()
        except OSError:
            return "nothing"
    with sublet.gpu(vram="64MiB", ttl="1m", holder="worker") as lease:
        print("held", lease.id, lease.run(look, sys.argv[1]), flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    need(os.geteuid() == 0 and shutil.which("unshare") is not None, "root and unshare")
    made = make_home(tmp_path, f"sqlite:{tmp_path}/home/ledger.db", monkeypatch, "host:1x1GiB")
    yield made
    close_home(made)


def contained(home: Home, folder: Path, words: str) -> subprocess.Popen[str]:
    """A program in a mount namespace of its own, in which `folder` is another one than outside."""
    script = f'mount -t tmpfs none {folder} && printf %s {words} > {folder}/file && exec "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    program = [sys.executable, "-uc", textwrap.dedent(SEES), str(folder / "file")]
    child = subprocess.Popen(
        [*command, *program], env=home.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    home.children.append(child)
    return child


def test_workers_see_their_own_containers_files_and_one_warden_watches_them_all(
    home: Home, tmp_path: Path
) -> None:
    folder = Path(f"/tmp/pods-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        warden_process.ensure_warden(home.settings)
        warden = home.warden_pid()
        pods = [contained(home, folder, word) for word in ("first", "second")]
        said = [pod.stdout.readline().split() for pod in pods]
        assert [words[2] for words in said] == ["first", "second"]
        assert home.warden_pid() == warden  # nobody started another
        ledger = wiring.open_ledger(load_settings())
        pods[0].send_signal(signal.SIGKILL)  # a pod is gone: its worker with it, and the warden saw it
        wait_until(lambda: ledger.look(said[0][1]).lease.settled_at)
        assert ledger.look(said[0][1]).lease.reason is EndReason.HOLDER_LOST
        assert not ledger.look(said[1][1]).lease.ended_at
    finally:
        folder.rmdir()
