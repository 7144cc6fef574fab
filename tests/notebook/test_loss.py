"""The GPU goes, the notebook stays: whatever ends the session under a cell or between two, and what was
kept."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

import pytest

from sublet.core.billing.meter import of_ended
from sublet.core.leasing.lease import LeaseState
from sublet.testing.postgres import PostgresServer, find_binaries
from sublet.wiring import open_ledger
from tests.conftest import need
from tests.homes import process_is_gone, wait_until
from tests.notebook.conftest import Kernel, Lab, Shown, open_lab
from tests.notebook.test_output import gpu

ENDED = "GPU session ended ("
RERUN = "). Rerun this cell to reacquire."
#: What the issue asks for is a second; the machine may be busy with other things.
SOON = 3.0


def under_way(shown: Shown) -> bool:
    return "under way" in shown.stdout


def begin(kernel: Kernel, code: str, options: str = "") -> Shown:
    kernel.begin(gpu(code, options))
    return kernel.finish(until=under_way)


SLEEPS = "import time\nprint('under way')\ntime.sleep(60)"


@pytest.fixture(autouse=True)
def _the_notebook_lives(kernel: Kernel) -> object:
    """The CPU side is never killed by anything: same process, same variables, before and after every test
    here."""
    kernel.fine("untouched = object(); address = id(untouched)")
    pid = kernel.pid
    yield
    assert kernel.pid == pid
    assert kernel.value("id(untouched) == address") == "True"
    kernel.fine("%gpu release")


def test_revoked_without_grace(kernel: Kernel, shared_lab: Lab) -> None:
    begin(kernel, SLEEPS)
    began = time.monotonic()
    lease_id = shared_lab.revoke()
    shown = kernel.finish()
    assert time.monotonic() - began < SOON
    assert shown.error == "GpuSessionEnded"
    assert shown.said.startswith(ENDED + "revoked: ada needs it" + RERUN)
    assert "Nothing was kept." in shown.said
    assert "rerun the cell" in shown.trace
    assert "Traceback" not in shown.trace
    assert open_ledger(shared_lab.home.settings).look(lease_id).lease.state is LeaseState.ENDED
    assert kernel.fine(gpu("1 + 1")).result == "2"  # the rerun leases again


def test_revoked_with_grace_says_so_at_once(kernel: Kernel, shared_lab: Lab) -> None:
    begin(kernel, SLEEPS)
    shared_lab.revoke(grace_s=1.0)
    shown = kernel.finish()
    assert "GPU session ends in 1 s (revoked: ada needs it)." in shown.stderr
    assert shown.error == "GpuSessionEnded"


def test_a_short_cell_ends_within_the_grace(kernel: Kernel, shared_lab: Lab) -> None:
    begin(kernel, "import time\nprint('under way')\ntime.sleep(0.8)\nanswer = 42")
    shared_lab.revoke(grace_s=20.0)
    shown = kernel.finish()
    assert shown.status == "ok", shown.trace
    assert kernel.value("answer") == "42"
    before = shared_lab.all_leases()[0].lease.id
    assert kernel.fine(gpu("answer + 1")).result == "43"
    assert shared_lab.lease_id() != before


@pytest.mark.parametrize("victim", ["worker", "supervisor"])
def test_killed(kernel: Kernel, shared_lab: Lab, victim: str) -> None:
    begin(
        kernel,
        f"import os, time\nprint('under way')\nopen({str(shared_lab.folder / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)",
    )
    (only,) = shared_lab.leases()
    supervisor = only.lease.holder.pid
    pid = supervisor if victim == "supervisor" else _child_of(supervisor)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    shown = kernel.finish()
    assert time.monotonic() - began < SOON
    assert shown.error == "GpuSessionEnded"
    assert RERUN in shown.said
    wait_until(lambda: process_is_gone(pid))
    assert kernel.fine(gpu("'again'")).result == "'again'"


def _child_of(pid: int) -> int:
    """The last one in the line of only children: the worker itself."""
    while True:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not found:
            return pid
        pid = int(found[0])


def test_it_runs_out_between_two_cells(kernel: Kernel, shared_lab: Lab) -> None:
    kernel.fine(gpu("x = [1]", "--ttl 3s"))
    wait_until(lambda: not shared_lab.leases())
    held = max((a.lease for a in shared_lab.all_leases()), key=lambda lease: lease.granted_at)
    assert held.ended_at - held.granted_at < 30_000_000  # its ttl after the cell, and not renewed for ever
    shown = kernel.fine(gpu("x.append(2)\nx", "--ttl 3s"))
    assert shown.result == "[1, 2]"
    assert "a new session: the last one ended (nobody used it for 3.0s)" in shown.line


def test_a_ttl_said_while_the_gpu_is_warm_counts(kernel: Kernel, shared_lab: Lab) -> None:
    kernel.fine("%gpu release")
    kernel.fine(gpu("x = [1]", "--ttl 5m"))
    kernel.fine(gpu("1", "--ttl 2s"))
    wait_until(lambda: not shared_lab.leases())
    kernel.fine(gpu("1", "--ttl 5s"))  # a crowded machine must be able to renew it
    kernel.fine(gpu("1", "--ttl 1m"))  # longer than the lease's own: it is renewed meanwhile
    held = shared_lab.lease_id()
    time.sleep(6)
    kernel.fine(gpu("1"))
    assert shared_lab.lease_id() == held
    assert "1m" in kernel.fine("%gpu").texts[0].partition("used it for")[2]
    kernel.fine("%gpu release")


def test_a_cell_longer_than_its_ttl_is_renewed(kernel: Kernel, shared_lab: Lab) -> None:
    shown = kernel.fine(gpu("import time\ntime.sleep(4.5)\n'whole'", "--ttl 3s"))
    assert shown.result == "'whole'"


def test_a_process_that_ends_itself(kernel: Kernel) -> None:
    shown = kernel.run(gpu("import os\nos._exit(7)"))
    assert shown.error == "GpuSessionEnded", shown.trace
    assert "code 7" in shown.said
    shown = kernel.run(gpu("import ctypes\nctypes.string_at(0)"))
    assert shown.error == "GpuSessionEnded"
    assert "signal 11" in shown.said


# --- interrupts


def test_interrupted(kernel: Kernel, shared_lab: Lab) -> None:
    kernel.fine(gpu("stays = (i for i in range(3))"))
    lease_id = shared_lab.lease_id()
    begin(
        kernel,
        "import time\ncount = 0\nprint('under way')\nwhile True:\n    count += 1\n    time.sleep(0.01)",
    )
    time.sleep(0.3)
    kernel.interrupt()
    shown = kernel.finish()
    assert shown.error == "KeyboardInterrupt"
    assert "time.sleep(0.01)" in shown.trace
    assert int(kernel.value("count")) > 0  # what it did so far is there, as after a normal cell
    assert shared_lab.lease_id() == lease_id  # and so is the GPU
    assert kernel.fine(gpu("next(stays)")).result == "0"


def test_interrupted_twice_when_the_cell_does_not_listen(kernel: Kernel) -> None:
    code = """
