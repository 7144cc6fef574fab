"""Two states of one program compared, without making any of their objects.

Rules of this file:
- What is compared is the saved form: which object is which is compared too, names of functions and classes
  stand for themselves, and nothing of the program runs.
- A difference has the path that the program's own reader would write, the nearest to a variable first.
- Memory is compared by its bytes. A difference in an array says which one it is.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sublet.training.program_state.cpython.code_objects import slot_names
from sublet.training.program_state.functions import ASKED_WHEN_MADE, code_of

_MOST_DIFFERENCES = 200
_GENERATORS = {"random": "Python", "numpy": "NumPy", "torch": "torch"}
#: Functions that give an array or a tensor its memory, and which argument names the block.
_BLOCK_OF = {"new_array": 1, "view_of_block": 4, "mapped_file": 5}


@dataclass(frozen=True, slots=True)
class Difference:
    path: str
    before: str
    now: str
    sort: str  # "number", "text", "array", "random" or "structure"

    def __str__(self) -> str:
        return f"{self.path}: {self.before} before, {self.now} now"


#: What is known of a thread of Python, and which of that is the process's.
_OF_THREADS = frozenset(("_target", "_daemonic", "_started", "_ident"))
_NUMBERED_BY_THE_SYSTEM = frozenset(("_ident", "_native_id"))
#: What a function is made of besides its code, in the order of its content.
_OF_FUNCTION = (".__defaults__", ".__kwdefaults__", "", ".__closure__", None, ".__doc__", ".__annotations__")


class Inert:
    """In the place of any object: what would be called, and with what."""

    called = ""

    def __new__(cls, *args: Any) -> Any:
        if cls.called.endswith(".fill") and len(args) == 2 and isinstance(args[0], Inert):
            args[0].state, args[0].filled_by = args[1], cls.called
            return args[0]
        made = object.__new__(cls)
        made.args, made.state, made.members, made.filled_by = args, None, [], ""
        return made

    args: tuple[Any, ...]
    state: Any
    members: list[Any]
    filled_by: str

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, member: Any) -> None:
        self.members.append(member)

    add = append

    def extend(self, members: Any) -> None:
        self.members.extend(members)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.members.append((key, value))

    def __call__(self, *args: Any) -> Any:
        made = object.__new__(_Called)
        made.args, made.state, made.members, made.filled_by = (self, *args), None, [], ""
        return made


class _Called(Inert):
    called = "()"


def _numbered(number: int) -> type[Inert]:
    """In the place of a numbered object, whose content is in the state's list. A class, because it may stand
    for one."""
    return type("Numbered", (Inert,), {"called": f"#{number}", "number": number})


def _number_of(thing: Any) -> int | None:
    return getattr(thing, "number", None) if isinstance(thing, type) else None


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._classes: dict[tuple[str, str], type[Inert]] = {}
        self._numbered: dict[int, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._classes:
            self._classes[key] = type(name, (Inert,), {"called": f"{module}.{name}"})
        return self._classes[key]

    def persistent_load(self, number: Any) -> Any:
        if isinstance(number, str):
            return self.find_class(number, "__dict__")
        if isinstance(number, tuple):
            if len(number) == 1:
                return f"(the id of object {number[0]})"
            first, second = number
            # A constant, which may be the name of the module of a class; or a number that is none.
            return f"({first}.{second})" if isinstance(first, str) else number
        if number not in self._numbered:
            self._numbered[number] = _numbered(number)
        return self._numbered[number]


class StateToCompare:
    """One saved or taken state, read without making it."""

    def __init__(self, data: bytes, block: Callable[[str], Any], words: Callable[[int], str]) -> None:
        """`block` gives the digest of a block of memory by name; `words` the path of a numbered object."""
        unpickler = _InertUnpickler(data)
        self.roots = unpickler.load()
        self.contents: dict[int, Any] = {}
        self.kinds: dict[int, str] = {}
        with contextlib.suppress(EOFError):
            while True:
                for number, fill, content in unpickler.load():
                    if isinstance(number, frozenset):
                        continue
                    self.kinds[number] = _called(fill)
                    self.contents[number] = content
        self.block = block
        self.words = words


def _called(thing: Any) -> str:
    if isinstance(thing, type) and issubclass(thing, Inert):
        return thing.called
    return type(thing).called if isinstance(thing, Inert) else ""


def differences(before: StateToCompare, now: StateToCompare) -> list[Difference]:
    return list(_Comparison(before, now).run())


@dataclass(frozen=True, slots=True)
class _Pair:
    path: str
    before: Any
    now: Any


class _Comparison:
    def __init__(self, before: StateToCompare, now: StateToCompare) -> None:
        self._before, self._now = before, now
        self._same: dict[int, int] = {}  # id of one before to id of the one now
        self._numbers: dict[int, int] = {}
        self._crossed: dict[int, int] = {}  # a number on one side, and the new object on the other
        self._blocks: dict[str, str] = {}
        self._seen: set[int] = set()
        self._held: list[Any] = []  # so that no other is where one was

    def run(self) -> Iterator[Difference]:
        waiting = deque([_Pair("", self._before.roots, self._now.roots)])
        found = 0
        while waiting and found < _MOST_DIFFERENCES:
            pair = waiting.popleft()
            for result in self._compare(pair):
                if isinstance(result, _Pair):
                    waiting.append(result)
                else:
                    found += 1
                    yield result

    def _compare(self, pair: _Pair) -> Iterator[_Pair | Difference]:
        path, before, now = pair.path, pair.before, pair.now
        of_before, of_now = _number_of(before), _number_of(now)
        if of_before is not None and of_now is not None:
            yield from self._numbered(path, of_before, of_now)
            return
        if (of_before is None) is not (of_now is None) and (crossed := self._cross(before, now)) is not None:
            yield from self._content(path, *crossed) if crossed else ()
            return
        if type(before) is not type(now) and _called(before) != _called(now):
            yield self._differ(path, before, now, "structure")
            return
        if _has_identity(before):
            known = self._same.get(id(before))
            if known is not None:
                if known != id(now):
                    yield self._differ(path, "one object", "another object", "structure")
                return
            if id(now) in self._seen:
                yield self._differ(path, "another object", "one object", "structure")
                return
            self._same[id(before)] = id(now)
            self._seen.add(id(now))
            self._held.append((before, now))
        if isinstance(before, type):
            if _number_of(before) != _number_of(now):
                yield self._differ(path, before, now, "structure")
            return  # the same function or class
        if isinstance(before, Inert):
            yield from self._inert(path, before, now)
        elif isinstance(before, dict):
            yield from self._dict(path, before, now)
        elif isinstance(before, (list, tuple)):
            yield from self._sequence(path, before, now)
        elif isinstance(before, (set, frozenset)):
            if sorted(map(_plain, before)) != sorted(map(_plain, now)):
                yield self._differ(path, before, now, "structure")
        elif not _equal(before, now):
            sort = "number" if isinstance(before, (int, float, complex)) else "text"
            yield self._differ(path, before, now, sort)

    def _numbered(self, path: str, before: int, now: int) -> Iterator[_Pair | Difference]:
        if before >= 0 or now >= 0:
            if before != now or before in self._crossed:
                yield self._differ(path, self._named(before), self._named(now), "structure")
                return
            if before in self._numbers:
                return
            self._numbers[before] = now
            shown = self._before.words(before) or path
        else:
            if before in self._numbers:
                if self._numbers[before] != now:
                    yield self._differ(path, "one object", "another object", "structure")
                return
            self._numbers[before] = now
            shown = path
        if self._before.kinds.get(before) != self._now.kinds.get(now):
            yield self._differ(shown, self._before.kinds.get(before), self._now.kinds.get(now), "structure")
            return
        kind = _kind(self._before.kinds.get(before) or "")
        yield from self._content(shown, kind, self._before.contents.get(before), self._now.contents.get(now))

    def _cross(self, before: Any, now: Any) -> tuple[Any, ...] | None:
        """An object that is made where one of the beginning was, of a type that nothing can refer to weakly,
        goes by its number; made elsewhere it has none. Its kind and both contents; () if they were compared;
        None if it is nothing of that sort, or another object has the number."""
        of_before = _number_of(before)
        number, state, other = (
            (of_before, self._before, now) if of_before is not None else (_number_of(now), self._now, before)
        )
        assert number is not None
        kind, content = _kind(state.kinds.get(number) or ""), state.contents.get(number)
        if type(other) is not {"ListKind": list, "DictKind": dict}.get(kind):
            if kind != "CellKind" or not isinstance(other, Inert) or _kind(other.filled_by) != kind:
                return None
            other = other.state
        if number < 0 or number in self._numbers or type(content) is not type(other):
            return None
        if number in self._crossed:
            return () if self._crossed[number] == id(other) else None
        self._crossed[number] = id(other)
        self._held.append(other)
        return (kind, content, other) if of_before is not None else (kind, other, content)

    def _named(self, number: int) -> str:
        return self._before.words(number) if number >= 0 else "a new object"

    def _content(self, path: str, kind: str, before: Any, now: Any) -> Iterator[_Pair | Difference]:
        """The content of an object, with the words of its kind."""
        if kind == "InstanceKind":
            yield _Pair(path, before[0], now[0])
            yield _Pair(path, before[1], now[1])
            yield _Pair(path, before[2], now[2])
            yield _Pair(f"{path}.__class__", before[3], now[3])
        elif kind == "TensorKind":
            yield from self._view(path, before[0], now[0])
            for at, name in (
                (1, ".requires_grad"),
                (2, ".grad"),
                (3, ""),
                (4, "._backward_hooks"),
                (5, ".grad_fn"),
            ):
                yield _Pair(f"{path}{name}", before[at], now[at])
        elif kind == "NumpyArrayKind":
            yield from self._array(path, before, now)
        elif kind in ("PythonRandomKind", "BitGeneratorKind"):  # what it has besides may be arrays
            yield from self._random(path, before[0], now[0])
            yield _Pair(f"{path}.seed_seq" if kind == "BitGeneratorKind" else path, before[1], now[1])
        elif kind in ("RandomStateKind", "DeviceGeneratorKind"):
            yield from self._random(path, before, now)
        elif kind == "FunctionKind":
            if (before[4] is None) != (now[4] is None) or (now[4] and not _same_code(before[4], now[4])):
                yield Difference(path, "one function", "another", "structure")
            for at, of in enumerate(_OF_FUNCTION):
                if of is not None:
                    yield _Pair(f"{path}{of}", before[at], now[at])
        elif kind == "ClassKind":
            yield _Pair(path, _as_made(before[0]), _as_made(now[0]))
            yield _Pair(f"{path}.__bases__", before[1], now[1])
            yield _Pair(f"{path} (registered)", before[2], now[2])
        elif kind == "WorkersIteratorKind":
            yield from self._workers(path, before, now)
        elif kind == "NamespaceKind":  # a variable that nobody reads is not saved, and is bound again later
            yield _Pair(path, dict(sorted(before.items())), dict(sorted(now.items())))
        else:
            yield _Pair(path, before, now)

    def _random(self, path: str, before: Any, now: Any) -> Iterator[Difference]:
        if _plain(before) != _plain(now):
            yield Difference(path, "one random state", "another", "random")

    def _workers(self, path: str, before: Any, now: Any) -> Iterator[_Pair | Difference]:
        """A DataLoader's workers: each has a state of its own, taken in its process."""
        old, new = before.get("states", {}), now.get("states", {})
        yield _Pair(path, _without_chance(before), _without_chance(now))
        for worker in sorted(old.keys() | new.keys()):
            found = [_worker_state(states.get(worker)) for states in (old, new)]
            if found[0][1] != found[1][1]:
                yield Difference(f"{path} (worker {worker})", "one random state", "another", "random")
            if found[0][0] is not None and found[1][0] is not None:
                for one in differences(found[0][0], found[1][0]):
                    yield Difference(f"{path} (worker {worker}): {one.path}", one.before, one.now, one.sort)

    def _array(self, path: str, before: Any, now: Any) -> Iterator[_Pair | Difference]:
        if isinstance(before[0], tuple) and isinstance(now[0], tuple):
            yield from self._block(path, before[0][0], now[0][0])
        else:
            yield _Pair(path, before[0], now[0])
        yield _Pair(path, before[1:], now[1:])

    def _view(self, path: str, before: Any, now: Any) -> Iterator[_Pair | Difference]:
        if before[1:7] != now[1:7]:
            yield self._differ(path, _shape(before), _shape(now), "structure")
        else:
            yield from self._block(path, before[0], now[0])

    def _block(self, path: str, before: str, now: str) -> Iterator[Difference]:
        if self._blocks.setdefault(before, now) != now:
            yield Difference(path, "a view of one memory", "of another", "structure")
        elif before and self._before.block(before) != self._now.block(now):
            yield Difference(path, "these numbers", "others", "array")

    def _inert(self, path: str, before: Inert, now: Inert) -> Iterator[_Pair | Difference]:
        name = type(before).called.rpartition(".")[2]
        if name in ("suspended_from", "generator_from"):
            yield from self._suspended(path, before.args[0], now.args[0])
            return
        if name in ("new_tensor", "storage_of"):
            at = 1 if name == "new_tensor" else 0
            yield from self._view(path, before.args[at], now.args[at])
        elif name == "code_of":
            if not _same_code(before.args[0], now.args[0]):
                yield Difference(path, "one code", "another", "structure")
        elif name == "bare_function":
            if not _same_code(before.args[0], now.args[0]):
                yield Difference(path, "one function", "another", "structure")
            yield _Pair(path, before.args[1:], now.args[1:])
        elif name in ("HashedMembers", "new_frozenset"):
            yield from self._hashed(path, before.args[-2:], now.args[-2:])
            return
        elif name in _BLOCK_OF and len(before.args) > _BLOCK_OF[name]:
            at = _BLOCK_OF[name]
            yield from self._block(path, before.args[at], now.args[at])
            yield _Pair(path, before.args[:at] + before.args[at + 1 :], now.args[:at] + now.args[at + 1 :])
        else:
            yield _Pair(path, before.args, now.args)
        yield _Pair(path, tuple(before.members), tuple(now.members))
        if before.filled_by and before.filled_by == now.filled_by:
            yield from self._content(path, _kind(before.filled_by), before.state, now.state)
        else:
            yield _Pair(path, before.state, now.state)

    def _hashed(self, path: str, before: Any, now: Any) -> Iterator[_Pair | Difference]:
        """Members in their order; those that are found by their address have none that counts."""
        (old, old_layout), (new, new_layout) = before, now
        by_address = (
            old_layout is not None and new_layout is not None and _hashes(old_layout) != _hashes(new_layout)
        )
        if not by_address:
            yield _Pair(path, old, new)
            return
        # Those that were there when the loop began are the same ones; the others are of the same sorts.
        if sorted(map(_sort_of_member, old)) != sorted(map(_sort_of_member, new)):
            yield self._differ(path, old, new, "structure")

    def _suspended(self, path: str, before: Any, now: Any) -> Iterator[_Pair | Difference]:
        same = (
            before is not None and now is not None and before[1] == now[1] and _same_code(before[0], now[0])
        )
        if not same:
            if (before is None) != (now is None) or before is not None:
                yield Difference(path, _place(before), _place(now), "structure")
            return
        names = _slot_names(before[0])
        scope = code_of(before[0]).co_qualname
        for at, (old, new) in enumerate(zip(before[2], now[2], strict=True)):
            yield _Pair(f"{scope}.{names[at]}", old, new)
        yield _Pair(f"{scope} (its stack)", before[3], now[3])

    def _dict(
        self, path: str, before: Mapping[Any, Any], now: Mapping[Any, Any]
    ) -> Iterator[_Pair | Difference]:
        if path == "" and "stack" in before and "modules" in before:
            yield from self._program(before, now)
            return
        old_keys, new_keys = list(map(_key, before)), list(map(_key, now))
        if old_keys != new_keys:
            yield Difference(path or "the variables", *_how_keys_differ(old_keys, new_keys), "structure")
            return
        of_a_thread = before.keys() >= _OF_THREADS
        for (key, old), new in zip(before.items(), now.values(), strict=True):
            if of_a_thread and key in _NUMBERED_BY_THE_SYSTEM:
                continue
            edge = f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{_key(key)}]"
            yield _Pair(f"{path}{edge}".removeprefix("."), old, new)

    def _program(self, before: Any, now: Any) -> Iterator[_Pair | Difference]:
        if len(before["stack"]) != len(now["stack"]):
            yield Difference(
                "the call stack", f"{len(before['stack'])} frames", f"{len(now['stack'])}", "structure"
            )
            return
        for name, module in before["modules"].items():
            if name in now["modules"]:
                yield _Pair("" if name == "__main__" else name, module, now["modules"][name])
        for old, new in zip(before["stack"], now["stack"], strict=True):
            if isinstance(old, tuple) and isinstance(new, tuple):
                yield from self._suspended("the call stack", old, new)
            else:
                yield _Pair("the call stack", old, new)
        yield _Pair("(installed modules)", before["foreign"], now["foreign"])
        for name, old in before["process"].items():
            new = now["process"][name]
            if name in ("random", "numpy", "torch"):
                if _plain(old) != _plain(new):
                    yield Difference(
                        f"the random numbers of {_GENERATORS[name]}", "one state", "another", "random"
                    )
            else:
                yield _Pair(f"(the process's {name})", old, new)

    def _sequence(self, path: str, before: Any, now: Any) -> Iterator[_Pair | Difference]:
        if len(before) != len(now):
            yield self._differ(path, f"{len(before)} members", f"{len(now)}", "structure")
            return
        for at, (old, new) in enumerate(zip(before, now, strict=True)):
            yield _Pair(f"{path}[{at}]", old, new)

    def _differ(self, path: str, before: Any, now: Any, sort: str) -> Difference:
        return Difference(path or "the program", _short(before), _short(now), sort)


