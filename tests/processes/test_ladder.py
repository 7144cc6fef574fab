"""Who a process is and who is below it, read from the host's own account of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sublet.core.leasing.lease import Holder
from sublet.processes import ladder
from sublet.processes.ladder import HostProcesses, read_stat


def holder_of(pid: int) -> Holder:
    stat = read_stat(pid)
    assert stat is not None
    return Holder(host="here", pid=pid, started=stat.started)


def test_a_stat_is_read_whatever_the_process_is_called() -> None:
    own = Path("/proc/self/comm")
    before = own.read_text()
    own.write_text(") R 1 (é")
    try:
        found = read_stat(os.getpid())
    finally:
        own.write_text(before)
    assert found is not None
    assert (found.pid, found.parent, found.exiting) == (os.getpid(), os.getppid(), False)
    assert found.state in "RS"
    assert read_stat(1 << 30) is None


def test_below_a_holder_is_its_child_and_below_one_that_is_gone_is_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = HostProcesses("here")
    with subprocess.Popen(["sleep", "600"]) as child:
        mine, its = holder_of(os.getpid()), holder_of(child.pid)
        assert its in host.trees([mine])[mine][1:]
        child.kill()
    recycled = Holder(host="here", pid=mine.pid, started=mine.started + 1)  # the number is another's by now
    assert host.trees([its, recycled, mine]).keys() == {mine}
    # With nobody to find, nothing is looked for: it is every process of the host, at every teardown.
    monkeypatch.setattr(ladder, "_everybody", lambda: pytest.fail("the host was walked for nobody"))
    assert host.trees([its, recycled]) == host.trees([]) == {}
