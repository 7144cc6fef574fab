"""sublet: borrow a GPU for minutes, lose it at any moment, lose nothing.

Everything here is loaded when it is first used, so that `import sublet` costs a few milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "gpu": "sublet.leases.request",
    "on_gpu": "sublet.functions.on_gpu",
    "join": "sublet.leases.gangs.join",
    "Member": "sublet.leases.gangs.member",
    "connect": "sublet.client.studio",
    "Studio": "sublet.client.studio",
    "Session": "sublet.client.session",
    "lease": "sublet.leases.current",
    "keep": "sublet.leases.current",
    "save": "sublet.leases.current",
    "saved": "sublet.leases.current",
    "load_ipython_extension": "sublet.notebook.extension",
    "unload_ipython_extension": "sublet.notebook.extension",
    "block": "sublet.leases.blocks.durable",
    "Durable": "sublet.leases.blocks.durable",
    "Block": "sublet.leases.blocks.block",
    "queue": "sublet.queues.opening",
    "Queue": "sublet.queues.queue",
    "Item": "sublet.queues.item",
    "train": "sublet.training.train",
    "run_step": "sublet.training.train",
    "Loader": "sublet.training.data",
    "Sampler": "sublet.training.data",
    "Run": "sublet.training.loop",
    "Preempted": "sublet.training.loop",
    "Completed": "sublet.training.step",
    "Duplicate": "sublet.training.step",
    "checkpoints": "sublet.wiring",
    "ReplicaPolicy": "sublet.core.checkpoints.checkpoint",
    "Retention": "sublet.core.checkpoints.retention",
    "Lease": "sublet.leases.lease",
    "Notice": "sublet.core.notice",
    "notices": "sublet.leases.notices",
    **dict.fromkeys(("u32", "u64", "i32", "i64", "f32", "f64"), "sublet.core.progress.kernel_arguments"),
}

#: Frameworks' adapters, reached as `sublet.hf.train(...)` and `sublet.lightning.fit(...)`.
_MODULES = {"errors": "sublet.errors", "hf": "sublet.training.hf", "lightning": "sublet.training.lightning"}

if TYPE_CHECKING:
    from sublet import errors as errors
    from sublet.client.session import Session
    from sublet.client.studio import Studio, connect
    from sublet.core.checkpoints.checkpoint import ReplicaPolicy
    from sublet.core.checkpoints.retention import Retention
    from sublet.core.notice import Notice
    from sublet.core.progress.kernel_arguments import f32, f64, i32, i64, u32, u64
    from sublet.errors import *  # noqa: F403
    from sublet.functions.on_gpu import on_gpu
    from sublet.leases.blocks.block import Block
    from sublet.leases.blocks.durable import Durable, block
    from sublet.leases.current import keep, lease, save, saved
    from sublet.leases.gangs.join import join
    from sublet.leases.gangs.member import Member
    from sublet.leases.lease import Lease
    from sublet.leases.notices import notices
    from sublet.leases.request import gpu
    from sublet.queues.item import Item
    from sublet.queues.opening import queue
    from sublet.queues.queue import Queue
    from sublet.training import hf as hf
    from sublet.training import lightning as lightning
    from sublet.training.data import Loader, Sampler
    from sublet.training.loop import Preempted, Run
    from sublet.training.step import Completed, Duplicate
    from sublet.training.train import run_step, train
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
    "notices",
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
    if name in _MODULES:
        value: Any = import_module(_MODULES[name])
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in (errors := import_module("sublet.errors")).__all__:
        value = getattr(errors, name)
    else:
        raise AttributeError(f"module 'sublet' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_MODULES, *import_module("sublet.errors").__all__])
