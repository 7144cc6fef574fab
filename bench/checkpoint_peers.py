"""The peers of checkpoints: how each of them saves durably, saves behind training, and reads back into live tensors.

Rules of this file:
- Same durability as ours: a peer's files are synced, with their folder, before its clock stops.
- Each in the best configuration known: DCP with its shared-memory stager kept between saves and staging in the background.
- A peer that is not installed, or cannot run, is left out and named.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

State = dict[str, Any]


def sync(*paths: Path) -> None:
    for target in paths:
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def flat(state: State) -> dict[str, Any]:
    """Tensors by name, for what knows nothing else."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, member in value.items():
                walk(member, f"{path}.{key}" if path else str(key))
        elif hasattr(value, "untyped_storage"):
            found[path] = value

    walk(state, "")
    return found


class TorchSave:
    name = "torch.save"

    def __init__(self, place: Path) -> None:
        self.torch: Any = import_module("torch")
        self.path = place / "peer.pt"

    def save(self, state: State) -> None:
        self.torch.save(state, self.path)
        sync(self.path, self.path.parent)

    def load(self, live: dict[str, Any]) -> None:
        loaded = flat(self.torch.load(self.path, mmap=True, weights_only=True))
        for name, tensor in live.items():
            tensor.copy_(loaded[name])


class Safetensors:
    name = "safetensors"

    def __init__(self, place: Path) -> None:
        self.library: Any = import_module("safetensors.torch")
        self.path = place / "peer.safetensors"

    def save(self, state: State) -> None:
        self.library.save_file(flat(state), self.path)
        sync(self.path, self.path.parent)

    def load(self, live: dict[str, Any]) -> None:
        for name, tensor in self.library.load_file(self.path).items():
            live[name].copy_(tensor)


class Dcp:
    """torch.distributed.checkpoint."""

    name = "DCP"

    def __init__(self, place: Path) -> None:
        self.dcp: Any = import_module("torch.distributed.checkpoint")
        self.staging: Any = import_module("torch.distributed.checkpoint.staging")
        self.path = place / "peer.dcp"
        self._stager: Any = None

    def _writer(self, threads: int) -> Any:
        shutil.rmtree(self.path, ignore_errors=True)
        return self.dcp.FileSystemWriter(self.path, sync_files=True, thread_count=threads)

    def save(self, state: State) -> None:
        self.dcp.save(state, storage_writer=self._writer(2), no_dist=True)
        sync(self.path, self.path.parent)

    def load(self, live: dict[str, Any]) -> None:
        self.dcp.load(
            live, storage_reader=self.dcp.FileSystemReader(self.path), no_dist=True,
            planner=self.dcp.DefaultLoadPlanner(flatten_state_dict=True),
        )  # fmt: skip

    def save_behind(self, state: State) -> tuple[Future[Any], Future[Any]]:
        """Staged, and written."""
        if self._stager is None:
            options = self.staging.StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
            self._stager = self.staging.DefaultStager(options)
        answer = self.dcp.async_save(
            state, storage_writer=self._writer(2), async_stager=self._stager, no_dist=True
        )
        if isinstance(answer, Future):
            return answer, answer
        return answer.staging_completion, answer.upload_completion

    def close(self) -> None:
        if self._stager is not None:
            with contextlib.suppress(Exception):
                self._stager.close()


ORBAX = """
import json, sys, time, shutil, os
import numpy as np, jax, jax.numpy as jnp
import orbax.checkpoint as ocp
place, tensors, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
key = jax.random.key(0)
state = {f"t{n}": jax.random.normal(jax.random.fold_in(key, n), (each,)) for n in range(tensors)}
jax.block_until_ready(state)
saver = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
print("ready", flush=True)
for line in sys.stdin:
    shutil.rmtree(place, ignore_errors=True)
    state = {k: v + 1 for k, v in state.items()}
    jax.block_until_ready(state)
    begun = time.perf_counter()
    saver.save(place, state)
    blocked = time.perf_counter() - begun
    saver.wait_until_finished()
    for folder, _, files in os.walk(place):
        for name in [*files, "."]:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY); os.fsync(fd); os.close(fd)
    print(json.dumps([blocked, time.perf_counter() - begun]), flush=True)
"""


class Orbax:
    """In a process of its own, on JAX arrays of as many bytes."""

    name = "Orbax async"

    def __init__(self, place: Path, tensors: int, each: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ORBAX, str(place / "peer.orbax"), str(tensors), str(each)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("Orbax left")
        return line

    def save_behind(self) -> tuple[float, float]:
        """Seconds blocked, and until it was durable."""
        assert self._process.stdin is not None
        self._process.stdin.write("save\n")
        self._process.stdin.flush()
        blocked, durable = json.loads(self._line())
        return blocked, durable

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def installed(place: Path) -> list[Any]:
    """Those that save and load tensors of torch here."""
    found: list[Any] = [TorchSave(place)]
    if find_spec("safetensors") is not None:
        found.append(Safetensors(place))
    return [*found, Dcp(place)]


def timed(work: Callable[..., Any], *args: Any, **options: Any) -> float:
    begun = time.perf_counter()
    work(*args, **options)
    return time.perf_counter() - begun
