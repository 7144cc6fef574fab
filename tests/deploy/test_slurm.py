"""An allocation of a real Slurm as capacity: its nodes' devices are leased while it lasts, and given back before it ends.

Runs where SUBLET_DEPLOY_ROUNDS says how often (`make proof`), as root, with Debian's slurm-wlm: a time limit is a minute at least.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sublet.core.leasing.lease import LeaseState
from sublet.core.leasing.tenancy import Tenant
from sublet.core.scheduling.device import DeviceState
from sublet.ledger.engines.postgres.engine import open_ledger
from sublet.processes.clock import HostClock
from tests.conftest import need, repository
from tests.deploy import slurm
from tests.homes import wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = repository("deploy/slurm")
ROUNDS = int(os.environ.get("SUBLET_DEPLOY_ROUNDS", "0"))

pytestmark = [
    pytest.mark.skipif(not ROUNDS, reason="SUBLET_DEPLOY_ROUNDS is not set"),
    pytest.mark.timeout(400),
]

#: Holds until it is told, and says what it was told.
TOLD = """
    import sublet, time
    with sublet.gpu(vram="64MiB", ttl="1m") as lease:
        print("held", lease.id, lease.devices[0], flush=True)
        while lease.notice is None:
            time.sleep(0.02)
        print("told", lease.notice.reason, flush=True)
