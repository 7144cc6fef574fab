"""A Ray cluster as a place for leased workers: its nodes, their names in the ledger, and their agents.

Rules of this file:
- A node takes part if Ray gives it GPUs, or the resource `sublet`. Where no node has either, all take part.
- A host's name is what the node itself says (SUBLET_HOST there, else its own name), and never changes with
  Ray's ids: a node that comes back is the same host, and its warden settles what was left there.
- Every wait for Ray has a limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import ray
from ray._private import worker
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sublet.core.errors import Misconfigured, NotPlaced
from sublet.placement.agent import Agent
from sublet.placement.command import RayCommand, one_stream
from sublet.placement.process import RayProcess, words
from sublet.placement.worker import RayWorker
from sublet.ports.placement import CommandOrder
from sublet.wiring import CLOCK

Started = TypeVar("Started", bound=RayProcess)

NAMESPACE = "sublet"
#: The custom resource of a node that takes part without a GPU that Ray knows of.
RESOURCE = "sublet"
REACH_SECONDS = 5.0
#: How long a node's agent and its warden may take to start; both import a lot, on a machine that may be busy.
READY_SECONDS = 120.0
START_SECONDS = 60.0
LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    id: str
    host: str
    devices: str
    agent: Any
    address: str = "127.0.0.1"


def address_of(placement: str) -> str:
    """Return what `ray.init` takes, from SUBLET_PLACEMENT."""
    return placement.partition(":")[2].removeprefix("//").strip("/") or "auto"


class RayPlacement:
    """Implements `ports.placement.Placement`."""

    def __init__(self, placement: str, ledger: str) -> None:
        if not ledger.startswith(("postgresql:", "postgres:")):
            raise Misconfigured(
                "with SUBLET_PLACEMENT=ray://… the nodes share one ledger, and it must be PostgreSQL",
                remedy="set SUBLET_LEDGER=postgresql://… to a server that every node reaches",
            )
        self._address = address_of(placement)
        self._ledger = ledger
        self._name = f"agent-{hashlib.sha256(ledger.encode()).hexdigest()[:12]}"
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}
        self._asked: dict[Any, tuple[str, Any]] = {}
        self._pid = os.getpid()

    # the cluster

    def ready(self) -> None:
        with self._lock:
            self._connect()
            self._look()

    def hosts(self) -> frozenset[str]:
        with self._lock:
            self._connect()
            self._hear()
            up = self._alive()
            return frozenset(node.host for node in self._nodes.values() if node.id in up)

    def declared(self, host: str) -> str:
        return self._node(host).devices

    def address(self, host: str) -> str:
        return self._node(host).address

    def _connect(self) -> None:
        if self._pid != os.getpid():
            raise Misconfigured(
                "the connection to Ray belongs to the parent process",
                remedy="start this process anew, not by a fork",
            )
        if ray.is_initialized():
            return
        self._reach()
        try:
            with _own_sigterm():
                ray.init(
                    address=self._address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
        except (RayError, OSError, RuntimeError, ValueError) as e:
            raise self._unreachable(words(e)) from e
        # Ray reports lost nodes on standard output, which is the command's or the user's own. We report them
        # where they belong.
        worker._worker_logs_enabled = False

    def _reach(self) -> None:
        """Check that the head can be reached, because Ray itself would wait for a missing one for minutes."""
        host, _, port = self._address.rpartition(":")
        if not port.isdigit():
            return
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
        except OSError as e:
            raise self._unreachable(str(e)) from e

    def _unreachable(self, why: str) -> Misconfigured:
        return Misconfigured(
            f"the Ray cluster at {self._address} cannot be reached: {why}",
            remedy="run this on a node of the cluster, with SUBLET_PLACEMENT=ray://HEAD:6379 "
            "(the head's own port, not that of Ray's client) "
            "or ray:auto",
        )

    def _look(self) -> None:
        """Have an agent on every node that takes part, and know its name. The first time all are waited for;
        a node that joins later is used when its agent has answered."""
        alive = self._alive()
        chosen = [i for i, node in alive.items() if _offers(node)] or list(alive)
        self._nodes = {i: node for i, node in self._nodes.items() if i in alive}
        for node_id in sorted(set(chosen) - set(self._nodes) - {i for i, _ in self._asked.values()}):
            self._ask(node_id, self._agent(node_id))
        failed = self._hear()
        deadline = time.monotonic() + (0 if self._nodes else READY_SECONDS)
        while self._asked and time.monotonic() < deadline:
            ray.wait(list(self._asked), timeout=LOOK_SECONDS)
            failed = self._hear() or failed
            gone = set(alive) - set(self._alive())
            self._asked = {ref: who for ref, who in self._asked.items() if who[0] not in gone}
        if not self._nodes:
            why = failed or ("they did not answer" if self._asked else "there are none")
            raise NotPlaced(f"no node of the Ray cluster at {self._address} can take a worker: {why}")

    def _ask(self, node_id: str, agent: Any) -> None:
        self._asked[agent.facts.remote()] = (node_id, agent)

    def _hear(self) -> str:
        """Admit the nodes whose agents have answered, and return why one could not. That one is asked again:
        its warden may only have been slow."""
        if not self._asked:
            return ""
        failed = ""
        for ref in ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0]:
            node_id, agent = self._asked.pop(ref)
            try:
                facts = ray.get(ref)
            except RayError as e:
                failed = words(e)
                if isinstance(e, RayTaskError):
                    self._ask(node_id, agent)
                continue
            self._admit(node_id, agent, facts)
        return failed

    @staticmethod
    def _alive() -> dict[str, dict[str, Any]]:
        nodes: Any = ray.nodes
        return {node["NodeID"]: node for node in nodes() if node["Alive"]}

    def _admit(self, node_id: str, agent: Any, facts: dict[str, Any]) -> None:
        here = platform.python_version().split(".")[:2]
        if facts["python"].split(".")[:2] != here:
            raise Misconfigured(
                f"host {facts['host']} runs Python {facts['python']}, this is {platform.python_version()}: "
                "functions cannot travel between them",
                remedy="use one Python version on the cluster and here",
            )
        twin = next((n for n in self._nodes.values() if n.host == facts["host"]), None)
        if twin is not None:
            raise Misconfigured(
                f"two Ray nodes call themselves {facts['host']}: {twin.id[:8]} and {node_id[:8]}",
                remedy="start each node's 'ray start' with a SUBLET_HOST of its own",
            )
        self._nodes[node_id] = _Node(
            id=node_id,
            host=facts["host"],
            devices=facts["devices"],
            agent=agent,
            address=self._alive().get(node_id, {}).get("NodeManagerAddress", "127.0.0.1"),
        )

    def _agent(self, node_id: str) -> Any:
        return (
            ray.remote(Agent)
            .options(
                name=f"{self._name}-{node_id}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=1000,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(self._ledger)
        )

    # workers

    def start(self, host: str, tenant: str = "") -> RayWorker:
        return self._started(host, RayWorker, lambda agent, job: agent.start.remote(job, tenant))

    def start_command(self, host: str, order: CommandOrder) -> RayCommand:
        asked = {**asdict(order), "merged": one_stream()}
        return self._started(host, RayCommand, lambda agent, job: agent.start_command.remote(job, asked))

    def _started(self, host: str, kind: type[Started], ask: Callable[[Any, str], Any]) -> Started:
        node = self._node(host)
        job = ray.get_runtime_context().get_job_id()
        try:
            sent = ask(node.agent, job)
            deadline = time.monotonic() + START_SECONDS
            while not ray.wait([sent], timeout=LOOK_SECONDS)[0]:
                if time.monotonic() > deadline or host not in self.hosts():
                    raise NotPlaced(f"host {host} did not start a worker in time")
            facts = ray.get(sent)
            return kind(node.agent, facts, CLOCK.monotonic_us())
        except RayError as e:
            raise NotPlaced(f"host {host} cannot start a worker: {words(e)}") from e

    def _node(self, host: str) -> _Node:
        with self._lock:
            self._hear()
            found = next((node for node in self._nodes.values() if node.host == host), None)
        if found is None:
            raise NotPlaced(f"host {host} is not a node of the Ray cluster at {self._address}")
        return found

    def stop(self) -> None:
        """End the agents of this ledger, to take a cluster out of use: their wardens exit when nothing is
        leased any more."""
        with self._lock:
            for node in self._nodes.values():
                with contextlib.suppress(RayError):
                    ray.kill(node.agent, no_restart=True)
            self._nodes.clear()


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep a SIGTERM handler that is already installed: Ray replaces it by an exit, and whoever drains must
    go on hearing it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, before)


def _offers(node: dict[str, Any]) -> bool:
    resources = node.get("Resources", {})
    return bool(resources.get("GPU") or resources.get(RESOURCE))


def open_placement(placement: str, ledger: str) -> RayPlacement:
    return RayPlacement(placement, ledger)
