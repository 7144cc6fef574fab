"""Two notebooks on one small device: the place in the waitlist, the choice of less now, and who gets it
when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.leasing.lease import LeaseState
from sublet.wiring import open_ledger
from tests.homes import wait_until
from tests.notebook.conftest import Kernel, Lab
from tests.notebook.test_loss import begin
from tests.notebook.test_output import gpu

BUSY = "import os, time\nprint('under way')\nwhile not os.path.exists({gate!r}): time.sleep(0.01)"


@pytest.fixture(scope="module")
def second(shared_lab: Lab) -> Kernel:
    return shared_lab.kernel("second")


@pytest.fixture
def gate(kernel: Kernel, second: Kernel, shared_lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """While it is not there the first notebook computes. It is always opened, and both devices are free again: a failed test must not hold up
    the next, nor a teardown, for the first of the next would be offered less meanwhile and asked."""
    made = tmp_path / "gate"
    yield made
    made.touch()
    for one in (kernel, second):
        one.fine("%gpu release")
    ledger = open_ledger(shared_lab.home.settings)
    wait_until(lambda: all(d.free_bytes == d.capacity_bytes for d in ledger.devices()))


def waiting(lab: Lab) -> bool:
    return any(a.lease.state is LeaseState.WAITING for a in lab.leases())


def test_the_second_sees_its_place_and_gets_it_when_the_first_is_idle(
    kernel: Kernel, second: Kernel, gate: Path
) -> None:
    begin(kernel, BUSY.format(gate=str(gate)), "--vram 4GiB --count 2")
    second.begin(gpu("'mine now'", "--vram 4GiB"))
    shown = second.finish(until=lambda s: any("place 1 in the waitlist" in t for t in s.texts))
    assert any("Interrupt to leave" in text for text in shown.texts)
    gate.touch()
    assert kernel.finish().status == "ok"
    shown = second.finish()  # the first only stopped computing: its lease is idle, and somebody waits
    assert shown.result == "'mine now'"
    assert shown.updates  # the place in the waitlist is taken away again
    assert shown.updates[-1]["data"]["text/plain"] == ""
    assert "the last one ended (idle" in kernel.fine(gpu("1")).line


def test_interrupting_the_wait_leaves_the_waitlist(
    kernel: Kernel, second: Kernel, shared_lab: Lab, gate: Path
) -> None:
    begin(kernel, BUSY.format(gate=str(gate)), "--vram 4GiB --count 2")
    second.begin(gpu("1", "--vram 4GiB"))
    wait_until(lambda: waiting(shared_lab))
    second.interrupt()
    assert second.finish().error == "KeyboardInterrupt"
    wait_until(lambda: not waiting(shared_lab))
    gate.touch()
    kernel.finish()


def test_a_wait_that_is_too_long_ends_in_a_sentence(kernel: Kernel, second: Kernel, gate: Path) -> None:
    begin(kernel, BUSY.format(gate=str(gate)), "--vram 4GiB --count 2")
    for wait in ("1s", "0"):
        shown = second.run(gpu("1", f"--vram 4GiB --wait {wait}"))
        assert shown.status == "error"
        assert shown.error in ("WaitTimedOut", "NoCapacity", "Refused")
        assert "→" in shown.trace
    gate.touch()
    kernel.finish()


def test_a_question_does_not_keep_anybody_longer_than_the_wait(
    kernel: Kernel, second: Kernel, shared_lab: Lab
) -> None:
    gate = shared_lab.folder / "gate-question"
    begin(kernel, BUSY.format(gate=str(gate)), "--vram 3GiB --count 2")
    shown = second.run(gpu("1", "--vram 2GiB --wait 1s"))  # offered 1GiB, and nobody answers
    gate.touch()
    kernel.finish()
    assert shown.error == "WaitTimedOut"
    assert shown.seconds < 10  # the offer is held for twenty
    assert "Take 1GiB now?" in second.client.get_stdin_msg(timeout=60)["content"]["prompt"]


@pytest.mark.parametrize("answer", ["y", "n"])
def test_less_now_or_all_of_it_later(kernel: Kernel, second: Kernel, gate: Path, answer: str) -> None:
    begin(kernel, BUSY.format(gate=str(gate)), "--vram 3GiB --count 2")
    second.begin(gpu("import sublet\nsublet.lease().vram_bytes", "--vram 2GiB"))
    if answer == "n":
        shown = second.finish(answer="n", until=lambda s: "Take 1GiB now?" in s.stdout)
        gate.touch()
        kernel.finish()
        shown = second.finish()
        assert shown.result == str(2 << 30)
    else:
        shown = second.finish(answer="y")
        assert "1GiB now, or 2GiB" in shown.stdout
        assert shown.result == str(1 << 30)
        gate.touch()
        kernel.finish()
