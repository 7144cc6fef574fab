"""A canary written by one tenant is never read by the next (K1, threat 16): whole leases, on a device whose memory stays dirty.

The device is the pretended NVIDIA driver, which hands memory out as its last owner left it. 6 handovers here,
`SUBLET_HANDOVERS=100` in `make proof`, where `tests/devices` also does 1,000 below the lease.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from sublet import wiring
from sublet.core.scheduling.device import DeviceState
from tests.devices.cuda_shim import Shim
from tests.homes import close_home, make_home

TURNS = int(os.environ.get("SUBLET_HANDOVERS", "60")) // 10
CAPACITY = 4 << 20

pytestmark = [pytest.mark.storm, pytest.mark.timeout(TURNS * 10 + 120)]

#: Imports once and forks a tenant per turn. A tenant leases the device, takes memory as the device gives it, says how much of it
#: is somebody's, writes over all of it and is killed.
TENANTS = """
import json, os, sys
import cuda.bindings.driver as raw
import sublet

SIZE = {size}

def do(verb, *args):
    code, *values = getattr(raw, verb)(*args)
    assert int(code) == 0, (verb, code)
    return values[0] if values else None

def tenant(turn):
    lease = sublet.gpu(vram=SIZE, ttl="30s", exclusivity="device", wait="60s").acquire()
    do("cuInit", 0)
    do("cuCtxCreate", None, 0, 0)
    at, seen = do("cuMemAlloc", SIZE), bytearray(SIZE)
    do("cuMemcpyDtoH", seen, at, SIZE)
    do("cuMemsetD8", at, 1 + turn % 250, SIZE)
    found = [b for b in set(seen) if b not in (0, 0xA5)]
    print(json.dumps([lease.id, sum(seen.count(b) for b in found)]), flush=True)
    os.kill(os.getpid(), 9)

for turn in range({turns}):
    if os.fork() == 0:
        try:
            tenant(turn)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    os.wait()
"""


def hand_over(
    shim: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int, **settings: str
) -> tuple[list[int], list[int], list[DeviceState]]:
    """What each tenant saw of others, what each teardown scrubbed, and the devices afterwards."""
    home = make_home(tmp_path, f"sqlite:{tmp_path}/home/ledger.db", monkeypatch, "cuda:all")
    plain = {k: v for k, v in home.environment.items() if k.startswith("SUBLET_")}
    environment = shim.env(memory=CAPACITY, devices=1, uuids=secrets.randbits(63), **plain, **settings)
    monkeypatch.setenv("SUBLET_DEVICES", "host:1x1GiB")  # this process has no such driver
    try:
        done = subprocess.run(
            [sys.executable, "-c", TENANTS.format(turns=turns, size=CAPACITY - (256 << 10))],
            env=environment,
            capture_output=True,
            text=True,
            timeout=turns * 10 + 60,
            check=False,
        )
        seen = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(seen) == turns, done.stderr
        ledger = wiring.open_ledger(home.settings)
        receipts = {t.lease_id: t.receipt for t in ledger.receipts(limit=2 * turns)}
        # The last one's teardown may still be under way; each of the others had to be over before the next began.
        scrubbed = [receipts[lease_id].scrubbed_bytes for lease_id, _ in seen[:-1]]
        assert all(receipts[lease_id].proven for lease_id, _ in seen[:-1]) or settings
        return [found for _, found in seen], scrubbed, [d.state for d in ledger.devices()]
    finally:
        close_home(home)


def test_no_tenant_reads_another_s_memory(
    shim: Shim,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, scrubbed, devices = hand_over(shim, tmp_path, monkeypatch, max(3, TURNS))
    assert seen == [0] * len(seen)
    assert all(size >= CAPACITY - (256 << 10) for size in scrubbed)
    assert devices == [DeviceState.READY]
    assert not [line for line in shim.log.read_text().splitlines() if line.startswith("FAULT")]