def _as_made(attributes: dict[str, Any]) -> dict[str, Any]:
    """Of a class that is made anew: what its making looks at is put in last."""
    last = [name for name in attributes if name in ASKED_WHEN_MADE]
    return {name: attributes[name] for name in [*(n for n in attributes if n not in last), *sorted(last)]}


def _without_chance(saved: dict[str, Any]) -> dict[str, Any]:
    """Of a loader's iterator: how many batches came before their turn is chance, and states have their own
    rules."""
    fields = {name: value for name, value in saved["fields"].items() if name != "_tasks_outstanding"}
    return {**{name: value for name, value in saved.items() if name != "states"}, "fields": fields}


def _worker_state(state: bytes | None) -> tuple[StateToCompare | None, Any]:
    if state is None:
        return None, None
    data, _, small, _, numbering, numbers = pickle.loads(state)
    if data is None:
        return None, repr(numbers)
    return StateToCompare(data, small.get, lambda number: str(numbering[1][number])), repr(numbers)


def _kind(fill: str) -> str:
    return fill.rpartition(".fill")[0].rpartition(".")[2]


def _has_identity(thing: Any) -> bool:
    """Whether it matters which of two equal ones it is. What is only called again is a value, or as good as
    one."""
    if isinstance(thing, Inert):
        return bool(thing.filled_by)
    return isinstance(thing, (list, dict, set, bytearray))


