"""A real Ray cluster on this machine: `ray start` nodes on loopback, each with a home, a name and devices of
its own.

Every process of a node carries a mark in its environment, whoever started it: a node is killed, frozen and
ended by the pids that carry its mark, so that nothing of it is left behind and no other process is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "CLUSTER_NODE_MARK"
#: Ray takes 127.0.0.1 for a mistake and listens on every interface; these are for a machine of its own.
ON_LOOPBACK = """
import ray._private.services as services
services.resolve_ip_for_localhost = lambda host: host
services.get_node_ip_address = lambda address=None: "127.0.0.1"
from ray.scripts.scripts import main
main()
"""
#: As docs/how-to/run-on-ray.md says.
HEALTH = (
    '{"health_check_initial_delay_ms":0,"health_check_period_ms":500,'
    '"health_check_timeout_ms":1000,"health_check_failure_threshold":3}'
)
#: The same for a machine on which a second of silence is usual: a frozen node is missed after fifteen
#: seconds.
PATIENT = (
    '{"health_check_initial_delay_ms":5000,"health_check_period_ms":1000,'
    '"health_check_timeout_ms":4000,"health_check_failure_threshold":3}'
)
START_SECONDS = 240
#: Ray has an environment of its own, made by the Makefile.
PYTHON = os.environ.get("SUBLET_RAY_PYTHON") or str(Path(sys.prefix) / "ray" / "bin" / "python")
#: Ray's own token: whoever cannot show it runs nothing there.
AUTH = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
#: With it, Ray's own drivers stay on loopback too.
DRIVER = AUTH | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def marked(mark: str) -> list[int]:
    """The processes that carry it."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


@dataclass
class Node:
    host: str
    home: Path
    mark: str
    command: list[str]
    environment: dict[str, str]

    def start(self) -> subprocess.Popen[bytes]:
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / "ray-start.log").open("ab") as log:
            return subprocess.Popen(
                [PYTHON, "-c", ON_LOOPBACK, "start", *self.command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )

    def pids(self) -> list[int]:
        return marked(self.mark)

    def signal(self, number: int) -> list[int]:
        """To all of them, until nobody new is found: a process may be starting another."""
        told: set[int] = set()
        for _ in range(20):
            fresh = [pid for pid in self.pids() if pid not in told]
            if not fresh:
                break
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                told.add(pid)
        return sorted(told)

    def kill(self) -> None:
        """Kill it as a loss of power would."""
        deadline = time.monotonic() + 20
        while self.pids() and time.monotonic() < deadline:
            self.signal(signal.SIGKILL)
            time.sleep(0.05)

    def freeze(self) -> list[int]:
        return self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def said(self) -> str:
        with contextlib.suppress(OSError):
            return (self.home / "ray-start.log").read_text(errors="replace")[-2000:]
        return ""


class RayDriver:
    def __init__(self, environment: dict[str, str], code: str, args: tuple[str, ...]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this)
        self.process = subprocess.Popen(
            [PYTHON, "-u", "-c", code, *args],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd="/",
        )

    def __enter__(self) -> RayDriver:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON lines it prints until it ends, which must be with exit code 0."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        code = self.process.wait(60)
        assert code == 0, f"the driver ended with {code}: {self.errors()}"

    def all(self) -> dict[str, Any]:
        """Everything it said, in one."""
        return {name: value for line in self.said() for name, value in line.items()}

    def errors(self) -> str:
        number = self._errors.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")[-4000:]


@dataclass
class Cluster:
    address: str
    folder: Path
    ledger: str
    nodes: list[Node] = field(default_factory=list)

    @property
    def placement(self) -> str:
        return f"ray://{self.address}"

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a driver, without that of any node."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SUBLET_", "RAY_"))}
        return (
            kept
            | DRIVER
            | {
                "SUBLET_HOME": str(self.folder / "driver"),
                "SUBLET_HOST": "driver",
                "SUBLET_LEDGER": self.ledger,
                "SUBLET_PLACEMENT": self.placement,
                "SUBLET_PRELOAD": "none",
                **more,
            }
        )

    def driver(self, code: str, *args: str, **environment: str) -> RayDriver:
        """A real process running this code, with this cluster as its placement."""
        return RayDriver(self.environment(**environment), textwrap.dedent(code), args)

    def node(self, host: str) -> Node:
        return next(node for node in self.nodes if node.host == host)

    def stop(self) -> None:
        for node in self.nodes:
            with contextlib.suppress(Exception):
                node.resume()
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start_cluster(ledger: str, hosts: Mapping[str, str], *, health: str = "") -> Cluster:
    """One node per host, with these SUBLET_DEVICES; the first is the head. `health` sets how Ray detects lost
    nodes, if not by its defaults: with HEALTH a busy machine may lose a node that is only slow."""
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    cluster = Cluster(f"127.0.0.1:{_free_port()}", folder, ledger)
    usual = ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--object-store-memory=200000000"]
    usual += ['--resources={"sublet": 1}', "--disable-usage-stats"]
    for number, (host, devices) in enumerate(hosts.items()):
        port = cluster.address.partition(":")[2]
        where = [f"--address={cluster.address}"]
        if number == 0:
            where = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/t"]
            where += [f"--system-config={health}"] if health else []
        mark = secrets.token_hex(8)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SUBLET_", "RAY_"))} | {
            MARK: mark,
            "SUBLET_HOST": host,
            "SUBLET_HOME": str(folder / host),
            "SUBLET_DEVICES": devices,
            "SUBLET_PRELOAD": "none",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": str(START_SECONDS),
            "RAY_agent_register_timeout_ms": str(
                START_SECONDS * 1000
            ),  # a raylet ends itself without its agents
            **AUTH,
        }
        cluster.nodes.append(Node(host, folder / host, mark, [*where, *usual], environment))
    try:
        for node in (
            cluster.nodes
        ):  # one after the other: two that start at once may take the same port or socket of their session
            if node.start().wait(START_SECONDS + 30) != 0:
                raise RuntimeError(f"ray start of {node.host} failed: {node.said()}")
    except BaseException:
        cluster.stop()
        raise
    return cluster


@contextlib.contextmanager
def running(ledger: str, hosts: Mapping[str, str], *, health: str = "") -> Iterator[Cluster]:
    cluster = start_cluster(ledger, hosts, health=health)
    try:
        yield cluster
    finally:
        cluster.stop()
