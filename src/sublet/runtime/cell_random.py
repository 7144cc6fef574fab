"""Random states on their way between a notebook and its worker.

Rules of this file:
- Each library's state is a string of bytes of its own (torch's as it is: a pickle of it takes ten times as long), opened only where
  that library is in use: a notebook that never imported torch does not import it to learn what a cell drew from it. It hands the
  state on instead.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from sublet.runtime.capture import put_random, take_random

#: Of the libraries, by name.
States = Mapping[str, bytes]
_LIBRARY = {"python": "random", "numpy": "numpy", "torch": "torch", "cuda": "torch"}


def take() -> dict[str, bytes]:
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
    """As `put_random` and a checkpoint want them."""
    made = {name: pickle.loads(state) for name, state in states.items()}
    if "torch" in made:
        made["torch"] = _tensor(made["torch"])
    if "cuda" in made:
        made["cuda"] = [_tensor(state) for state in made["cuda"]]
    return made


def _tensor(data: bytes) -> Any:
    torch = import_module("torch")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def put(states: States) -> None:
    put_random(opened(states))


def put_what_is_in_use(states: States) -> dict[str, bytes]:
    """Only what this process has loaded; the others are given back."""
    others = {name: state for name, state in states.items() if not _in_use(name)}
    put({name: state for name, state in states.items() if name not in others})
    return others


def put_opened(states: Mapping[str, Any]) -> None:
    """From a checkpoint: only of what this process has loaded."""
    put_random({name: state for name, state in states.items() if _in_use(name)})


def _in_use(name: str) -> bool:
    if name == "cuda":
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return _LIBRARY[name] in sys.modules
