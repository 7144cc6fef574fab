"""The state of a script that knows nothing of us: what its names lead to, taken as one tree and put back where it was.

Rules of this file:
- An object is put back in place, so that whoever else holds it sees it too: through `load_state_dict`, into its memory, into its attributes.
  What cannot change in place is a value, to be bound to its name again.
- Two names of one object are two names of it afterwards.
- What cannot be saved is left alone and named; nothing is pickled.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from enum import Enum
from typing import Any

from sublet.core.errors import BadInput
from sublet.rewriting.finding import Scope

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_DEEP = 16


class What(Enum):
    ALL = "all"
    VARIABLES = "variables"  # no models, no optimizers: cheap enough to copy at each turn of an outer loop
    GENERATORS = "generators"  # what an iterator draws from


class _Missing:
    pass


MISSING = _Missing()


class Unsaved(Exception):
    """This one cannot be saved."""


# --- what is what --------------------------------------------------------------------------------------------


def _torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "nn") else None


def _is_array(value: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), _torch()
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def _is_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return type(value) in _PLAIN or (numpy is not None and isinstance(value, numpy.generic))


def _is_here(value: Any) -> bool:
    """Not on a device: the tree keeps numbers, not places."""
    return not hasattr(value, "device") or str(value.device) == "cpu"


def _is_at_rest(value: Any) -> bool:
    """Not a result of the graph, such as an activation kept to be looked at."""
    return getattr(value, "grad_fn", None) is None


def _is_plain(value: Any, depth: int = 0) -> bool:
    if _is_scalar(value):
        return True
    if depth > _DEEP:
        return False
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return all(_is_plain(member, depth + 1) for member in value)
    if kind in (dict, collections.OrderedDict):
        return all(_is_scalar(key) and _is_plain(member, depth + 1) for key, member in value.items())
    return _is_array(value) and _is_here(value)


def is_generator(value: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), _torch()
    if isinstance(value, random.Random) or (torch is not None and isinstance(value, torch.Generator)):
        return True
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def is_loader(value: Any) -> bool:
    """Its place is in the loop that goes over it, never in a state of its own."""
    return hasattr(value, "dataset") and hasattr(value, "__iter__") and hasattr(value, "sampler")


def is_stateful(value: Any) -> bool:
    if isinstance(value, type) or is_loader(value):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_dataset(value: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.Dataset)


def _loader_generators(loader: Any) -> dict[str, Any]:
    samplers = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch": getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    }
    found = {name: getattr(holder, "generator", None) for name, holder in samplers.items()}
    return {name: value for name, value in found.items() if value is not None and is_generator(value)}


def _generator_state(value: Any) -> Any:
    if isinstance(value, random.Random):
        version, numbers, gauss = value.getstate()
        return [version, list(numbers), gauss]
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    return value.get_state()  # torch.Generator; numpy.random.RandomState gives a tuple


def _put_generator(value: Any, saved: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate((saved[0], tuple(saved[1]), saved[2]))
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = saved
    else:
        value.set_state(saved)


# --- taking --------------------------------------------------------------------------------------------------


class Taking:
    """One save. `copied` for what outlives it: a snapshot that later steps must not change."""

    def __init__(
        self,
        what: What,
        *,
        ours: Callable[[type], bool],
        grads: bool = False,
        copied: bool = False,
        check: bool = False,
    ) -> None:
        self._what, self._ours, self._grads, self._copied, self._check = what, ours, grads, copied, check
        self._numbers: dict[int, int] = {}
        self._keeps: list[Any] = []  # so that ids stay their own
        self.left_alone: dict[str, str] = {}

    def scope(self, scope: Scope, variables: Mapping[str, Any]) -> dict[str, Any]:
        taken = {}
        for name, value in list(variables.items()):
            if not self._wanted(scope, name, value):
                continue
            try:
                taken[name] = self._take(value, f"{scope.key}.{name}" if scope.key else name)
            except Unsaved as why:
                if name in scope.kept:
                    self.left_alone[name] = str(why)
        return taken

    def _wanted(self, scope: Scope, name: str, value: Any) -> bool:
        if name.startswith("__") or isinstance(value, (type, types.ModuleType, types.FunctionType)):
            return False
        if is_generator(value) or is_loader(value):
            return True
        if self._what is What.GENERATORS or is_dataset(value) or name in scope.dropped:
            return False
        if is_stateful(value):
            return self._what is What.ALL
        if name in scope.kept:
            return True
        if self._ours(type(value)):
            return name in scope.used
        return self._what is What.ALL and any(map(is_stateful, _members(value)))

    def _take(self, value: Any, path: str) -> dict[str, Any]:
        if _is_scalar(value):
            return {"is": "value", "of": value}
        if id(value) in self._numbers:
            return {"is": "same", "of": self._numbers[id(value)]}
        number = self._numbers[id(value)] = len(self._numbers)
        self._keeps.append(value)
        return {"n": number, **self._by_kind(value, path)}

    def _by_kind(self, value: Any, path: str) -> dict[str, Any]:
        if is_generator(value):
            return {"is": "generator", "of": self._own(_generator_state(value))}
        if is_loader(value):
            generators = _loader_generators(value)
            return {"is": "loader", "of": {k: self._own(_generator_state(g)) for k, g in generators.items()}}
        if _is_array(value):
            return {"is": "array", **self._array(value)}
        if is_stateful(value):
            if self._what is not What.ALL:
                raise Unsaved("its state is saved elsewhere")
            extra = self._module(value) if _is_module(value) else {}
            state = value.state_dict()
            if self._check and (found := _foreign(state, path)):
                raise BadInput(
                    f"the state of {path} has {found}, which cannot be saved without running code on restore; no step was made",
                    remedy="leave that out of its state_dict()",
                )
            return {"is": "state", "of": state, **extra}
        if _is_plain(value):
            return {"is": "data", "of": self._own(value)}
        return self._made_of(value, path)

    def _made_of(self, value: Any, path: str) -> dict[str, Any]:
        kind = type(value)
        if isinstance(value, (list, tuple, collections.deque)):
            return {"is": "items", "of": [self._take(v, f"{path}[{i}]") for i, v in enumerate(value)]}
        if isinstance(value, dict) and all(map(_is_scalar, value)):
            return {"is": "entries", "of": [[k, self._take(v, f"{path}[{k!r}]")] for k, v in value.items()]}
        if (self._ours(kind) or kind in (types.SimpleNamespace, argparse.Namespace)) and not is_dataset(
            value
        ):
            found = {}
            for name, member in getattr(value, "__dict__", {}).items():
                if isinstance(member, (type, types.ModuleType, types.FunctionType)) or is_dataset(member):
                    continue
                try:
                    found[name] = self._take(member, f"{path}.{name}")
                except Unsaved as why:
                    self.left_alone[f"{path}.{name}"] = str(why)
            return {"is": "attributes", "of": found}
        raise Unsaved(f"a {kind.__qualname__}")

    def _array(self, value: Any) -> dict[str, Any]:
        if not hasattr(value, "grad_fn"):
            return {"of": value.copy() if self._copied else value}
        # A result of the graph keeps its numbers; the graph ends with its iteration.
        own = value.detach() if value.grad_fn is not None else value
        taken: dict[str, Any] = {
            "of": own.detach().clone().requires_grad_(own.requires_grad) if self._copied else own
        }
        if not _is_here(value):
            taken["device"] = str(value.device)
        if self._grads and value.is_leaf and value.grad is not None:
            taken["grad"] = value.grad
        return taken

    def _module(self, module: Any) -> dict[str, Any]:
        """What a model is besides its state_dict: modes, counters, what is frozen, and gradients that are not used up."""
        numbers = {
            name: {k: v for k, v in vars(part).items() if type(v) in (bool, int, float)}
            for name, part in module.named_modules()
        }
        tensors = {
            name: {k: self._array(v) for k, v in vars(part).items() if _is_array(v) and _is_at_rest(v)}
            for name, part in module.named_modules()
        }
        passing = {
            name: {
                b: part._buffers[b]
                for b in part._non_persistent_buffers_set
                if part._buffers.get(b) is not None
            }
            for name, part in module.named_modules()
        }
        parameters = dict(module.named_parameters())
        return {
            "numbers": numbers,
            "tensors": {name: found for name, found in tensors.items() if found},
            "buffers": {name: buffers for name, buffers in passing.items() if buffers},
            "frozen": [name for name, p in parameters.items() if not p.requires_grad],
            "grads": {n: p.grad for n, p in parameters.items() if p.grad is not None}
            if self._grads
            else None,
        }

    def _own(self, value: Any) -> Any:
        return _copy(value) if self._copied else value


def _foreign(state: Any, path: str) -> str:
    """The first member that is no plain data. '' if all are."""
    if isinstance(state, dict):
        return next((found for key, v in state.items() if (found := _foreign(v, f"{path}[{key!r}]"))), "")
    if isinstance(state, (list, tuple, set, frozenset)):
        return next((found for i, v in enumerate(state) if (found := _foreign(v, f"{path}[{i}]"))), "")
    return "" if _is_scalar(state) or _is_array(state) else f"a {type(state).__qualname__} at {path}"


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value[:64]
    return list(value.values())[:64] if isinstance(value, dict) else ()


def _is_module(value: Any) -> bool:
    torch = _torch()
    return torch is not None and isinstance(value, torch.nn.Module)


def _copy(value: Any) -> Any:
    if _is_array(value):
        return value.detach().clone() if hasattr(value, "detach") else value.copy()
    if type(value) in (list, tuple):
        return type(value)(_copy(member) for member in value)
    if type(value) in (dict, collections.OrderedDict):
        return type(value)((key, _copy(member)) for key, member in value.items())
    return set(value) if type(value) is set else value


def bytes_in(taken: Any) -> int:
    """Of its arrays; what else there is, is small."""
    if _is_array(taken):
        return int(taken.nbytes)
    if isinstance(taken, Mapping):
        return sum(map(bytes_in, taken.values()))
    return sum(map(bytes_in, taken)) if isinstance(taken, (list, tuple)) else 0


# --- putting back --------------------------------------------------------------------------------------------


class Putting:
    """One restore. What it returns for a name is what that name must lead to. `copied` where what is put will be put again."""

    def __init__(self, *, copied: bool = False) -> None:
        self._copied = copied
        self._made: dict[int, Any] = {}

    def scope(self, scope: Scope, variables: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, taken in saved.items():
            # Bound anew by the loop and never changed: whoever else holds the old object must not see it change.
            rebound = name in scope.stored and name not in scope.mutated
            there = variables.get(name, MISSING)
            found[name] = self._put(
                there, taken, f"{scope.key}.{name}" if scope.key else name, rebound=rebound
            )
        return found

    def _put(self, there: Any, taken: Mapping[str, Any], path: str, *, rebound: bool = False) -> Any:
        kind, of = taken["is"], taken["of"]
        if kind == "value":
            return of
        if kind == "same":
            return self._made[of]
        if self._copied and kind in ("array", "data"):
            of = _copy(of)
            taken = {**taken, "of": of}
        made = self._by_kind(there, kind, of, taken, path, rebound)
        self._made[taken["n"]] = made
        return made

    def _by_kind(
        self, there: Any, kind: str, of: Any, taken: Mapping[str, Any], path: str, rebound: bool
    ) -> Any:
        if kind == "array":
            return self._put_array(there, taken, rebound)
        if kind == "data":
            return of if rebound else _into(there, of)
        if there is MISSING or there is None:
            return self._anew(kind, of, path)
        self._made[taken["n"]] = there  # before its parts: they may lead back to it
        if kind == "generator":
            _put_generator(there, of)
        elif kind == "loader":
            for name, generator in _loader_generators(there).items():
                if name in of:
                    _put_generator(generator, of[name])
        elif kind == "state":
            self._put_state(there, taken, path)
        elif kind == "items":
            before = list(there)
            after = [
                self._put(before[i] if i < len(before) else MISSING, m, f"{path}[{i}]")
                for i, m in enumerate(of)
            ]
            if isinstance(there, tuple):
                return type(there)(after) if type(there) is tuple else there
            there.clear()
            there.extend(after)
        elif kind == "entries":
            members = {key: self._put(there.get(key, MISSING), m, f"{path}[{key!r}]") for key, m in of}
            there.clear()
            there.update(members)
        else:
            for name, member in of.items():
                setattr(there, name, self._put(getattr(there, name, MISSING), member, f"{path}.{name}"))
        return there

    def _anew(self, kind: str, of: Any, path: str) -> Any:
        if kind == "items":
            return [self._put(MISSING, member, f"{path}[{i}]") for i, member in enumerate(of)]
        if kind == "entries":
            return {key: self._put(MISSING, member, f"{path}[{key!r}]") for key, member in of}
        if kind == "loader":
            return None
        raise BadInput(
            f"{path} was there when the run was saved, and is not there when its loop begins; nothing was overwritten",
            remedy="make it before the loop, or run the script as it was, or under another --name",
        )

    def _put_array(self, there: Any, taken: Mapping[str, Any], rebound: bool) -> Any:
        of = taken["of"]
        fits = (
            not rebound
            and _is_array(there)
            and type(there) is type(of)
            and there.dtype == of.dtype
            and tuple(there.shape) == tuple(of.shape)
        )
        if not fits:
            made = (
                of.detach().to(taken["device"]).requires_grad_(of.requires_grad) if "device" in taken else of
            )
        elif hasattr(there, "detach"):
            there.detach().copy_(of.detach())
            made = there
        else:
            there[...] = of
            made = there
        if "grad" in taken:
            made.grad = taken["grad"].to(made.device)
        return made

    def _put_state(self, there: Any, taken: Mapping[str, Any], path: str) -> None:
        try:
            there.load_state_dict(taken["of"])
        except (RuntimeError, ValueError, KeyError, TypeError) as e:
            raise BadInput(
                f"{path} does not fit what was saved of it: {str(e)[:300]}",
                remedy="run the script as it was, or under another --name",
            ) from e
        if "numbers" not in taken:
            return
        parts = dict(there.named_modules())
        for name, numbers in taken["numbers"].items():
            parts[name].__dict__.update(numbers)
        for name, tensors in taken["tensors"].items():
            for attribute, value in tensors.items():
                there_now = parts[name].__dict__.get(attribute, MISSING)
                parts[name].__dict__[attribute] = self._put_array(there_now, value, rebound=False)
        for name, buffers in taken["buffers"].items():
            for buffer, value in buffers.items():
                self._put_array(parts[name]._buffers[buffer], {"of": value}, rebound=False)
        frozen, grads = set(taken["frozen"]), taken["grads"]
        for name, parameter in there.named_parameters():
            parameter.requires_grad_(name not in frozen)
            if grads is not None:
                parameter.grad = grads[name].to(parameter.device) if name in grads else None


def _into(there: Any, of: Any) -> Any:
    """Into the container that is there, so that whoever else holds it sees it."""
    if isinstance(there, list) and isinstance(of, list):
        there[:] = [_into_array(there[i], v) if i < len(there) else v for i, v in enumerate(of)]
    elif isinstance(there, MutableMapping) and isinstance(of, dict):
        members = {key: _into_array(there[key], v) if key in there else v for key, v in of.items()}
        there.clear()
        there.update(members)
    elif isinstance(there, set) and isinstance(of, set):
        there.clear()
        there.update(of)
    else:
        return of
    return there


def _into_array(there: Any, of: Any) -> Any:
    if _is_array(of):
        return Putting()._put_array(there, {"of": of}, rebound=False)
    return _into(there, of) if type(there) is type(of) else of
