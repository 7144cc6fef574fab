"""The place in the data: batches in an order that anybody can find again.

Rules of this file:
- The order of an epoch follows from (seed, epoch) alone, by a generator NumPy has frozen. Which batch comes
  next follows from (epoch, batch). So a few numbers say where a run stands, and nothing has to be read again
  to get there.
- What counts is what was handed to the loop, not what was fetched ahead of it.
- Whatever a dataset or a collate function draws from Python's, NumPy's and torch's own generators follows
  from (seed, epoch, batch, rank): not from how many workers fetch, nor from when a run was resumed. The
  random states of the calling process are left as they were.
- A place saved for other data is refused, not guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from sublet.core.errors import BadInput, MissingExtra
from sublet.core.progress.batches import Batches

#: Part of every seed: changing it would change every order.
_ORDER = "sublet order 1"
_DRAWS = "sublet draws 1"


def _words(*parts: object) -> list[int]:
    """Eight numbers of 32 bits that follow from these."""
    digest = hashlib.sha256("\n".join(str(part) for part in parts).encode()).digest()
    return [int.from_bytes(digest[at : at + 4], "little") for at in range(0, 32, 4)]


def _numpy() -> Any:
    try:
        return import_module("numpy")
    except ImportError as e:
        raise MissingExtra(
            "the order of samples is made with NumPy, which is not installed",
            remedy="install it with 'pip install numpy', or read the data yourself",
        ) from e


def order_of(samples: int, seed: int, epoch: int) -> Any:
    """The samples of an epoch, shuffled: an array of their numbers."""
    numpy = _numpy()
    # The stream of RandomState is frozen for all versions of NumPy; that of its newer generators is not.
    order = numpy.arange(samples, dtype=numpy.uint32 if samples <= 1 << 32 else numpy.uint64)
    numpy.random.RandomState(numpy.array(_words(_ORDER, seed, epoch), dtype=numpy.uint32)).shuffle(order)
    return order


def _from_environment(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, "") or default)
    except ValueError:
        raise BadInput(f"{name}={os.environ[name]!r} is not a number") from None


class _EpochPlace:
    """A place in endless epochs, and what lies there."""

    def __init__(
        self,
        samples: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        rank: int | None,
        world: int | None,
    ) -> None:
        self.rank = _from_environment("RANK", 0) if rank is None else rank
        self.world = _from_environment("WORLD_SIZE", 1) if world is None else world
        if not 0 <= self.rank < self.world:
            raise BadInput(f"rank {self.rank} is none of {self.world} ranks")
        if samples < 1:
            raise BadInput("there are no samples in the data")
        self.batches = Batches(samples=samples, batch_size=batch_size, world=self.world, drop_last=drop_last)
        self.seed = int(seed)
        self.shuffle = bool(shuffle)
        self.epoch = 0
        self.batch = 0
        self._order: tuple[int, Any] = (-1, None)

    @property
    def position(self) -> int:
        return self.batches.bounds(self.batch)[0]

    def indices(self, epoch: int, batch: int) -> list[int]:
        begin, end = self.batches.share(batch, self.rank)
        if not self.shuffle:
            return list(range(begin, end))
        if self._order[0] != epoch:
            self._order = (-1, None)  # not two of them at once
            self._order = (epoch, order_of(self.batches.samples, self.seed, epoch))
        chosen: list[int] = self._order[1][begin:end].tolist()
        return chosen

    def after(self, epoch: int, batch: int) -> tuple[int, int]:
        return (epoch, batch + 1) if batch + 1 < self.batches.count else (epoch + 1, 0)

    def advance(self) -> None:
        self.epoch, self.batch = self.after(self.epoch, self.batch)

    # as part of a run

    @property
    def cursor(self) -> dict[str, int]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "batch": self.batch,
            "of": self.batches.count,
        }

    def _made_of(self) -> dict[str, int | bool]:
        return {
            "samples": self.batches.samples,
            "batch_size": self.batches.batch_size,
            "drop_last": self.batches.drop_last,
            "world": self.world,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batch": self.batch, "data": self._made_of()}

    def load_state_dict(self, saved: Any) -> None:
        try:
            epoch, batch, then = int(saved["epoch"]), int(saved["batch"]), dict(saved["data"])
        except (KeyError, TypeError, ValueError) as e:
            raise BadInput(
                "what was saved for the data is not the place of a sublet.Loader",
                remedy="give the parts the job was begun with, or use another job name",
            ) from e
        now = self._made_of()
        other = [
            f"{name} was {then.get(name)}, is {now[name]}" for name in now if then.get(name) != now[name]
        ]
        if other:
            raise BadInput(
                f"the place in the data was saved for other data: {'; '.join(other)}",
                remedy="make the loader as it was when the job was begun, or use another job name",
            )
        if epoch < 0 or not 0 <= batch < self.batches.count:
            raise BadInput(f"there is no batch {batch} of epoch {epoch} in an epoch of {self.batches.count}")
        self.epoch, self.batch = epoch, batch


class Loader:
    """Batches without end: `loader = sublet.Loader(dataset, batch_size=32)`, then `next(loader)` in each
    step.

    `dataset` is anything with a length and numbered samples: a list, a NumPy array, a torch dataset or
    tensor. Give the loader to `sublet.train(..., state={"data": loader})` and a resumed run goes on with the
    batch the committed step would have had next.

    A batch of an array or tensor is an array or tensor. Samples of a torch dataset, and samples that hold
    tensors, are put together as torch does it; other numbers and arrays become NumPy arrays, in tuples and
    dicts as the samples were. `collate` does it your way: it gets the list of samples.

    With `workers` the samples are fetched ahead by so many processes (through torch's DataLoader), `prefetch`
    batches by each. Under torchrun each rank gets its own part of every batch; `batch_size` is per rank.
    """

    #: Each rank of a run has its own.
    per_rank = True

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 32,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise BadInput(
                f"a {type(dataset).__name__} has no length or no numbered samples",
                remedy="for a stream, use torchdata's StatefulDataLoader as a part of the state",
            )
        if workers < 0 or prefetch < 1:
            raise BadInput(
                f"workers={workers}, prefetch={prefetch}: use workers 0 or more, prefetch 1 or more"
            )
        self._place = _EpochPlace(len(dataset), batch_size, seed, shuffle, drop_last, rank, world)
        self._fetch = _Fetch(dataset, collate, self._place.seed, self._place.rank)
        self._workers = workers
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._ahead: Iterator[Any] | None = None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        place = self._place
        if self._workers:
            if self._ahead is None:
                self._ahead = self._fetch_ahead()
            batch = next(self._ahead)
        else:
            batch = self._fetch.here(place.epoch, place.batch, place.indices(place.epoch, place.batch))
        place.advance()
        return batch

    @property
    def epoch(self) -> int:
        """The epoch of the batch that comes next."""
        return self._place.epoch

    @property
    def position(self) -> int:
        """How many samples of this epoch were handed out, over all ranks."""
        return self._place.position

    @property
    def batches_per_epoch(self) -> int:
        return self._place.batches.count

    def by_epoch(self) -> Epochs:
        """The same batches one epoch at a time: it has a length, and each `for` over it ends with the
        epoch."""
        return Epochs(self)

    @property
    def cursor(self) -> dict[str, int]:
        """Where it stands, as it is committed with each step."""
        return self._place.cursor

    def state_dict(self) -> dict[str, Any]:
        return self._place.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self._place.load_state_dict(saved)
        self.close()

    def close(self) -> None:
        """End the workers. The next batch starts new ones."""
        ahead, self._ahead = self._ahead, None
        shut = getattr(ahead, "_shutdown_workers", None)
        if shut is not None:
            shut()

    def _fetch_ahead(self) -> Iterator[Any]:
        try:
            torch = import_module("torch.utils.data")
            generator = import_module("torch").Generator()
        except ImportError as e:
            raise MissingExtra(
                "workers=... fetches through torch's DataLoader, and torch is not installed",
                remedy="install it with 'pip install sublet[torch]', or use workers=0",
            ) from e
        loader = torch.DataLoader(
            self._fetch,
            batch_size=None,
            sampler=_IndicesAhead(self._place),
            num_workers=self._workers,
            prefetch_factor=self._prefetch,
            collate_fn=_as_it_is,
            pin_memory=self._pin_memory,
            # Of its own: it draws a number when it begins, and that must not come from the run's generator.
            generator=generator,
        )
        ahead: Iterator[Any] = iter(loader)
        return ahead

    def __repr__(self) -> str:
        place = self._place
        at = f"epoch {place.epoch}, batch {place.batch} of {place.batches.count}"
        return f"<Loader of {place.batches.samples:,} samples, {at}>"


class Epochs:
    """One epoch after the other, the first of them from where its loader stands."""

    per_rank = True

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return self.loader.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = self.loader.epoch
        while self.loader.epoch == epoch:
            yield next(self.loader)

    @property
    def cursor(self) -> dict[str, int]:
        return self.loader.cursor

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.loader.load_state_dict(saved)


def _as_it_is(batch: Any) -> Any:
    return batch


class _IndicesAhead:
    """What to fetch, from where the loop stands, without end."""

    def __init__(self, place: _EpochPlace) -> None:
        self._place = place

    def __iter__(self) -> Iterator[tuple[int, int, list[int]]]:
        epoch, batch = self._place.epoch, self._place.batch
        while True:
            yield epoch, batch, self._place.indices(epoch, batch)
            epoch, batch = self._place.after(epoch, batch)


class _Fetch:
    """Samples by their numbers, made into a batch. Looks like a dataset of batches to torch's DataLoader."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None, seed: int, rank: int
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._rank = rank
        # Nothing of these is the user's code, so nothing draws.
        self._plain = collate is None and (type(dataset) in (list, tuple) or _is_indexed_at_once(dataset))

    def __getitem__(self, what: tuple[int, int, list[int]]) -> Any:
        """Fetch in a worker, whose random states nobody uses."""
        epoch, batch, indices = what
        if not self._plain:
            _seed_all(_words(_DRAWS, self._seed, epoch, batch, self._rank))
        return self._batch(indices)

    def here(self, epoch: int, batch: int, indices: list[int]) -> Any:
        """Fetch in the training process, whose random states are part of the run."""
        if self._plain:
            return self._batch(indices)
        with _random_states_kept():
            return self[epoch, batch, indices]

    def _batch(self, indices: list[int]) -> Any:
        dataset = self._dataset
        if self._collate is None and _is_indexed_at_once(dataset):
            return dataset[indices]
        several = getattr(dataset, "__getitems__", None)
        samples = list(several(indices)) if several is not None else [dataset[index] for index in indices]
        if self._collate is not None:
            return self._collate(samples)
        torch = sys.modules.get("torch")
        if torch is not None and (
            isinstance(dataset, import_module("torch.utils.data").Dataset) or _holds_tensor(samples[0], torch)
        ):
            return import_module("torch.utils.data").default_collate(samples)
        return _stack(samples)


def _is_indexed_at_once(dataset: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(dataset, numpy.ndarray):
        return True
    return torch is not None and isinstance(dataset, getattr(torch, "Tensor", ()))


def _holds_tensor(sample: Any, torch: Any) -> bool:
    if isinstance(sample, dict):
        return any(_holds_tensor(member, torch) for member in sample.values())
    if isinstance(sample, (list, tuple)):
        return any(_holds_tensor(member, torch) for member in sample)
    return isinstance(sample, torch.Tensor)


def _stack(samples: Sequence[Any]) -> Any:
    """Put samples together as torch does, with arrays in place of tensors. Non-numbers stay a list."""
    numpy = _numpy()
    first = samples[0]
    if isinstance(first, dict):
        return {name: _stack([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple):
        members = [_stack(list(column)) for column in zip(*samples, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else tuple(members)
    if isinstance(first, (numpy.ndarray, numpy.generic)):
        return numpy.stack(samples)
    if isinstance(first, (bool, int, float, complex)):
        return numpy.array(samples)
    return list(samples)


def _seed_all(words: list[int]) -> None:
    random.seed(int.from_bytes(b"".join(word.to_bytes(4, "little") for word in words), "little"))
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(words)
    if torch is not None and hasattr(torch, "default_generator"):
        # Not torch.manual_seed: that would seed the devices' generators too, which are the run's.
        torch.default_generator.manual_seed(words[0] | words[1] << 32 & 0x7FFFFFFF00000000)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    python = random.getstate()
    of_numpy = numpy.random.get_state(legacy=False) if numpy is not None else None
    of_torch = torch.get_rng_state() if torch is not None and hasattr(torch, "get_rng_state") else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)
        if torch is not None and of_torch is not None:
            torch.set_rng_state(of_torch)


class Sampler:
    """The same order for whoever keeps torch's own DataLoader: `DataLoader(dataset,
    batch_sampler=sublet.Sampler(dataset, 32))`.

    torch's DataLoader asks for samples ahead of the loop that uses them, and tells nobody how far ahead. So a
    sampler cannot know what was used: say it, with `sampler.advance()` after each batch. The next `iter` of
    the DataLoader then begins behind what was used: the rest of the epoch after a resume, the next epoch
    after the end of one. With `batch_size=None` it gives single samples, for `sampler=...`, and `advance(n)`
    counts samples.

    It does not seed what a dataset draws at random: with workers, that depends on their number and on when a
    run was resumed. `sublet.Loader` does both by itself.
    """

    per_rank = True

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        samples = dataset if isinstance(dataset, int) else len(dataset)
        self._place = _EpochPlace(
            samples, 1 if batch_size is None else batch_size, seed, shuffle, drop_last, rank, world
        )
        self._single = batch_size is None
        self._given = False  # something, and nobody said that it was used

    def __len__(self) -> int:
        """The number of batches (or samples) in an epoch on this rank."""
        return self._place.batches.count

    def __iter__(self) -> Iterator[Any]:
        if self._given:
            raise self._untold()
        place = self._place
        epoch = place.epoch
        for batch in range(place.batch, place.batches.count):
            self._given = True
            indices = place.indices(epoch, batch)
            yield indices[0] if self._single else indices

    def advance(self, count: int = 1) -> None:
        """Say that so many more batches (or samples, with `batch_size=None`) were used."""
        if count < 1:
            raise BadInput(f"advance({count}) goes nowhere")
        for _ in range(count):
            self._place.advance()
        self._given = False

    @property
    def epoch(self) -> int:
        return self._place.epoch

    @property
    def position(self) -> int:
        return self._place.position

    @property
    def cursor(self) -> dict[str, int]:
        return self._place.cursor

    def state_dict(self) -> dict[str, Any]:
        if self._given:
            raise self._untold()
        return self._place.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self._place.load_state_dict(saved)
        self._given = False

    def _untold(self) -> BadInput:
        return BadInput(
            "the sampler gave samples out, and nobody said which of them were used: their place would be "
            "lost",
            remedy="call sampler.advance() after each batch, or use sublet.Loader, which counts by itself",
        )
