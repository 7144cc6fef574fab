"""One machine, two ledgers that do not know of each other, and one physical GPU."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sublet.devices.device_locks import lock_folder
from sublet.leases.warden import warden_process
from sublet.settings import load_settings
from tests.devices.cuda_shim import Shim
from tests.homes import wait_until

ASK = ("-m", "sublet", "lease", "acquire", "--vram", "64MiB", "--exclusivity", "device", "--json")


@dataclass
class Machine:
    """A machine with one GPU, which no other test has."""

    shim: Shim
    folder: Path
    uuids: int

    def environment(self, home: str, ledger: str = "") -> dict[str, str]:
        where = self.folder / home
        values = {
            "SUBLET_HOME": str(where),
            "SUBLET_LEDGER": ledger or f"sqlite:{where}/ledger.db",
            "SUBLET_DEVICES": "cuda:all",
            "SUBLET_HOST": "box",
        }
        return self.shim.env(devices=1, uuids=self.uuids, **values)

    def sublet(self, home: str, *command: str, ledger: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            env=self.environment(home, ledger),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def warden_pid(self, home: str) -> int:
        where = self.folder / home
        settings = load_settings(home=str(where), ledger=f"sqlite:{where}/ledger.db", host="box")
        return warden_process.warden_state(settings)[2]


@pytest.fixture
def machine(shim: Shim, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(shim, tmp_path, secrets.randbits(63) | 1)
    try:
        yield made
    finally:
        for lock in tmp_path.glob("*/warden-*.lock"):
            pid = int(lock.read_text().split()[0])
            with_pid = Path(f"/proc/{pid}/cmdline")
            if with_pid.exists() and b"warden" in with_pid.read_bytes():
                os.kill(pid, 9)
        for path in lock_folder().glob("sublet-GPU-*.lock"):
            if path.read_text().partition('"home": "')[2].startswith(str(tmp_path)):
                path.unlink()


def test_a_second_ledger_is_refused_and_told_who_has_the_gpu(machine: Machine) -> None:
    """I3: two homes of one user; the second asks and waits as long as it takes, and is refused at once."""
    first = machine.sublet("ada", *ASK)
    assert first.returncode == 0, first.stderr
    second = machine.sublet("ben", *ASK, "--wait", "1h")
    assert second.returncode == 75, second.stdout + second.stderr
    words = second.stdout + second.stderr
    assert "device_taken" in words
    assert f"home {machine.folder}/ada, warden pid {machine.warden_pid('ada')}" in words
    assert "SUBLET_LEDGER" in words
    (row,) = json.loads(machine.sublet("ben", "-m", "sublet", "gpus", "--json").stdout)
    assert row["state"] == "taken"
    assert str(machine.folder / "ada") in row["note"]
    cleared = machine.sublet("ben", "-m", "sublet", "quarantine", "clear", row["id"])
    assert cleared.returncode != 0
    doctor = json.loads(machine.sublet("ben", "-m", "sublet", "doctor", "--json").stdout)
    (seen,) = [c for c in doctor["checks"] if c["part"] == "device lock"]
    assert seen["status"] == "warn"
    assert str(machine.folder / "ada") in seen["seen"]
    assert "SUBLET_LEDGER" in seen["remedy"]
    # Its lease ends with its warden: the kernel gives the device to whoever asks next.
    os.kill(machine.warden_pid("ada"), 9)
    again: list[subprocess.CompletedProcess[str]] = []

    def granted() -> bool:
        again.append(machine.sublet("ben", *ASK))
        return again[-1].returncode == 0

    wait_until(granted)
    doctor = json.loads(machine.sublet("ben", "-m", "sublet", "doctor", "--json").stdout)
    (seen,) = [c for c in doctor["checks"] if c["part"] == "device lock"]
    assert (seen["status"], str(machine.folder / "ben") in seen["seen"]) == ("ok", True)
    refused = machine.sublet("ada", *ASK)
    assert "device_taken" in refused.stdout + refused.stderr


def test_two_homes_of_one_ledger_share_the_gpu(machine: Machine) -> None:
    """I3: they know of each other, so the ledger decides and not the lock."""
    shared = f"sqlite:{machine.folder}/shared/ledger.db"
    for home in ("ada", "ben"):
        share = [part if part != "device" else "shared" for part in ASK]
        done = machine.sublet(home, *share, ledger=shared)
        assert done.returncode == 0, done.stderr