import time
print('under way')
while True:
    try: time.sleep(60)
    except KeyboardInterrupt: print('no')
"""
    begin(kernel, code)
    kernel.interrupt()
    kernel.finish(until=lambda s: "no" in s.stdout)
    kernel.interrupt()
    shown = kernel.finish()
    assert shown.error == "KeyboardInterrupt"
    assert kernel.fine(gpu("3")).result == "3"


# --- keeping


def test_kept_names_go_on_after_a_loss_as_if_nothing_had_happened(kernel: Kernel, shared_lab: Lab) -> None:
    train = "while step < 400:\n    weights += np.random.rand(4)\n    step += 1\n    if slow: time.sleep(0.005)\n    if step == 40: print('under way')"
    fresh = "import numpy as np, time\nnp.random.seed(7)\nweights, step, slow = np.zeros(4), 0, {}"
    kernel.fine(fresh.format("False"))
    kernel.fine(gpu(train))
    kernel.fine("whole = weights.copy()")
    kernel.fine(fresh.format("True"))
    begin(kernel, train, "--keep weights,step --every 50ms")
    time.sleep(0.3)
    shared_lab.revoke()  # at once: nothing can be saved any more
    shown = kernel.finish()
    assert shown.error == "GpuSessionEnded"
    assert "Saved: weights, step at " in shown.said
    first = int(kernel.value("step"))
    assert 0 < first < 400
    shown = kernel.run(gpu(train, "--keep weights,step --every 50ms"))
    assert shown.status == "ok", shown.trace
    assert kernel.value("step, (weights == whole).all()") == "(400, np.True_)"


def test_with_grace_nothing_is_done_twice(kernel: Kernel, shared_lab: Lab) -> None:
    """The cell stops at a point where it has saved: what it printed and what is kept agree."""
    kernel.fine("import time\nn = 0")
    first = begin(
        kernel,
        "while n < 1000:\n    n += 1\n    print(n)\n    if n == 20: print('under way')\n    time.sleep(0.005)",
        "--keep n --every 1h",
    )
    shared_lab.revoke(grace_s=20.0)
    began = time.monotonic()
    shown = kernel.finish()
    assert time.monotonic() - began < SOON
    assert shown.error == "GpuSessionEnded"
    numbers = [int(x) for x in (first.stdout + shown.stdout).split() if x.isdigit()]
    assert int(kernel.value("n")) == numbers[-1]


def test_a_failed_checkpoint_fails_the_cell(kernel: Kernel) -> None:
    shown = kernel.run(gpu("handle = (i for i in [])", "--keep handle"))
    assert shown.error == "NotDurable"
    assert "handle" in shown.said
    shown = kernel.run(gpu("1", "--keep nowhere"))
    assert shown.error == "NotDurable"
    assert "nowhere" in shown.said
    kernel.fine(gpu("fine = 1", "--keep fine"))


def test_what_was_saved_is_called_saved_also_when_nothing_new_was_written(kernel: Kernel) -> None:
    kernel.fine("import numpy as np\nsame, turn = np.ones(64), 0")
    for _ in range(2):
        assert " · saved" in kernel.fine(gpu("turn += 1", "--keep same,turn")).line


def test_what_is_only_in_the_worker_is_not_called_saved(kernel: Kernel) -> None:
    kernel.fine("stream = 0")
    shown = kernel.run(gpu("stream = (i for i in range(3))", "--keep stream"))
    assert shown.error == "NotDurable"
    assert "stream (cannot pickle" in shown.said
    assert "only in the GPU worker" in shown.said
    assert "saved" not in shown.line


def test_a_store_that_refuses_fails_the_cell_and_says_what_was_kept(kernel: Kernel, shared_lab: Lab) -> None:
    kernel.fine(gpu("good = 1", "--keep good"))
    store = shared_lab.home.settings.home / "store"
    assert store.is_dir(), list(shared_lab.home.settings.home.iterdir())
    aside = store.rename(store.with_name("aside"))
    store.write_text("in the way")
    try:
        shown = kernel.run(gpu("good = 2", "--keep good"))
        assert shown.error == "NotDurable"
        assert "not saved" in shown.said
    finally:
        store.unlink()
        aside.rename(store)
    kernel.fine(gpu("good = 3", "--keep good"))


def test_sublet_keep_names_the_point(kernel: Kernel, shared_lab: Lab) -> None:
    """A function that trains says where everything agrees; the cell's own loop is not taken for it then."""
    kernel.fine(
        "import sublet, time\nstate = {'a': 0, 'b': 0}\n"
        "def train(state):\n"
        "    while state['a'] < 500:\n"
        "        state['a'] += 1\n"
        "        time.sleep(0.002)\n"
        "        state['b'] += 1\n"
        "        if state['a'] == 30: print('under way')\n"
        "        sublet.keep()\n"
    )
    begin(kernel, "train(state)", "--keep state --every 20ms")
    time.sleep(0.2)
    shared_lab.revoke()
    assert kernel.finish().error == "GpuSessionEnded"
    assert kernel.value("state['a'] == state['b'] and 0 < state['a'] < 500") == "True"