def _how_keys_differ(before: list[str], now: list[str]) -> tuple[str, str]:
    lost, new = [key for key in before if key not in now], [key for key in now if key not in before]
    if lost or new:
        return f"{', '.join(lost[:3]) or 'nothing'} besides", f"{', '.join(new[:3]) or 'nothing'}"
    at = next(at for at, key in enumerate(before) if key != now[at])
    return f"{before[at]} in place {at}", now[at]


def _same_code(before: bytes, now: bytes) -> bool:
    """The same code may be written in two ways: references are counted while it is."""
    return before == now or code_of(before) == code_of(now)


def _equal(before: Any, now: Any) -> bool:
    if isinstance(before, float) and isinstance(now, float):
        return before.hex() == now.hex() and repr(before) == repr(now)
    return type(before) is type(now) and bool(before == now)


def _plain(content: Any) -> str:
    return repr(_unmade(content))


_DEEPEST = 40


def _unmade(content: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        return "…"
    if isinstance(content, Inert):
        return (
            type(content).called,
            _unmade(content.args, depth + 1),
            _unmade(content.state, depth + 1),
            _unmade(content.members, depth + 1),
        )
    if isinstance(content, (list, tuple)):
        return [_unmade(member, depth + 1) for member in content]
    if isinstance(content, dict):
        return [(_unmade(k, depth + 1), _unmade(v, depth + 1)) for k, v in content.items()]
    return content.called if isinstance(content, type) and issubclass(content, Inert) else content


def _slot_names(code: bytes) -> list[str]:
    return slot_names(code_of(code))


def _place(suspended: Any) -> str:
    if suspended is None:
        return "over"
    code = code_of(suspended[0])
    return f"{code.co_qualname} at instruction {suspended[1]}"


def _key(key: Any) -> str:
    number = _number_of(key)
    return f"object {number}" if number is not None else repr(_unmade(key))


def _shape(view: Any) -> str:
    return f"{view[2]} {list(view[4])}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(_unmade(value))
    return text if len(text) <= 80 else f"{text[:77]}…"


#: Places in a list are one place, for what is said to vary: `times[17]` and `times[18]` vary alike.
_INDEX = re.compile(r"\[\d+\]")


def pattern_of(path: str) -> str:
    return _INDEX.sub("[…]", path)


def _hashes(layout: Inert) -> Any:
    return layout.args[3]


def _sort_of_member(member: Any) -> str:
    number = _number_of(member)
    if number is not None:
        return f"object {number}" if number >= 0 else "an object"
    return _called(member) or _plain(member)
