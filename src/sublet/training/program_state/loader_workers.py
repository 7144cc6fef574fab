"""torch's DataLoader with workers, as a part of a program that is saved: which batches were handed out, which
are under way, and what each worker's own state was after the last batch of it that was handed out.

Rules of this file:
- A worker sends its state along with each batch after which it changed: its random numbers, and what its
  dataset, transforms and iterator hold. A batch that is under way when the program is saved is made again.
- New workers begin from these states, so no batch is loaded only to be thrown away.
- What a worker holds is looked into up to a size. What is larger is compared now and then, and a worker that
  changes it is refused.
"""

from __future__ import annotations

import dis
import itertools
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from sublet.core.errors import BadInput
from sublet.training.program_state.anchors import Anchors, Paths
from sublet.training.program_state.functions import generators_are_left_out
from sublet.training.program_state.kinds import Kind, Parts
from sublet.training.program_state.memory import digest_of_holder, numpy_here, torch_here
from sublet.training.program_state.pickling import CannotBeSaved, Restore, Taking
from sublet.training.program_state.sorting import Sorting

#: A worker with more objects than this is not looked into.
MOST_OBJECTS = 20_000
#: Memory below this is sent along when it changed; the rest is compared each so many batches.
SMALL_BYTES = 1 << 16
COMPARED_EACH = 64
MOST_COMPARED_BYTES = 1 << 24
#: How many batches have come back, but not in their turn, is a matter of time: it is counted anew.
_FIELDS = (
    "_rcvd_idx",
    "_send_idx",
    "_workers_status",
    "_num_yielded",
    "_base_seed",
    "_shared_seed",
    "_IterableDataset_len_called",
)


class Told:
    """A batch, and what the worker's state is after it."""

    def __init__(self, batch: Any, state: bytes | None, refused: str = "") -> None:
        self.batch, self.state, self.refused = batch, state, refused

    def pin_memory(self, device: Any = None) -> Told:
        pin = import_module("torch.utils.data._utils.pin_memory").pin_memory
        return Told(pin(self.batch, device), self.state, self.refused)


# --- in a worker --------------------------------------------------------------------------------------------


class WorkerBegins:
    """The `worker_init_fn`: the user's own, and then the worker's fetching is watched."""

    def __init__(
        self, own: Callable[[int], Any] | None, states: dict[int, bytes], modules: list[str]
    ) -> None:
        self._own, self._states, self._modules = own, states, modules

    def __call__(self, worker: int) -> None:
        if self._own is not None:
            self._own(worker)
        kinds = import_module("torch.utils.data.dataloader")._DatasetKind
        plain = kinds.create_fetcher
        begun = [False]

        def create_fetcher(*arguments: Any) -> Any:
            state = None if begun[0] else self._states.get(worker)
            begun[0] = True
            return WatchedFetcher(plain(*arguments), state, self._modules, worker)

        kinds.create_fetcher = staticmethod(create_fetcher)


class WatchedFetcher:
    """Fetches as torch's fetcher does, and tells the worker's state."""

    def __init__(self, fetcher: Any, state: bytes | None, modules: list[str], worker: int) -> None:
        self._fetcher = fetcher
        self._watch = WorkerState(fetcher, modules, worker)
        if state is not None:
            self._watch.put(state)

    def fetch(self, index: Any) -> Told:
        batch = self._fetcher.fetch(index)
        return Told(batch, *self._watch.take())


