"""One step, exactly once: fail closed, reserve, compute in a GpuSession, save, one commit.

Rules of this file:
- Nothing is sent to a device before the lease was seen active and the step was reserved for this holder.
- The state, the step's effect and its result become true in one transaction, after the bytes are durable (S1,
  C1). A crash before it leaves nothing behind but a reservation, which the next holder takes over when this
  one's lease is dead.
- Asked again with the same inputs, a step that was committed gives its stored result and touches no device
  (S4).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sublet.core.errors import BadInput, HeadMoved, LeaseLost, LeaseNotActive, Stale
from sublet.core.progress import effect as effects
from sublet.core.progress.effect import MOST_TEXT, Effect, Steps
from sublet.core.progress.kernel_arguments import Scalar, u32, u64
from sublet.core.values import check_job
from sublet.ports.device import GpuSession
from sublet.ports.ledger import LeaseKey, Ledger
from sublet.ports.store import Checkpoints

#: A result that is longer is given to a duplicate from the checkpoint, not from the ledger's row.
_SHORT_RESULT = MOST_TEXT // 2


class Openable(Protocol):
    """What a step needs of a lease."""

    @property
    def id(self) -> str: ...
    @property
    def key(self) -> LeaseKey: ...
    @property
    def status(self) -> str: ...
    def check(self) -> None: ...
    def open(self) -> GpuSession: ...


@dataclass(frozen=True, slots=True)
class Completed:
    """The step is committed: it happened now, and will not happen again."""

    version: int
    digest: str
    output: bytes


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The step was committed before; `output` is what came of it, or None when it was committed without
    one."""

    version: int
    output: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStep:
    """The inputs that define what a step computes."""

    job: str
    step: int
    module: str | bytes
    kernel: str
    batch: bytes
    output_bytes: int
    state_bytes: int = (
        0  # of the buffer that is restored before the kernel and saved after it; 0: there is none
    )
    grid: tuple[int, ...] = (1,)
    block: tuple[int, ...] = (1,)
    args: tuple[Scalar, ...] = ()

    def __post_init__(self) -> None:
        check_job(self.job)
        if self.step < 1:
            raise BadInput(f"step {self.step} is not a step: the first one is 1")
        if not self.batch and not self.output_bytes:
            raise BadInput("a step without a batch and without output computes nothing")
        if self.output_bytes < 0 or self.state_bytes < 0:
            raise BadInput("output_bytes and state_bytes are sizes: 0 or more")

    @property
    def key(self) -> str:
        return f"{self.job}:{self.step}"

    @property
    def fingerprint(self) -> str:
        """The parent is not in it: a step has one, which the compare-and-swap names, and a rollback forgets
        the steps above it."""
        code = self.module.encode() if isinstance(self.module, str) else self.module
        shape = [self.kernel, self.grid, self.block, self.output_bytes, self.state_bytes, repr(self.args)]
        hashed = hashlib.sha256()
        for part in (self.key.encode(), code, json.dumps(shape).encode(), self.batch):
            hashed.update(len(part).to_bytes(8, "little"))
            hashed.update(part)
        return hashed.hexdigest()


def run_step(
    ledger: Ledger, store: Checkpoints, lease: Openable, step: KernelStep, expected_version: int
) -> Completed | Duplicate:
    try:
        lease.check()
    except LeaseLost as lost:
        raise LeaseNotActive(f"step {step.step} was not started: {lost.message}") from lost
    if lease.status != "active":
        raise LeaseNotActive(f"step {step.step} was not started: lease {lease.id} is {lease.status}")
    head = ledger.head(step.job)
    known = ledger.effect(step.key)
    if head is not None and head.step >= step.step and (known is None or not known.completed):
        return Duplicate(head.version, None)
    version = head.version if head is not None else 0
    fingerprint = step.fingerprint
    if version != expected_version and (known is None or not known.completed):
        raise HeadMoved(f"{step.job} is at version {version}, not {expected_version}", version=version)
    reserved = ledger.reserve(lease.key, effect=step.key, job=step.job, fingerprint=fingerprint)
    if isinstance(reserved, effects.AlreadyCommitted):
        return _stored(store, step, reserved.version, reserved.outcome)
    before = store.load(step.job) if head is not None else {}
    output, state = _compute(lease.open(), step, before)
    saved_state: dict[str, Any] = {"output": output, "state": state}
    steps = Steps(
        step=step.step,
        key=step.key,
        fingerprint=fingerprint,
        starts=expected_version == 0,
        outcome=_outcome(output),
    )
    try:
        saved = store.save(step.job, saved_state, expected_version=expected_version, lease=lease, steps=steps)
    except Stale:
        # Another holder that took this step over may have finished it; the ledger decides (S5).
        found = ledger.effect(step.key)
        if found is not None and _finished_as(found, fingerprint):
            return _stored(store, step, found.version, found.outcome)
        raise
    return Completed(saved.version, saved.digest, output)


def _finished_as(found: Effect, fingerprint: str) -> bool:
    return found.completed and found.fingerprint == fingerprint


def _compute(gpu: GpuSession, step: KernelStep, before: Any) -> tuple[bytes, bytes]:
    """The recipe's kernel convention: step, output length, the batch (written over by the output), then the
    state, then the rest."""
    with gpu:
        batch = gpu.alloc(max(len(step.batch), step.output_bytes))
        gpu.write(batch, step.batch)
        args: list[Any] = [u64(step.step), u32(step.output_bytes), batch]
        state = None
        if step.state_bytes:
            state = gpu.alloc(step.state_bytes)
            gpu.write(state, _carried(step, before))
            args.append(state)
        module = gpu.load(step.module)
        gpu.launch(module, step.kernel, grid=step.grid, block=step.block, args=[*args, *step.args])
        gpu.sync()
        output = gpu.read(batch, step.output_bytes)
        carried = gpu.read(state, step.state_bytes) if state is not None else b""
        gpu.unload(module)
        if state is not None:
            gpu.free(state)
        gpu.free(batch)
    return output, carried


def _carried(step: KernelStep, before: Any) -> bytes:
    """The state the step before left, or zeros for the first."""
    if not before:
        return bytes(step.state_bytes)
    state = before.get("state") if isinstance(before, dict) else None
    if not isinstance(state, bytes) or len(state) != step.state_bytes:
        raise BadInput(
            f"the state of {step.job} is not the {step.state_bytes} bytes this step works on",
            remedy="give the state_bytes the job was begun with, or use another job name",
        )
    return state


def _outcome(output: bytes) -> str:
    if len(output) * 4 // 3 + 64 > _SHORT_RESULT:
        return json.dumps({"stored": "checkpoint"})
    return json.dumps({"output": base64.b64encode(output).decode()})


def _stored(store: Checkpoints, step: KernelStep, version: int, outcome: str) -> Duplicate:
    said = json.loads(outcome) if outcome else {}
    if "output" in said:
        return Duplicate(version, base64.b64decode(said["output"]))
    state = store.load(step.job, version=version, keys=["output"])
    output: bytes = state["output"]
    return Duplicate(version, output)


def as_shape(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
