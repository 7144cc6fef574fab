"""A running program between two steps: its modules, its frames and its process, as one thing that is taken
and put back.

Rules of this file:
- The modules of a program are those of its own: the script and what it imports from outside the installed
  packages.
- Frames are read from the place where the step ends up to the program's first line. A program that is put
  back goes on from there in frames made anew, on top of those that stand there; these are never returned to.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import CO_GENERATOR
from typing import Any

from sublet.training.program_state import call_stack, functions
from sublet.training.program_state.anchors import Anchors, Paths, UnknownPart
from sublet.training.program_state.cpython import code_objects
from sublet.training.program_state.cpython.frame_memory import NotResumable, variables
from sublet.training.program_state.kinds import Edge, Kind, Parts
from sublet.training.program_state.live import TRACE_STATE, is_trace_state, loggers
from sublet.training.program_state.loader_workers import (
    WORKERS_ITERATOR,
    end_workers_of_the_beginning,
    is_workers_iterator,
)
from sublet.training.program_state.memory import LargeBlocks
from sublet.training.program_state.pickling import Restore, Taken, Taking
from sublet.training.program_state.process_state import (
    ForeignVariables,
    decimal_variable,
    names_set,
    put_process,
    speaks_of,
    take_process,
)
from sublet.training.program_state.references import finalizers
from sublet.training.program_state.sorting import Sorting

#: Of every module, and of what runs the program.
_OF_THE_MODULE = frozenset(
    (
        "__name__",
        "__doc__",
        "__package__",
        "__loader__",
        "__spec__",
        "__file__",
        "__cached__",
        "__builtins__",
        "__path__",
        "__annotations__",
        "__warningregistry__",  # saved with the process, for all modules
        "__sublet__",
    )
)


class NamespaceKind(Kind):
    """The variables of a module of the program's own. One that was imported in the loop is imported again."""

    def __init__(self) -> None:
        #: Variables of the script that nothing will read again before they are bound anew.
        self.dead: frozenset[str] = frozenset()

    def parts(self, thing: dict[str, Any]) -> Parts:
        return [(f".{name}", value) for name, value in list(thing.items()) if name not in _OF_THE_MODULE]

    def content(self, thing: dict[str, Any]) -> Any:
        dead = self.dead if thing.get("__name__") == "__main__" else ()
        return {
            name: value
            for name, value in list(thing.items())
            if name not in _OF_THE_MODULE and not (name in dead and call_stack.is_gone_unnoticed(value))
        }

    def bare(self, thing: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        name = thing["__name__"]
        return functions.imported_from, (name, functions.folder_of_import(name))

    @staticmethod
    def fill(thing: dict[str, Any], content: dict[str, Any]) -> None:
        for name in [name for name in thing if name not in _OF_THE_MODULE and name not in content]:
            del thing[name]
        order = [name for name in thing if name in content]
        if order != list(content)[: len(order)]:
            for name in order:
                del thing[name]
        thing.update(content)


class Program:
    """`ends_at` is the code of the frame below the program's first."""

    def __init__(
        self,
        is_own: Callable[[str], bool],
        ends_at: types.CodeType,
        further: Iterable[tuple[Callable[[type], bool], Kind]] = (),
    ) -> None:
        self._is_own = is_own
        self._ends_at = ends_at
        self._sorting = Sorting(is_own)
        self._sorting.further += [
            (is_workers_iterator, WORKERS_ITERATOR),
            (is_trace_state, TRACE_STATE),
            *further,
        ]
        self._namespace_kind = NamespaceKind()
        self._foreign = ForeignVariables(is_own)
        self._environment = dict(os.environ)
        self._anchors = Anchors(self._sorting)
        self._makes_finalizers = False
        self._taking: Taking | None = None
        self._large = LargeBlocks()
        self._beginning: list[types.FrameType] = []  # of a process that goes on in other frames

    # when the loop begins

    def begin(self, frame: types.FrameType, found: Mapping[str, Any] | None = None) -> list[UnknownPart]:
        """Number what is there. `found`: as another process numbered it."""
        modules = self._modules()
        codes = [code_objects.original(at.f_code)[0] for at in self.frames(frame)]
        files = [getattr(module, "__file__", None) for module in modules.values()]
        self._foreign.begin(names_set(codes, files))
        self._makes_finalizers = speaks_of("finalize", codes, files)
        self._anchors.namespaces(self._namespace_kind, [vars(module) for module in modules.values()])
        roots = list(self._roots(frame, modules))
        with call_stack.standing(self.frames(frame)):
            if found is None:
                self._anchors.walk(roots)
            else:
                self._sorting.ask_themselves = set(found["ask"])
                self._anchors.paths = Paths(*(list(column) for column in found["paths"]))
                self._anchors.follow(roots)
                self._beginning = self.frames(frame)
        self._taking = Taking(self._sorting, self._anchors)
        return self._anchors.unknown

    def measure(self, earlier: Mapping[str, str] | None = None) -> dict[str, str]:
        """The digests of large blocks as the script's beginning made them. `earlier`: in another process."""
        self._large.begin(self._anchors.memory())
        if earlier is not None:
            self._large.compare_with(earlier)
        return self._large.began

    def made_alike(self) -> None:
        """The script's beginning is known to make the same large blocks each time."""
        self._large.made_alike = set(self._large.began)

    def words(self, number: int) -> str:
        """The path of a numbered object."""
        return self._anchors.paths.words(number)

    def own_modules(self) -> list[str]:
        """The names of the modules that are saved."""
        return list(self._modules())

    @property
    def objects(self) -> int:
        """How many there were when the loop began."""
        return len(self._anchors.things)

    def numbering(self) -> dict[str, Any]:
        """For the next process, which finds the same objects by it."""
        paths = self._anchors.paths
        return {
            "ask": sorted(self._sorting.ask_themselves),
            "paths": [paths.before, paths.edges, paths.types],
        }

    def _modules(self) -> dict[str, types.ModuleType]:
        own = {
            name: module
            for name, module in list(sys.modules.items())
            if isinstance(module, types.ModuleType) and (name == "__main__" or self._is_own(name))
            if not functions.made_by_hand(module)
        }
        return {"__main__": own.pop("__main__"), **dict(sorted(own.items()))}

    def _finalizers(self) -> list[Any]:
        return finalizers(self._is_own, makes_them=self._makes_finalizers)

    def _made_modules(self) -> list[types.ModuleType]:
        found = sorted(name for name, module in list(sys.modules.items()) if functions.made_by_hand(module))
        return [sys.modules[name] for name in found if self._is_own(name)]

    def _roots(
        self, frame: types.FrameType, modules: Mapping[str, types.ModuleType]
    ) -> Iterator[tuple[Edge, Any]]:
        for name, module in modules.items():
            yield "" if name == "__main__" else name, vars(module)
        yield from ((f"(finalizer {at})", one) for at, one in enumerate(self._finalizers()))
        yield from ((f"(logger {one.name})", one) for one in loggers(self._is_own))
        yield from decimal_variable()
        for name, cls, attribute, value in self._foreign.added():
            yield ".".join(filter(None, (name, cls, attribute))), value
        for made in self._made_modules():
            yield made.__name__, made
        for at in self.frames(frame):
            for variable, value in variables(at):
                yield f"{at.f_code.co_qualname}.{variable}", value

    # between two steps

    def frames(self, frame: types.FrameType) -> list[types.FrameType]:
        """The program's, innermost first."""
        found: list[types.FrameType] = []
        at: types.FrameType | None = frame
        while at is not None and at.f_code not in (self._ends_at, call_stack.go_on.__code__):
            if at.f_code.co_filename != call_stack.__file__:
                found.append(at)
            at = at.f_back
        return found

    def stack(self, frame: types.FrameType) -> list[Any]:
        """Innermost first: frames as parts, and generators that are running."""
        found: list[Any] = []
        inner: types.FrameType | None = None
        for at in self.frames(frame):
            if at.f_code.co_flags & CO_GENERATOR:
                found.append(call_stack.generator_of(at))
            else:
                found.append(functions.suspended_as_parts(call_stack.read(at, inner)))
            inner = at
        return found

    def take(self, frame: types.FrameType) -> Taken:
        with call_stack.standing(self.frames(frame)):
            return self._take(frame)

    def _take(self, frame: types.FrameType) -> Taken:
        assert self._taking is not None, "it has begun"
        self._anchors.loosen()
        self._anchors.let_go()
        self._anchors.forget_the_gone()
        self._namespace_kind.dead = self._dead_variables(frame)
        modules = self._modules()
        self._anchors.namespaces(self._namespace_kind, [vars(module) for module in modules.values()])
        taken = self._taking.take(
            {
                "stack": self.stack(frame),
                "modules": {name: vars(module) for name, module in modules.items()},
                "made": self._made_modules(),
                "finalizers": self._finalizers(),
                "loggers": loggers(self._is_own),
                "foreign": self._foreign.take(),
                "process": take_process(self._environment),
            }
        )
        taken.same = self._large.still_the_same(taken.blocks)
        for name in taken.same:
            del taken.blocks[name]
        return taken

    def _dead_variables(self, frame: types.FrameType) -> frozenset[str]:
        """Variables of the script, such as its last batch, that are bound anew before anything reads them."""
        outermost = self.frames(frame)[-1]
        code, moved = code_objects.original(outermost.f_code)
        if outermost.f_globals is not vars(sys.modules["__main__"]) or code.co_flags & 1:
            return frozenset()
        used = code_objects.names_used_inside(code)
        if code_objects.may_read_all({*used, *code.co_names}):
            return frozenset()
        analysis = code_objects.analysed(code)
        at = analysis.instruction(outermost.f_lasti - moved)
        return analysis.bound_anew_after(at.offset) - used

    def put(self, taken: Taken) -> Callable[[Callable[[], Any]], Any]:
        """Make everything as it was. Returns what runs on from there: it is given what answers the call that
        the innermost frame waits for."""
        end_workers_of_the_beginning()
        for name, digest in taken.same.items():
            if self._large.began.get(name) != digest:
                path = self._anchors.paths.words(int(name[1:]))
                raise NotResumable(
                    f"{path} is not what it was when this job began, and was not saved because it was large "
                    "and never changed; nothing was run",
                    remedy="give the script the same data, or seed what makes it, and begin a new job with "
                    "another --name",
                )
        for finalizer in self._finalizers():  # of the beginning's
            finalizer.detach()
        roots = Restore(self._anchors, taken.data, taken.recipes, taken.blocks, taken.sizes).put()
        self._anchors.note_holders()
        self._anchors.loosen()
        self._foreign.put(roots["foreign"])
        put_process(roots["process"], self._environment)
        stack = [functions.suspended_from(one) if isinstance(one, tuple) else one for one in roots["stack"]]
        while self._beginning:
            call_stack.let_go(self._beginning.pop())
        return lambda answer: call_stack.go_on(stack, answer)
