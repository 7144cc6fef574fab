"""A lease whose worker is a tenant's: sealed calls under it, a GPU inside, and what its end says and leaves."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

import sublet
from sublet import wiring
from sublet.core.errors import LeaseLost, WorkerLost
from sublet.core.leasing.lease import EndReason
from sublet.core.studio.isolation import HIDDEN_HOME
from sublet.leases import sessions
from sublet.leases.lease import WATCHDOG_US, Lease
from sublet.leases.request import GpuRequest
from sublet.processes.sandbox import containment
from sublet.processes.sandbox.tenant_sandbox import TenantSandbox
from sublet.processes.worker.local import LocalWorker
from tests.homes import Home, process_is_gone, wait_until
from tests.processes.test_sealed import Heard

LAUNCH = """
import sublet
with sublet.lease().open() as gpu:
    module = gpu.load("def noop(total): pass")
    for _ in range(3):
        gpu.launch(module, "noop", grid=(1,), block=(1,), args=[])
print(sublet.lease().id)
"""


@pytest.fixture
def lease(sqlite_home: Home) -> Iterator[Lease]:
    settings = sqlite_home.settings
    asked = GpuRequest(
        settings,
        sublet.gpu(vram="1GiB", ttl="30s").request,
        holder="worker",
        on_wait=None,
        on_offer=None,
        start=lambda: wiring.workers(settings, TenantSandbox(number=3)).start(),
    )
    made = asked.acquire()
    yield made
    made.release()


def run(lease: Lease, source: str, sink: Heard | None = None) -> tuple[bool, dict[str, Any]]:
    order = json.dumps({"code": source, "name": "cell"}).encode()
    fine, (answer,) = lease.run_sealed("sublet.processes.worker.sealed_calls:code", [order], sink or Heard())
    return fine, json.loads(bytes(answer))


def worker_of(lease: Lease) -> LocalWorker:
    assert isinstance(lease._worker, LocalWorker)
    return lease._worker


def test_source_under_a_lease_opens_its_gpu_and_its_launches_are_counted(
    sqlite_home: Home, lease: Lease
) -> None:
    opening = asdict(sessions.opening_of(sqlite_home.settings, lease, 0, WATCHDOG_US))
    assert lease.run_sealed(
        "sublet.leases.current:set_openings_sealed", [json.dumps([opening]).encode()], Heard()
    ) == (True, [])
    sink = Heard()
    assert run(lease, LAUNCH, sink) == (True, {"launches": 3})
    assert sink.of("stdout").strip() == lease.id
    assert lease.launches == 3
    if containment.namespaces_work():
        assert HIDDEN_HOME in lease.containment


def test_a_lease_is_busy_while_a_sealed_call_runs_and_may_be_interrupted(lease: Lease) -> None:
    busy: list[bool] = []

    def began(text: str) -> None:
        busy.append(lease.busy)
        threading.Thread(target=lease.interrupt).start()

    fine, told = run(
        lease, "import time\nprint('began')\nfor _ in range(3000): time.sleep(0.01)", Heard(on_text=began)
    )
    assert (fine, told["kind"], busy) == (False, "KeyboardInterrupt", [True])
    assert not lease.busy
    assert run(lease, "1") == (True, {"launches": 0})


def test_the_ledgers_reason_explains_a_lost_sealed_call(sqlite_home: Home, lease: Lease) -> None:
    def revoke(text: str) -> None:
        wiring.open_ledger(sqlite_home.settings).revoke(
            lease.id, reason=EndReason.REVOKED, grace_us=0, detail="the machine is needed", actor="operator"
        )

    with pytest.raises(WorkerLost, match="the machine is needed"):
        run(lease, "import time\nprint('began')\ntime.sleep(60)", Heard(on_text=revoke))
    with pytest.raises(LeaseLost):
        run(lease, "1")
    wait_until(lambda: not os.path.exists(worker_of(lease).scratch))


def test_a_killed_worker_ends_its_lease_and_its_scratch(sqlite_home: Home, lease: Lease) -> None:
    worker = worker_of(lease)
    with pytest.raises(WorkerLost):
        run(lease, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert process_is_gone(worker.worker_pid)
    wait_until(lambda: wiring.open_ledger(sqlite_home.settings).look(lease.id).lease.settled_at)
    wait_until(lambda: not os.path.exists(worker.scratch))


def test_a_killed_supervisor_ends_its_lease_and_its_scratch(sqlite_home: Home, lease: Lease) -> None:
    worker = worker_of(lease)
    os.kill(worker.holder.pid, signal.SIGKILL)
    with pytest.raises((WorkerLost, LeaseLost)):  # the warden may have been quicker than the call
        run(lease, "import time\ntime.sleep(60)")
    wait_until(lambda: wiring.open_ledger(sqlite_home.settings).look(lease.id).lease.settled_at)
    wait_until(lambda: not os.path.exists(worker.scratch))