class WorkerState:
    """What a worker carries from batch to batch."""

    def __init__(self, fetcher: Any, modules: list[str], worker: int) -> None:
        self._fetcher = fetcher
        self._worker = worker
        own = frozenset(modules)
        self._sorting = Sorting(lambda name: name == "__main__" or name in own)
        self._anchors = Anchors(self._sorting)
        self._told: bytes | None = None
        self._batches = 0
        self._large: dict[str, str] = {}
        self._number(None)

    def _number(self, paths: Paths | None) -> None:
        roots = list(self._roots())
        self._anchors = Anchors(self._sorting, paths)
        if paths is None:
            self._anchors.walk(roots)
        else:
            self._anchors.follow(roots)
        self._looked_into = len(self._anchors.things) <= MOST_OBJECTS and not self._anchors.unknown
        self._taking = Taking(self._sorting, self._anchors) if self._looked_into else None

    def _roots(self) -> Iterator[tuple[str, Any]]:
        fetcher = self._fetcher
        roots = {"dataset": fetcher.dataset, "collate": fetcher.collate_fn}
        if hasattr(fetcher, "dataset_iter"):
            roots["iterator"] = fetcher.dataset_iter
        yield from roots.items()
        yield from globals_used_by(roots, self._sorting)

    def take(self) -> tuple[bytes | None, str]:
        """The state, if it changed since it was told."""
        self._batches += 1
        numbers = _random_states()
        if self._taking is None:
            state = pickle.dumps((None, None, {}, {}, None, numbers))
            return self._changed(state), ""
        try:
            taken = self._taking.take(dict(self._roots()))
        except CannotBeSaved as error:
            return None, f"{error} in a DataLoader worker cannot be saved"
        small = {n: bytes(b) for n, b in taken.blocks.items() if taken.sizes[n] <= SMALL_BYTES}
        refused = self._compare({n: b for n, b in taken.blocks.items() if n not in small})
        paths = self._anchors.paths
        numbering = (paths.before, paths.edges, paths.types, sorted(self._sorting.ask_themselves))
        state = pickle.dumps((taken.data, taken.recipes, small, taken.sizes, numbering, numbers))
        return self._changed(state), refused

    def _changed(self, state: bytes) -> bytes | None:
        if state == self._told:
            return None
        self._told = state
        return state

    def _compare(self, large: dict[str, Any]) -> str:
        """Memory that is too large to be sent with each batch must stay what it was."""
        if (
            sum(block.nbytes for block in large.values()) > MOST_COMPARED_BYTES
            and self._batches % COMPARED_EACH
        ):
            return ""
        for name, block in large.items():
            digest = digest_of_holder(block)
            if self._large.setdefault(name, digest) != digest:
                return f"the dataset changes an array of {block.nbytes:,} bytes in its workers"
        return ""

    def put(self, state: bytes) -> None:
        data, recipes, small, sizes, numbering, numbers = pickle.loads(state)
        if data is not None:
            self._sorting.ask_themselves = set(numbering[3])
            self._number(Paths(*numbering[:3]))
            saved = {
                name: import_module("numpy").frombuffer(block, dtype="uint8") for name, block in small.items()
            }
            roots = Restore(self._anchors, data, recipes, saved, sizes).put()
            if "iterator" in roots:
                self._fetcher.dataset_iter = roots["iterator"]
        _put_random_states(numbers)


def _random_states() -> tuple[Any, Any, Any]:
    numpy, torch = numpy_here(), torch_here()
    return (
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
        bytes(torch.get_rng_state().numpy()),
    )


def _put_random_states(states: tuple[Any, Any, Any]) -> None:
    numpy, torch = numpy_here(), torch_here()
    random.setstate(states[0])
    if states[1] is not None and numpy is not None:
        numpy.random.set_state(states[1])
    torch.set_rng_state(torch.frombuffer(bytearray(states[2]), dtype=torch.uint8))


def globals_used_by(roots: dict[str, Any], sorting: Sorting) -> Iterator[tuple[str, Any]]:
    """The global variables that own functions and classes, reachable from there, name."""
    probe = Anchors(sorting)
    probe.walk(roots.items())
    if len(probe.things) > MOST_OBJECTS:
        return
    functions = [thing for thing in probe.things if isinstance(thing, FunctionType)]
    for thing in probe.things:
        cls = type(thing)
        if sorting.is_own(cls.__module__):
            functions += [member for member in vars(cls).values() if isinstance(member, FunctionType)]
    found: dict[str, Any] = {}
    for function in functions:
        module = function.__module__
        if module and sorting.is_own(module):
            for name in _names_in(function.__code__):
                if name in function.__globals__:
                    found[f"{module}.{name}"] = function.__globals__[name]
    yield from sorted(found.items(), key=lambda pair: pair[0])