def test_restored_in_another_kernel(kernel: Kernel, shared_lab: Lab) -> None:
    kernel.fine(
        gpu(
            "import numpy as np\nkept_array, kept_dict = np.arange(3), {'epoch': 4}",
            "--keep kept_array,kept_dict",
        )
    )
    panel = kernel.fine("%gpu").texts[0]
    job = next(line.split(" of ")[-1] for line in panel.splitlines() if line.startswith("kept"))
    other = shared_lab.kernel("other")
    shown = other.fine(f"%gpu restore {job}")
    assert "kept_array" in shown.texts[0]
    assert other.value("kept_array.tolist(), kept_dict") == "([0, 1, 2], {'epoch': 4})"
    other.close()


# --- the ledger


def test_a_ledger_that_is_gone_is_said_in_a_sentence(kernel: Kernel, shared_lab: Lab) -> None:
    other = shared_lab.kernel("far", load=False, SUBLET_LEDGER="postgresql://127.0.0.1:1/nowhere")
    other.fine("%load_ext sublet")
    other.fine("mine = 5")
    shown = other.run(gpu("mine"))
    assert shown.error == "GpuUnavailable"
    assert shown.said.startswith("GPU unavailable: ")
    assert "sublet doctor" in shown.trace
    assert other.value("mine") == "5"
    other.close()


