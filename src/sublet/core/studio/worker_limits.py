"""What one worker of a tenant may use of its host, and which of that the kernel really enforces.

Rules of this file:
- A limit counts when it was read back from where the kernel keeps it, never because it was asked for.
- A cgroup bounds everything a worker starts, together. An rlimit bounds each process alone, or for processes
  all of one user; the words say which.
- The words of a limit are part of a worker's containment, and `bounds` reads what `in_words` wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from sublet.core.errors import BadInput
from sublet.core.values import format_size, parse_size

MIB = 1 << 20
#: More processes and threads than any honest worker has; fewer than it takes to starve a machine.
PROCESSES_MOST = 4096
PROCESSES_LEAST = 64
#: Less does not hold Python and torch.
MEMORY_LEAST = 256 * MIB
CPU_WEIGHT, CPU_WEIGHT_MOST = 100, 10_000
MEMORY_PERCENT = 50

_PERCENT = re.compile(r"([0-9]{1,3})\s*%")
_BOUND = {
    "processes": re.compile(r"[0-9]+ processes by (cgroup|rlimit)"),
    "memory": re.compile(r"memory .+ by cgroup"),
}


class Resource(Enum):
    PROCESSES = "processes"
    MEMORY = "memory"
    CPU = "cpu"


class Enforcer(Enum):
    CGROUP = "cgroup"
    RLIMIT = "rlimit"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """0: no limit is wanted."""

    processes: int = PROCESSES_MOST
    memory_bytes: int = 0
    cpu_weight: int = 0

    def __post_init__(self) -> None:
        if self.processes and self.processes < PROCESSES_LEAST:
            raise BadInput(f"a worker needs at least {PROCESSES_LEAST} processes and threads")
        if self.memory_bytes and self.memory_bytes < MEMORY_LEAST:
            raise BadInput(f"a worker needs at least {format_size(MEMORY_LEAST)} of memory")
        if not 0 <= self.cpu_weight <= CPU_WEIGHT_MOST:
            raise BadInput(f"a CPU weight is from 1 to {CPU_WEIGHT_MOST}; 100 is everybody's")

    def wanted(self) -> dict[Resource, int]:
        amounts = {
            Resource.PROCESSES: self.processes,
            Resource.MEMORY: self.memory_bytes,
            Resource.CPU: self.cpu_weight,
        }
        return {resource: amount for resource, amount in amounts.items() if amount}


DEFAULT_LIMITS = WorkerLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitInForce:
    resource: Resource
    amount: int
    by: Enforcer = Enforcer.CGROUP

    @property
    def words(self) -> str:
        if self.resource is Resource.PROCESSES:
            return f"{self.amount} processes by {self.by.value}"
        if self.resource is Resource.CPU:
            return f"cpu weight {self.amount} by {self.by.value}"
        of_each = " of each process" if self.by is Enforcer.RLIMIT else ""
        return f"memory {format_size(self.amount)}{of_each} by {self.by.value}"


def in_words(wanted: WorkerLimits, in_force: Iterable[LimitInForce]) -> list[str]:
    """A word for each limit that was wanted, also for one that nothing enforces."""
    kept = {limit.resource: limit for limit in in_force}
    return [
        kept[resource].words if resource in kept else f"{resource.value} not limited"
        for resource in wanted.wanted()
    ]


def bounds(resource: Resource, words: Iterable[str]) -> bool:
    """Whether these words say that the worker as a whole is kept to a limit. A limit of each process alone
    does not bound a worker that starts many."""
    return any(_BOUND[resource.value].fullmatch(word) for word in words)


def parse_limits(*, memory: str, processes: str, cpu_weight: str, machine_bytes: int) -> WorkerLimits:
    """The settings as limits. `machine_bytes` is what a percentage is of."""
    return WorkerLimits(
        memory_bytes=_memory(memory, machine_bytes),
        processes=_number(processes, "worker_processes"),
        cpu_weight=_number(cpu_weight, "worker_cpu_weight"),
    )


def _memory(text: str, machine_bytes: int) -> int:
    percent = _PERCENT.fullmatch(text.strip())
    if percent is None:
        return parse_size(text, what="worker_memory")
    if not 1 <= int(percent[1]) <= 100:
        raise BadInput(f"worker_memory is a size, or from 1% to 100% of the machine's, not {text!r}")
    return max(MEMORY_LEAST, machine_bytes * int(percent[1]) // 100 // MIB * MIB)


def _number(text: str, what: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,6}", text.strip()):
        raise BadInput(f"{what} is a whole number from 1, not {text[:40]!r}")
    return int(text)
