"""Random states on their way between a notebook and its worker.

Rules of this file:
- Each library's state is a string of bytes of its own (torch's as it is: a pickle of it takes ten times as long), opened only where
  that library is in use: a notebook that never imported torch does not import it to learn what a cell drew from it. It hands the
  state on instead.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from sublet.runtime.capture import put_random, take_random

#: Of the libraries, by name.
States = Mapping[str, bytes]
_LIBRARY = {"python": "random", "numpy": "numpy", "torch": "torch", "cuda": "torch"}


def take() -> dict[str, bytes]:
    return {
        name: state.numpy().tobytes() if name == "torch" else pickle.dumps(state, 5)
        for name, state in take_random().items()
    }


def opened(states: States) -> dict[str, Any]:
    """As `put_random` and a checkpoint want them."""
    return {name: _opened(name, state) for name, state in states.items()}


def _opened(name: str, state: bytes) -> Any:
    if name != "torch":
        return pickle.loads(state)
    torch = import_module("torch")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def put(states: States) -> None:
    put_random(opened(states))


def put_what_is_in_use(states: States) -> dict[str, bytes]:
    """Only what this process has loaded; the others are given back."""
    others = {name: state for name, state in states.items() if not _in_use(name)}
    put({name: state for name, state in states.items() if name not in others})
    return others


def _in_use(name: str) -> bool:
    if name == "cuda":
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return _LIBRARY[name] in sys.modules
