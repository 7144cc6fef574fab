"""The state of a run: taken as one tree at a step boundary, put back before the first step.

Rules of this file:
- Anything with `state_dict` and `load_state_dict` is captured through them, generators through their states;
  arrays and tensors are restored in place; numbers, texts, JAX arrays and JAX keys are replaced in their
  container. The same goes for the members of dicts, lists and tuples. Nothing is pickled.
- The random states of Python, NumPy and torch are part of the state: the step after a resume draws what it
  would have drawn.
- What belongs to one rank (its random states, its place in the data) is kept apart from what all ranks share.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Collection, Mapping, MutableMapping
from importlib import import_module
from typing import Any

from sublet.core.errors import BadInput, Unsavable
from sublet.training.resume_check import differences

FORMAT = 1
#: The store's name for a place in the tree of `Captured.take`.
_PLACE = re.compile(
    r"state\[(?:'state'|'ranks'\]\[(?P<rank>\d+)\]\['parts')\]\['(?P<name>[^']*)'\](?P<where>\S*)(?=\s)"
)


def take_value(value: Any) -> Any:
    """What is saved for one member of the state."""
    if _is_torchdata(value):
        return _take_torchdata(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    if _is_generator(value):
        return _take_generator(value)
    if _is_jax_key(value):
        random_of_jax = import_module("jax").random
        return {"impl": str(random_of_jax.key_impl(value)), "data": random_of_jax.key_data(value)}
    if isinstance(value, dict):
        return {name: take_value(member) for name, member in value.items()}
    if isinstance(value, list):
        return [take_value(member) for member in value]
    if isinstance(value, tuple):
        return tuple(take_value(member) for member in value)
    return value


def put_value(saved: Any, holder: Any, name: Any, path: str) -> None:
    """Restore one member where it is: in the object, in its memory, or in what holds it."""
    value = holder[name]
    if _is_torchdata(value):
        _put_torchdata(saved, value)
    elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
    elif _is_generator(value):
        _put_generator(saved, value)
    elif _is_jax_key(value):
        holder[name] = import_module("jax").random.wrap_key_data(saved["data"], impl=saved["impl"])
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
        if len(value) != len(saved):
            _refuse_objects(value, saved, path)
            value[:] = saved
        for at, member in enumerate(saved):
            put_value(member, value, at, f"{path}[{at}]")
    elif isinstance(value, tuple) and isinstance(saved, tuple):
        if len(value) != len(saved):
            _refuse_objects(value, saved, path)
            holder[name] = saved
            return
        members = list(value)
        for at, member in enumerate(saved):
            put_value(member, members, at, f"{path}[{at}]")
        if any(new is not old for new, old in zip(members, value, strict=True)):
            holder[name] = type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    else:
        holder[name] = saved


def _refuse_objects(value: Any, saved: Any, path: str) -> None:
    """Refuse lists of objects that have grown: a list of numbers may, but a new module in a list was never
    saved."""
    if any(hasattr(member, "load_state_dict") or _is_generator(member) for member in value):
        raise BadInput(
            f"{path} has {len(value)} members, and {len(saved)} were saved",
            remedy="make it as it was when it was saved, or use another job name",
        )


def is_per_rank(value: Any) -> bool:
    """Whether each rank has its own without `per_rank`: places in the data, and generators."""
    return bool(getattr(type(value), "per_rank", False)) or _is_torchdata(value) or _is_generator(value)


# --- generators as members of the state
# ----------------------------------------------------------------------


def _is_generator(value: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if isinstance(value, random.Random) or getattr(value, "bit_generator", None) is not None:
        return True
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return True
    return torch is not None and isinstance(value, getattr(torch, "Generator", ()))


def _take_generator(value: Any) -> Any:
    if isinstance(value, random.Random):
        version, numbers, gauss = value.getstate()
        return [version, list(numbers), gauss]
    if getattr(value, "bit_generator", None) is not None:
        return value.bit_generator.state
    return value.get_state(legacy=False) if _is_of(value, "numpy") else value.get_state()


def _put_generator(saved: Any, value: Any) -> None:
    if isinstance(value, random.Random):
        version, numbers, gauss = saved
        value.setstate((version, tuple(numbers), gauss))
    elif getattr(value, "bit_generator", None) is not None:
        value.bit_generator.state = saved
    else:
        value.set_state(saved)


def _is_of(value: Any, package: str) -> bool:
    return type(value).__module__.partition(".")[0] == package


def _is_jax_key(value: Any) -> bool:
    jax = sys.modules.get("jax")
    if jax is None or (not _is_of(value, "jax") and not _is_of(value, "jaxlib")):
        return False
    return isinstance(value, jax.Array) and bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


# --- torchdata
# ----------------------------------------------------------------------------------------------- Its state
# does not hold everything that decides what comes next. Making its iterator draws a number, from the
# generator it was given or from torch's own; asking for its state makes one if there is none. Done inside a
# step after a resume, that would shift every draw of the run. And a generator it shares with its sampler is
# set back to where the sampler's epoch began, one draw behind.


def _is_torchdata(value: Any) -> bool:
    found = sys.modules.get("torchdata.stateful_dataloader")
    return found is not None and isinstance(value, found.StatefulDataLoader)


def _take_torchdata(value: Any) -> Any:
    before = take_random()
    taken = value.state_dict()
    put_random(before)
    generator = value.generator
    return {"loader": taken, "generator": None if generator is None else generator.get_state()}


def _put_torchdata(saved: Any, value: Any) -> None:
    value.load_state_dict(saved["loader"])
    value.state_dict()  # makes the iterator now, before the random states of the run are put back
    if value.generator is not None and saved["generator"] is not None:
        value.generator.set_state(saved["generator"])


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


# --- random states
# -------------------------------------------------------------------------------------------


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


# --- the whole
# -----------------------------------------------------------------------------------------------


def step_of(tree: Any) -> int:
    """The step after which it was taken; 0 where it does not say."""
    return int(tree["sublet"].get("step", 0)) if isinstance(tree, dict) and "sublet" in tree else 0


def _of_part(tree: Any, name: str) -> Any:
    return tree["state"][name] if name in tree["state"] else tree["ranks"][0]["parts"][name]


class Captured:
    """The parts of a run by name, and which of them each rank has for itself."""

    def __init__(self, parts: MutableMapping[str, Any], *, per_rank: Collection[str] = ()) -> None:
        if not isinstance(parts, dict) or not parts:
            raise BadInput(
                "state= is a dict of what the run is made of: {'model': model, 'optim': optimizer, 'data': "
                "loader}"
            )
        if unnamed := [name for name in parts if not isinstance(name, str)]:
            raise BadInput(f"the parts of a state have names: {unnamed[0]!r} is none")
        if unknown := set(per_rank) - set(parts):
            raise BadInput(f"per_rank names {', '.join(sorted(unknown))}, which the state has not")
        self.parts = parts
        self.per_rank = tuple(name for name in parts if name in per_rank or is_per_rank(parts[name]))

    def take_own(self) -> dict[str, Any]:
        """The parts that this rank has for itself."""
        return {
            "parts": {name: take_value(self.parts[name]) for name in self.per_rank},
            "random": take_random(),
        }

    def take(self, ranks: list[Any], step: int = 0) -> dict[str, Any]:
        alike = {name: take_value(value) for name, value in self.parts.items() if name not in self.per_rank}
        return {"state": alike, "ranks": ranks, "sublet": {"format": FORMAT, "step": step}}

    def is_where(self, saved: Any) -> bool:
        """Whether the program is at the place at which this tree was taken; parts may know of several."""
        return all(
            part.is_where(_of_part(saved, name))
            for name, part in self.parts.items()
            if hasattr(part, "is_where")
        )

    def differences(self, before: Any, now: Any) -> list[Any]:
        """Between two trees of this state, the most telling first."""
        found: list[Any] = []
        for name, part in self.parts.items():
            old, new = _of_part(before, name), _of_part(now, name)
            if hasattr(part, "comparable"):
                old, new = part.comparable(old), part.comparable(new)
            own = getattr(part, "differences", None)
            found += own(old, new) if own is not None else differences(old, new, name)
        if not any(hasattr(part, "differences") for part in self.parts.values()):
            found += differences(
                before["ranks"][0]["random"], now["ranks"][0]["random"], "the random states of"
            )
        return found

    def explained(self, refused: Unsavable) -> Unsavable:
        """Name the part of the user's state that the store's place in the tree belongs to."""
        found = _PLACE.match(refused.message)
        if found is None or found["name"] not in self.parts:
            return refused
        name, rank = found["name"], found["rank"]
        which = f"the part {name!r} of the state" + (f" on rank {rank}" if rank not in (None, "0") else "")
        kind = type(self.parts[name])
        what = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        return Unsavable(
            f"{which} ({what}) cannot be saved: in it, {found['where'].strip() or 'it'} "
            f"{refused.message[found.end() :].strip()}",
            remedy=f"give {name!r} a state_dict() and load_state_dict() that hold only numbers, texts, "
            "lists, dicts and tensors, or leave it out of state= and make it again at each start",
        )

    def put(self, tree: Any, rank: int, world: int) -> None:
        """Put everything back but the random states, which `put_random` restores just before the first
        step."""
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
