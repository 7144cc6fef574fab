"""State of a notebook's process that is no variable: folder, module path, environment, random numbers.

Rules of this file:
- What the notebook changed since the worker was last told is sent with the next cell, so that it does not
  matter whether a lease was taken before or after `os.chdir`. What a cell changes stays in its worker.
- The lease's own environment variables stay the worker's: they name its devices, and hide the ledger.
- Each library's random state travels as bytes of its own (torch's raw: a pickle of it takes ten times as
  long), and is read only where that library is loaded. A notebook that never imported torch passes torch's
  state on unread.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from sublet.notebook.cells.messages import ChangedSurroundings
from sublet.training.capture import put_random, take_random

_THE_LEASES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookSurroundings:
    folder: str = ""
    path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def since(self, before: NotebookSurroundings) -> ChangedSurroundings | None:
        """The changes since `before`, for a worker that knows those."""
        if self == before:
            return None
        there, here = before.environment, self.environment
        changed: dict[str, str | None] = {name: v for name, v in here.items() if there.get(name) != v}
        return ChangedSurroundings(
            folder=self.folder if self.folder != before.folder else "",
            path=self.path if self.path != before.path else None,
            path_before=before.path,
            environment=changed | dict.fromkeys(there.keys() - here.keys()),
        )


def surroundings() -> NotebookSurroundings:
    """The surroundings of this process now."""
    folder = ""
    with contextlib.suppress(OSError):  # it was deleted
        folder = os.getcwd()
    return NotebookSurroundings(
        folder=folder,
        path=tuple(sys.path),
        environment={
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SUBLET_") and name not in _THE_LEASES
        },
    )


def follow(moved: ChangedSurroundings) -> None:
    """In the worker."""
    if moved.folder:
        with contextlib.suppress(OSError):  # as for a worker that begins
            os.chdir(moved.folder)
    if moved.path is not None:
        own = [place for place in sys.path if place not in moved.path_before]  # a cell's
        sys.path[:] = [*own, *moved.path]
    for name, value in moved.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# --- random states ---


#: Of the libraries, by name.
States = Mapping[str, bytes]
_LIBRARY = {"python": "random", "numpy": "numpy", "torch": "torch", "cuda": "torch"}


def take_random_states() -> dict[str, bytes]:
    states = take_random()
    version, numbers, gauss = random.getstate()
    states["python"] = [version, list(numbers), gauss]  # without NumPy, which the other side may not use
    # As bytes: no two pickles of one tensor are equal, and equal states are not sent.
    if "torch" in states:
        states["torch"] = states["torch"].numpy().tobytes()
    if "cuda" in states:
        states["cuda"] = [state.numpy().tobytes() for state in states["cuda"]]
    return {name: pickle.dumps(state, 5) for name, state in states.items()}


def opened(states: States) -> dict[str, Any]:
    """The states as `put_random` and a checkpoint need them."""
    made = {name: pickle.loads(state) for name, state in states.items()}
    if "torch" in made:
        made["torch"] = _tensor(made["torch"])
    if "cuda" in made:
        made["cuda"] = [_tensor(state) for state in made["cuda"]]
    return made


def _tensor(data: bytes) -> Any:
    torch = import_module("torch")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def put_random_states(states: States) -> None:
    put_random(opened(states))


def put_what_is_in_use(states: States) -> dict[str, bytes]:
    """Sets the states of loaded libraries; returns those of the others."""
    others = {name: state for name, state in states.items() if not _in_use(name)}
    put_random_states({name: state for name, state in states.items() if name not in others})
    return others


def put_opened(states: Mapping[str, Any]) -> None:
    """Sets states from a checkpoint, only of loaded libraries."""
    put_random({name: state for name, state in states.items() if _in_use(name)})


def _in_use(name: str) -> bool:
    if name == "cuda":
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return _LIBRARY[name] in sys.modules