def test_a_ledger_that_stops_answering_under_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder stops first (L6, L7): warned before, ended at its own deadline, with nobody to ask."""
    need(find_binaries() is not None, "a PostgreSQL server")
    server = PostgresServer()
    server.start()
    lab = open_lab(
        tmp_path,
        monkeypatch,
        devices="host:1x4GiB",
        ledger=f"{server.url}&sublet_schema=t{uuid.uuid4().hex[:8]}",
    )
    try:
        kernel = lab.kernel()
        kernel.fine("mine = [1]")
        begin(kernel, SLEEPS, "--ttl 3s")
        server.crash()
        shown = kernel.finish()
        assert "GPU session may end in" in shown.stderr
        assert shown.error == "GpuSessionEnded"
        assert kernel.value("mine") == "[1]"
        server.start()
        assert kernel.fine(gpu("mine")).result == "[1]"
    finally:
        lab.close()
        server.stop()


# --- the bill


def test_the_lines_add_up_to_the_ledgers_usage_exactly(kernel: Kernel, shared_lab: Lab) -> None:
    for code in ("1", "import time; time.sleep(0.2)", "1/0"):
        kernel.run(gpu(code))
    begin(kernel, SLEEPS)
    shared_lab.revoke()
    kernel.finish()
    kernel.fine(gpu("2", "--ttl 30s"))
    kernel.fine("%gpu release")
    kernel.fine("from sublet.notebook.extension import bench_of\nbench = bench_of(get_ipython())")
    found = eval(kernel.value("{i: bench.cells.account.gpu_us(i) for i in bench.cells.account.leases()}"))
    assert len(found) > 3
    rows = {a.lease.id: a.lease for a in shared_lab.all_leases()}
    assert found == {lease_id: of_ended(rows[lease_id]).gpu_us for lease_id in found}
    text = kernel.fine("%gpu cost").texts
    assert "to the microsecond" in text[-1]


def test_a_lease_that_ends_while_the_bill_is_written_is_on_the_next_one(kernel: Kernel) -> None:
    kernel.fine(gpu("1"))
    kernel.fine(
        "from sublet.notebook.extension import bench_of\ncells = bench_of(get_ipython()).cells\nsettle = cells.settle_account\n"
        "def and_then_it_ends():\n    settle()\n    cells.lease.release()\n"
        "cells.settle_account = and_then_it_ends"
    )
    bill = kernel.fine("%gpu cost").texts[-1]
    assert "tell us" not in bill
    assert "A lease ended just now" in bill
    kernel.fine("del cells.settle_account")
    bill = kernel.fine("%gpu cost").texts[-1]
    assert "to the microsecond" in bill
    assert "just now" not in bill


def test_the_journal_verifies(shared_lab: Lab) -> None:
    assert open_ledger(shared_lab.home.settings).verify().faults == ()
