"""A Slurm of our own: Debian's munged, slurmctld and a slurmd for each node, all on this machine, in one folder, ended with the test."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.free_ports import free_port

#: What stands for a GPU: Slurm wants a device file for each, and gives its number.
DEVICES = ("/dev/null", "/dev/zero")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")


def installed() -> bool:
    """And may it run: its daemons want to be root."""
    return os.geteuid() == 0 and all(shutil.which(name, path=_path()) for name in NEEDED)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    folder: Path
    nodes: tuple[str, ...]
    environment: dict[str, str]

    def ask(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command,
            env=self.environment | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, *arguments: str, **environment: str) -> str:
        """The job's number; what it prints goes to `output(number)`."""
        said = self.ask("sbatch", "--parsable", f"--output={self.folder}/out-%j", *arguments, **environment)
        return said.strip().split(";")[0]

    def output(self, job: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"out-{job}").read_text()
        return ""

    def state(self, job: str) -> str:
        found = dict(
            part.split("=", 1)
            for part in self.ask("scontrol", "-o", "show", "job", job).split()
            if "=" in part
        )
        return found["JobState"]

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.folder.glob("*.log")))


def _configuration(folder: Path, nodes: tuple[str, ...]) -> str:
    controller, *ports = [free_port() for _ in range(1 + len(nodes))]
    rows = "\n".join(
        f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2048 "
        "Gres=gpu:2 State=UNKNOWN"
        for name, port in zip(nodes, ports, strict=True)
    )
    return f"""
ClusterName=sublet
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
KillWait=20
PlugStackConfig=/dev/null
{rows}
PartitionName=all Nodes={",".join(nodes)} Default=YES MaxTime=INFINITE State=UP OverTimeLimit=0
"""


@contextlib.contextmanager
def running(folder: Path, nodes: tuple[str, ...] = ("n1", "n2")) -> Iterator[Slurm]:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    for name in ("state", *(f"spool-{n}" for n in nodes)):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(_configuration(folder, nodes))
    (folder / "gres.conf").write_text(
        "AutoDetect=off\n"
        + "".join(f"NodeName={n} Name=gpu File={device}\n" for n in nodes for device in DEVICES)
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SUBLET_", "SLURM"))} | {
        "SLURM_CONF": f"{folder}/slurm.conf",
        "PATH": _path(),
    }
    daemons = [
        [
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munge.pid",
            f"--seed-file={folder}/munge.seed",
            f"--log-file={folder}/munge.log",
        ],
        ["slurmctld", "-D", "-c"],
        *(["slurmd", "-D", "-N", name] for name in nodes),
    ]
    slurm = Slurm(folder=folder, nodes=nodes, environment=environment)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            started.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                )
            )
            if command[0] == "munged":
                _until(lambda: (folder / "munge.socket").exists(), slurm)
        _until(lambda: _idle(slurm) == len(nodes), slurm)
        yield slurm
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _idle(slurm: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%T"], env=slurm.environment, capture_output=True, text=True, timeout=30
    )
    return done.stdout.split().count("idle")


def _until(fact: object, slurm: Slurm, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not fact():  # type: ignore[operator]
        assert time.monotonic() < give_up, f"Slurm did not start\n{slurm.logs()}"
        time.sleep(0.1)
