"""sublet: borrow a GPU for minutes, lose it at any moment, lose nothing.

Everything here is loaded when it is first used, so that `import sublet` costs a few milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "gpu": "sublet.borrowing",
    "on_gpu": "sublet.borrowing",
    "join": "sublet.joining",
    "Member": "sublet.runtime.gang",
    "connect": "sublet.remote.studio",
    "Studio": "sublet.remote.studio",
    "Session": "sublet.remote.session",
    "lease": "sublet.under_lease",
    "keep": "sublet.under_lease",
    "save": "sublet.under_lease",
    "saved": "sublet.under_lease",
    "load_ipython_extension": "sublet.notebook.extension",
    "unload_ipython_extension": "sublet.notebook.extension",
    "block": "sublet.keeping",
    "Durable": "sublet.keeping",
    "Block": "sublet.runtime.block",
    "queue": "sublet.queueing",
    "Queue": "sublet.runtime.queues",
    "Item": "sublet.runtime.pull",
    "train": "sublet.training",
    "run_step": "sublet.training",
    "Loader": "sublet.runtime.data",
    "Sampler": "sublet.runtime.data",
    "Run": "sublet.runtime.train",
    "Preempted": "sublet.runtime.train",
    "Completed": "sublet.runtime.step",
    "Duplicate": "sublet.runtime.step",
    "checkpoints": "sublet.wiring",
    "ReplicaPolicy": "sublet.core.checkpoint",
    "Retention": "sublet.core.retention",
    "Lease": "sublet.runtime.holding",
    "Notice": "sublet.core.notice",
    **dict.fromkeys(("u32", "u64", "i32", "i64", "f32", "f64"), "sublet.core.kernel"),
    **dict.fromkeys(
        [
            "BadInput",
            "BlockHeld",
            "BlockTooSmall",
            "BrokerDown",
            "CallFailed",
            "CannotTravel",
            "CompileFailed",
            "Damaged",
            "Disconnected",
            "DeviceFault",
            "EffectBusy",
            "Fenced",
            "FingerprintMismatch",
            "GpuSessionEnded",
            "GpuUnavailable",
            "HeadMoved",
            "InvariantBroken",
            "ItemFailed",
            "KernelTimeout",
            "LeaseLost",
            "LeaseNotActive",
            "Misconfigured",
            "MissingExtra",
            "NeverFits",
            "NoCapacity",
            "NotDurable",
            "NotFound",
            "NotJson",
            "NothingSaved",
            "OutOfMemory",
            "QuorumNotReached",
            "QuotaReached",
            "RankLost",
            "Refused",
            "SchemaMismatch",
            "SinkDown",
            "Stale",
            "StaleDelivery",
            "SubletError",
            "TooLarge",
            "Unsavable",
            "WaitlistFull",
            "WaitTimedOut",
            "WorkerLost",
        ],
        "sublet.core.errors",
    ),
}

if TYPE_CHECKING:
    from sublet.borrowing import gpu, on_gpu
    from sublet.core.checkpoint import ReplicaPolicy
    from sublet.core.errors import *  # noqa: F403
    from sublet.core.kernel import f32, f64, i32, i64, u32, u64
    from sublet.core.notice import Notice
    from sublet.core.retention import Retention
    from sublet.joining import join
    from sublet.keeping import Durable, block
    from sublet.queueing import queue
    from sublet.remote.session import Session
    from sublet.remote.studio import Studio, connect
    from sublet.runtime.block import Block
    from sublet.runtime.data import Loader, Sampler
    from sublet.runtime.gang import Member
    from sublet.runtime.holding import Lease
    from sublet.runtime.pull import Item
    from sublet.runtime.queues import Queue
    from sublet.runtime.step import Completed, Duplicate
    from sublet.runtime.train import Preempted, Run
    from sublet.training import run_step, train
    from sublet.under_lease import keep, lease, save, saved
    from sublet.wiring import checkpoints

__all__ = [
    "Block",
    "Completed",
    "Duplicate",
    "Durable",
    "Item",
    "Lease",
    "Loader",
    "Member",
    "Notice",
    "Preempted",
    "Queue",
    "ReplicaPolicy",
    "Retention",
    "Run",
    "Sampler",
    "Session",
    "Studio",
    "__version__",
    "block",
    "checkpoints",
    "connect",
    "f32",
    "f64",
    "gpu",
    "i32",
    "i64",
    "join",
    "keep",
    "lease",
    "on_gpu",
    "queue",
    "run_step",
    "save",
    "saved",
    "train",
    "u32",
    "u64",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'sublet' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
