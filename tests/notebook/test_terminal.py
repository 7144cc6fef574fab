"""The same magics in plain IPython, in a real terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.notebook.conftest import ROOT, Lab, open_lab

PROMPT = r"In \[\d+\]: "


class Terminal:
    def __init__(self, lab: Lab) -> None:
        environment = lab.home.environment | {
            "PYTHONPATH": f"{ROOT}/src:{ROOT}",
            "IPYTHONDIR": str(lab.folder / "ipython"),
            "TERM": "xterm",
        }
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
            env=environment,
            encoding="utf-8",
            timeout=40,
            dimensions=(40, 160),
        )
        self.child.expect(PROMPT)


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    lab = open_lab(tmp_path, monkeypatch, devices="host:1x4GiB", preload="numpy")
    made = Terminal(lab)
    yield made
    made.child.sendeof()
    made.child.close(force=True)
    lab.close()


def test_cells_in_a_terminal(terminal: Terminal) -> None:
    child = terminal.child
    child.sendline("%load_ext sublet")
    child.expect(PROMPT)
    child.sendline("%%gpu --ttl 1m")
    child.sendline("import os; print('hello from', 'the' + 're'); x = 6 * 7; x")
    child.sendline("")
    child.sendline("")
    child.expect("hello from there")
    child.expect(r"Out\[2\]: 42")
    child.expect(r"GPU-s")
    child.expect(PROMPT)
    child.sendline("x + 1")
    child.expect("43")
    child.expect(PROMPT)
    child.sendline("%%gpu")
    child.sendline("1/0")
    child.sendline("")
    child.sendline("")
    child.expect("ZeroDivisionError")
    child.expect(PROMPT)
    child.sendline("%gpu status")
    child.expect(r"1GiB on \S+: warm")
    child.expect(r"[01]:\d\d left of 1:00")
    child.expect(PROMPT)
    child.sendline("%%gpu")
    child.sendline("import time; print('beg' + 'un'); time.sleep(60)")
    child.sendline("")
    child.sendline("")
    child.expect("begun")
    child.sendintr()
    child.expect("KeyboardInterrupt")
    child.expect(PROMPT)
    child.sendline("%gpu release")
    child.expect("GPU given back")
    child.expect(PROMPT)
