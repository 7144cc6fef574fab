"""What a run is made of: taken as one tree at a step boundary, put back before the first step.

Rules of this file:
- Anything with `state_dict` and `load_state_dict` is captured through them; arrays and tensors are restored in place; numbers, texts and
  lists are restored in their container. Nothing is pickled.
- The random states of Python, NumPy and torch are part of the state: the step after a resume draws what it would have drawn.
- What belongs to one rank (its random states, its place in the data) is kept apart from what all ranks have alike.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping, MutableMapping
from importlib import import_module
from typing import Any

from sublet.core.errors import BadInput

FORMAT = 1


def take_value(value: Any) -> Any:
    """What is saved for one member of the state."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    generator = getattr(value, "bit_generator", None)
    if generator is not None:
        return generator.state
    if isinstance(value, dict):
        return {name: take_value(member) for name, member in value.items()}
    return value


def put_value(saved: Any, holder: Any, name: Any, path: str) -> None:
    """Restore one member where it is: in the object, in its memory, or in what holds it."""
    value = holder[name]
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
    elif getattr(value, "bit_generator", None) is not None:
        value.bit_generator.state = saved
    elif _is_array(value):
        _put_array(saved, value, path)
    elif isinstance(value, dict) and isinstance(saved, dict):
        for key in [key for key in value if key not in saved]:
            del value[key]
        for key, member in saved.items():
            if key in value:
                put_value(member, value, key, f"{path}.{key}")
            else:
                value[key] = member
    elif isinstance(value, list) and isinstance(saved, list):
        value[:] = saved
    else:
        holder[name] = saved


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return hasattr(value, "copy_") or (numpy is not None and isinstance(value, numpy.ndarray))


def _put_array(saved: Any, value: Any, path: str) -> None:
    if not _is_array(saved) or tuple(saved.shape) != tuple(value.shape) or saved.dtype != value.dtype:
        raise BadInput(
            f"{path} has another shape or type than what was saved; nothing of it was overwritten",
            remedy="make it as it was when it was saved, or use another job name",
        )
    if hasattr(value, "copy_"):
        value.detach().copy_(saved.detach())
    else:
        value[...] = saved


# --- random states -------------------------------------------------------------------------------------------


def take_random() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    taken: dict[str, Any] = {"python": [version, list(numbers), gauss]}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        taken["python"] = [version, numpy.array(numbers, dtype=numpy.uint32), gauss]
        taken["numpy"] = numpy.random.get_state(legacy=False)
    if torch is not None and hasattr(torch, "get_rng_state"):
        taken["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            taken["cuda"] = torch.cuda.get_rng_state_all()
    return taken


def put_random(taken: Mapping[str, Any]) -> None:
    version, numbers, gauss = taken["python"]
    random.setstate((version, tuple(int(n) for n in numbers), gauss))
    if "numpy" in taken:
        import_module("numpy").random.set_state(taken["numpy"])
    if "torch" in taken:
        torch = import_module("torch")
        torch.set_rng_state(taken["torch"])
        if "cuda" in taken and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(taken["cuda"])


# --- the whole -----------------------------------------------------------------------------------------------


class Captured:
    """The parts of a run by name, and which of them each rank has for itself."""

    def __init__(self, parts: MutableMapping[str, Any], *, per_rank: Collection[str] = ()) -> None:
        if not isinstance(parts, dict) or not parts:
            raise BadInput(
                "state= is a dict of what the run is made of: {'model': model, 'optim': optimizer, 'data': loader}"
            )
        if unnamed := [name for name in parts if not isinstance(name, str)]:
            raise BadInput(f"the parts of a state have names: {unnamed[0]!r} is none")
        if unknown := set(per_rank) - set(parts):
            raise BadInput(f"per_rank names {', '.join(sorted(unknown))}, which the state has not")
        self.parts = parts
        self.per_rank = tuple(name for name in parts if name in per_rank)

    def take_own(self) -> dict[str, Any]:
        """What this rank has for itself."""
        return {
            "parts": {name: take_value(self.parts[name]) for name in self.per_rank},
            "random": take_random(),
        }

    def take(self, ranks: list[Any]) -> dict[str, Any]:
        alike = {name: take_value(value) for name, value in self.parts.items() if name not in self.per_rank}
        return {"state": alike, "ranks": ranks, "sublet": {"format": FORMAT}}

    def put(self, tree: Any, rank: int, world: int) -> None:
        """Everything but the random states, which `put_random` restores just before the first step."""
        if not isinstance(tree, dict) or "state" not in tree or "ranks" not in tree:
            raise BadInput(
                "what is saved under this name was not saved by a training run",
                remedy="use another job name, or load it yourself with sublet.checkpoints().load(name)",
            )
        saved = {**tree["state"], **self._own(tree, rank, world)["parts"]}
        if saved.keys() != self.parts.keys():
            missing = ", ".join(sorted(saved.keys() ^ self.parts.keys()))
            raise BadInput(
                f"the saved state and state= do not have the same parts: {missing}",
                remedy="give the parts the job was begun with, or use another job name",
            )
        for name, value in saved.items():
            put_value(value, self.parts, name, name)

    @staticmethod
    def _own(tree: Any, rank: int, world: int) -> Any:
        if len(tree["ranks"]) != world:
            raise BadInput(
                f"it was saved by {len(tree['ranks'])} ranks, and there are {world} now",
                remedy=f"start it with {len(tree['ranks'])} ranks, or fork the weights into a new job",
            )
        return tree["ranks"][rank]

    def random_of(self, tree: Any, rank: int, world: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._own(tree, rank, world)["random"]
        return found
