"""I4: a line that cannot be written must not end the thread that wanted to write it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

from sublet.machine.process_log import LINE_MOST, ProcessLog


def test_a_full_disk_is_no_error_and_is_told_afterwards() -> None:
    written: list[bytes] = []
    full = True

    def write(data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(data)

    log = ProcessLog("warden", write)
    log("one")
    log("two")
    assert not written
    full = False
    log("three")
    assert [line.split(b"] ")[1] for line in written] == [b"2 lines could not be written here\n", b"three\n"]
    log("four")
    assert len(written) == 3


def test_on_a_device_that_is_always_full_a_process_goes_on() -> None:
    code = "from sublet.machine.process_log import ProcessLog\nfor _ in range(3): ProcessLog('x')('line')\nprint('on')"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, env=os.environ
        )
    assert (done.returncode, done.stdout) == (0, b"on\n")


def test_a_line_stays_one_line() -> None:
    written: list[bytes] = []
    ProcessLog("x", written.append)("a\nb\x1b[31m\udc80" + "c" * 10_000)
    assert written[0].count(b"\n") == 1
    assert b"a\\nb\\x1b[31m\\udc80ccc" in written[0]
    assert len(written[0]) < LINE_MOST + 100