"""


@dataclass
class Site:
    slurm: slurm.Slurm
    ledger: Any
    environment: dict[str, str]
    home: Path

    def capacity(self, *arguments: str, **environment: str) -> str:
        return self.slurm.submit(*arguments, **self.environment, **environment)

    def states(self) -> dict[str, DeviceState]:
        return {d.id: d.state for d in self.ledger.devices()}

    def log(self, node: str, job: str) -> str:
        path = self.home / node / f"warden-{job}.log"
        return path.read_text() if path.exists() else ""

    def beside(self, job: str, node: str, code: str) -> subprocess.Popen[str]:
        """A program of the user's on a node of the allocation, as the how-to says."""
        return subprocess.Popen(
            [
                "srun",
                f"--jobid={job}",
                "--overlap",
                f"--nodelist={node}",
                "--ntasks=1",
                "--unbuffered",
                str(DEPLOY / "node.sh"),
                "exec",
                sys.executable,
                "-uc",
                textwrap.dedent(code),
            ],
            env=self.slurm.environment | self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def until(self, job: str, fact: Any, seconds: float = 60) -> None:
        try:
            wait_until(fact, seconds)
        except AssertionError:
            words = [self.slurm.state(job), self.slurm.output(job), str(self.states())]
            raise AssertionError("\n".join([*words, *(self.log(n, job) for n in self.slurm.nodes)])) from None

    def over(self, job: str, seconds: float = 60) -> str:
        going = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        self.until(job, lambda: self.slurm.state(job) not in going, seconds)
        return self.slurm.state(job)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    need(slurm.installed(), "slurm-wlm, as root,")
    with slurm.running(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def site(cluster: slurm.Slurm, postgres_server: Any, tmp_path: Path) -> Iterator[Site]:
    url = f"{postgres_server.url}&sublet_schema=s{uuid.uuid4().hex[:12]}"
    ledger = open_ledger(url, HostClock())
    ledger.add_tenant(Tenant(name="ada"), actor="test")
    home = Path(f"/tmp/sl-{uuid.uuid4().hex[:8]}")  # sockets lie in it: a short path
    environment = {
        "SUBLET_LEDGER": url,
        "SUBLET_TENANT": "ada",
        "SUBLET_PRELOAD": "none",
        "SUBLET_NODE_HOME": str(home),
        "SUBLET_DRAIN": "15s",
        "PATH": f"{Path(sys.executable).parent}:{cluster.environment['PATH']}",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    yield Site(cluster, ledger, environment, home)
    for job in cluster.ask("squeue", "-h", "-o", "%i").split():
        cluster.ask("scancel", "--signal=KILL", "--full", job)
    wait_until(lambda: not cluster.ask("squeue", "-h", "-o", "%i").split(), 60)
    ledger.close()
    subprocess.run(["rm", "-rf", str(home)], check=True)


@pytest.mark.parametrize("again", range(ROUNDS))
def test_before_the_time_limit_every_node_is_given_back(site: Site, again: int) -> None:
    """It ends as completed, not as timed out: nothing was cut off."""
    job = site.capacity("--nodes=2", "--mem=1024", "--time=1", f"{DEPLOY}/capacity.sbatch")
    both = {"n1-host0": DeviceState.READY, "n2-host0": DeviceState.READY}
    site.until(job, lambda: site.states() == both)
    assert {d.capacity_bytes for d in site.ledger.devices()} == {1 << 30}
    holder = site.beside(job, "n2", TOLD)
    word, lease_id, device = holder.stdout.readline().split()
    assert (word, device) == ("held", "n2-host0")
    assert "time limit" in holder.stdout.readline()
    assert site.over(job, 120) == "COMPLETED"
    holder.wait(timeout=30)
    lease = site.ledger.look(lease_id).lease
    assert (lease.state, bool(lease.settled_at)) == (LeaseState.ENDED, True)
    assert set(site.states().values()) == {DeviceState.LOST}
    for node in ("n1", "n2"):
        assert "left clean" in site.log(node, job), site.log(node, job)
    assert not site.ledger.verify().faults


def test_a_cancelled_allocation_tells_its_holders_and_leaves_clean(site: Site) -> None:
    job = site.capacity("--nodes=1", "--mem=512", "--time=10", f"{DEPLOY}/capacity.sbatch")
    site.until(job, lambda: list(site.states().values()) == [DeviceState.READY])
    [node] = {d.host for d in site.ledger.devices()}
    holder = site.beside(job, node, TOLD)
    lease_id = holder.stdout.readline().split()[1]
    site.slurm.ask("scancel", job)
    assert site.over(job) == "CANCELLED"
    wait_until(lambda: "left clean" in site.log(node, job))
    assert site.ledger.look(lease_id).lease.settled_at
    assert set(site.states().values()) == {DeviceState.LOST}
    holder.wait(timeout=30)
    assert not site.ledger.verify().faults


def test_the_gpus_slurm_gave_are_registered_and_no_others(
    site: Site, shim_libraries: Path, tmp_path: Path
) -> None:
    """Fake GRES, the real driver for CUDA, and libraries that pretend to be NVIDIA's: of three GPUs in the machine the job has two."""
    (tmp_path / "state").mkdir()
    job = site.capacity(
        "--nodes=1",
        "--nodelist=n1",
        "--gpus-per-node=2",
        "--time=10",
        f"{DEPLOY}/capacity.sbatch",
        LD_LIBRARY_PATH=str(shim_libraries),
        SHIM_STATE=str(tmp_path / "state"),
        SHIM_DEVICES="3",
        SHIM_UUIDS=str(secrets.randbits(63)),
    )
    site.until(job, lambda: len(site.states()) == 2)
    assert sorted((d.host, d.driver, d.ordinal) for d in site.ledger.devices()) == [
        ("n1", "cuda", 0),
        ("n1", "cuda", 1),
    ]
    site.slurm.ask("scancel", job)
    assert site.over(job) == "CANCELLED"


def test_with_a_command_the_allocation_ends_with_it(site: Site, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("def double(item):\n    return {'is': item['n'] * 2}\n")
    site.ledger.add_tenant(Tenant(name="root"), actor="test", exist_ok=True)
    environment = site.slurm.environment | site.environment | {"SUBLET_HOME": str(tmp_path / "home")}
    lines = "".join(f'{{"n": {i}}}\n' for i in range(20))
    done = subprocess.run(
        [sys.executable, "-m", "sublet", "queue", "publish", "numbers", "--jsonl", "--file", "-"],
        input=lines,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    job = site.capacity(
        "--nodes=2",
        "--mem=512",
        "--time=10",
        f"{DEPLOY}/capacity.sbatch",
        "sublet",
        "work",
        "numbers",
        f"{tmp_path}/work.py:double",
        "--vram=64MiB",
        "--until-empty",
        "--exit-profile=slurm",
    )
    assert site.over(job) == "COMPLETED", site.slurm.output(job)
    shown = subprocess.run(
        [sys.executable, "-m", "sublet", "queue", "show", "numbers", "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert '"done": 20' in shown.stdout, shown.stdout + shown.stderr
    assert set(site.states().values()) == {DeviceState.LOST}


def test_a_ledger_in_a_file_is_refused(site: Site) -> None:
    job = site.slurm.submit(
        "--nodes=1", f"{DEPLOY}/capacity.sbatch", **site.environment | {"SUBLET_LEDGER": "sqlite:/tmp/x.db"}
    )
    assert site.over(job) == "FAILED"
    assert "a file is for one machine" in site.slurm.output(job)