def _names_in(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


# --- in the program -----------------------------------------------------------------------------------------

_ALIVE: weakref.WeakSet[Any] = weakref.WeakSet()
_CLASSES: list[type] = []


class WorkersIterator:
    """torch's own iterator over a loader with workers, which knows what it has sent and what came back. Mixed
    into torch's class by `watch_loaders`, once torch is there."""

    #: The names of the program's own modules, for the workers.
    own_modules: Callable[[], list[str]]

    def __init__(self, loader: Any) -> None:
        self._pending: Any = None
        self._start(loader, {}, None)

    def _start(self, loader: Any, states: dict[int, bytes], seed: int | None) -> None:
        self._loader, self._states, self._fixed_seed = loader, dict(states), seed
        self._sent: dict[int, Any] = {}
        self._index: Any = None
        watching = WorkerBegins(loader.worker_init_fn, states, type(self).own_modules())
        self._torchs.__init__(_WithInit(loader, watching))
        _ALIVE.add(self)

    @property
    def _torchs(self) -> Any:
        """This iterator with what torch's class does."""
        return super()

    @property
    def _fields(self) -> Any:
        """This iterator with torch's attributes, which are not declared."""
        return self

    @property
    def _base_seed(self) -> int:
        return self._seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self._seed = drawn if self._fixed_seed is None else self._fixed_seed

    def _next_index(self) -> Any:
        self._index = self._torchs._next_index()
        return self._index

    def _try_put_index(self) -> None:
        before = self._fields._send_idx
        self._torchs._try_put_index()
        if self._fields._send_idx != before:
            self._sent[before] = self._index

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        for number in [n for n in self._sent if n not in self._fields._task_info]:
            del self._sent[number]
        if isinstance(data, Told):
            if data.refused:
                raise BadInput(
                    f"{data.refused}, and could not be continued exactly after a loss",
                    remedy="keep what changes in the training process, or use workers that only read",
                )
            if data.state is not None:
                self._states[worker_idx] = data.state
            data = data.batch
        return self._torchs._process_data(data, worker_idx)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if self._pending is not None:
            if first_iter:
                return  # it is being started, and its places follow
            self._start_where_it_was()  # workers that persist begin a new epoch
        self._torchs._reset(loader, first_iter)

    def __next__(self) -> Any:
        if self._pending is not None:
            self._start_where_it_was()
        return self._torchs.__next__()

    def saved(self) -> dict[str, Any]:
        if self._pending is not None:
            return dict(self._pending)
        fields = self._fields
        tasks = fields._task_info
        return {
            "loader": self._loader,
            "sampler": fields._sampler_iter,
            "fields": {name: _copied(getattr(self, name)) for name in _FIELDS},
            "turn": self._whose_turn(),
            "under way": [(number, tasks[number][0], self._sent[number]) for number in sorted(tasks)],
            "states": dict(self._states),
            "over": fields._shutdown,
        }

    def fill(self, saved: dict[str, Any]) -> None:
        self._pending = saved

    def _whose_turn(self) -> int:
        fields = self._fields
        turn = int(next(fields._worker_queue_idx_cycle))
        fields._worker_queue_idx_cycle = _turns_from(turn, fields._num_workers)
        return turn

    def _start_where_it_was(self) -> None:
        saved = self._pending
        loader = saved["loader"]
        numbers = loader.generator or torch_here().default_generator
        before = numbers.get_state()  # making an iterator draws one
        self._start(loader, saved["states"], saved["fields"]["_base_seed"])
        numbers.set_state(before)
        self._pending = None
        fields = self._fields
        fields._sampler_iter = saved["sampler"]
        for name, value in saved["fields"].items():
            setattr(self, name, _copied(value))
        fields._worker_queue_idx_cycle = _turns_from(saved["turn"], fields._num_workers)
        fields._task_info = {}
        tasks = [0] * fields._num_workers
        for number, worker, index in saved["under way"]:
            fields._task_info[number] = (worker,)
            tasks[worker] += 1
            self._sent[number] = index
            fields._index_queues[worker].put((number, index))
        fields._tasks_outstanding = len(fields._task_info)
        fields._workers_num_tasks = tasks
        if saved["over"]:
            fields._shutdown_workers()

    def __del__(self) -> None:
        if hasattr(self, "_workers"):
            self._torchs.__del__()


def _turns_from(turn: int, workers: int) -> Iterator[int]:
    return itertools.chain(range(turn, workers), itertools.cycle(range(workers)))


def watch_loaders(modules: Callable[[], list[str]]) -> None:
    """From now on, a DataLoader with workers can be saved in the middle of an epoch. `modules` names the
    program's own."""
    dataloader: Any = import_module("torch.utils.data.dataloader")
    members = {"own_modules": staticmethod(modules), "__module__": __name__}
    bases = (WorkersIterator, dataloader._MultiProcessingDataLoaderIter)
    watched = type("SavedWorkersIterator", bases, members)
    dataloader._MultiProcessingDataLoaderIter = watched
    _CLASSES.append(watched)


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


class _WithInit:
    """A loader as it is, with another `worker_init_fn`."""

    def __init__(self, loader: Any, began: WorkerBegins) -> None:
        self._loader, self.worker_init_fn = loader, began

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class WorkersIteratorKind(Kind):
    """Made anew; its workers start when it is asked for a batch."""

    has_identity = False
    is_passed_through = True

    def parts(self, thing: Any) -> Parts:
        saved = thing.saved()
        return [("<loader>", saved["loader"]), ("<sampler>", saved["sampler"])]

    def content(self, thing: Any) -> Any:
        return thing.saved()

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return new_workers_iterator, ()

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        if type(thing) in _CLASSES:
            thing.fill(content)


WORKERS_ITERATOR = WorkersIteratorKind()


def is_workers_iterator(cls: type) -> bool:
    return cls in _CLASSES


def new_workers_iterator() -> Any:
    if generators_are_left_out():
        return iter(())
    cls: Any = _CLASSES[0]
    made = cls.__new__(cls)
    made._pending = {}
    return made


def end_workers_of_the_beginning() -> None:
    """Called before a program is put back: nothing of the saved one uses these."""
    for iterator in list(_ALIVE):
        if not iterator._shutdown:
            iterator._shutdown_workers()
