"""The place in the data: the same batches whenever a run was lost and whoever fetches them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sublet
from sublet.core.progress.batches import Batches
from sublet.training.data import order_of
from tests.training.conftest import LOSSES, Losing, random_losses
from tests.training.processes import Nursery

torch = pytest.importorskip("torch")


# --- which samples -------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 7), st.booleans())
@settings(max_examples=500, deadline=None)
def test_every_sample_once_an_epoch_over_all_ranks(
    samples: int, size: int, world: int, drop_last: bool
) -> None:
    try:
        batches = Batches(samples=samples, batch_size=size, world=world, drop_last=drop_last)
    except sublet.BadInput:
        left = samples % (size * world)
        # Only where it cannot be done: no full batch, or a rank would have nothing to do.
        assert samples < size * world if drop_last else samples < world or (left < world and size == 1)
        return
    seen: list[int] = []
    for batch in range(batches.count):
        shares = [batches.share(batch, rank) for rank in range(world)]
        assert all(1 <= end - begin <= size for begin, end in shares), (
            "no rank has too much, none has nothing"
        )
        assert shares[0][0] == batches.bounds(batch)[0]
        seen += [at for begin, end in shares for at in range(begin, end)]
    assert seen == list(range(len(seen)))
    assert len(seen) == (samples - samples % (size * world) if drop_last else samples)


def test_the_order_is_frozen() -> None:
    assert order_of(12, 0, 0).tolist() == FROZEN
    assert order_of(12, 0, 1).tolist() != FROZEN
    assert order_of(12, 1, 0).tolist() != FROZEN


FROZEN = [4, 0, 9, 5, 3, 10, 1, 7, 11, 2, 8, 6]


def test_ten_million_samples_cost_no_gigabytes_and_no_seconds_a_batch() -> None:
    loader = sublet.Loader(range(10_000_000), 256)
    next(loader)
    began = time.thread_time()
    for _ in range(100):
        next(loader)
    assert time.thread_time() - began < 5
    order = order_of(1_000_000, 0, 0)
    assert order.nbytes == 4_000_000


def test_ranks_share_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    seen: list[int] = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        loader = sublet.Loader(list(range(50)), 4)
        for _ in range(loader.batches_per_epoch):
            seen += next(loader).tolist()
        assert (loader.epoch, loader.position) == (1, 0)
    assert sorted(seen) == list(range(50))


def test_two_ranks_cannot_share_what_does_not_go_round() -> None:
    with pytest.raises(sublet.BadInput, match="cannot be shared by 3 ranks"):
        sublet.Loader(list(range(50)), 1, rank=0, world=3)


# --- what comes out ------------------------------------------------------------------------------------------


class Drawing(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), numpy.random.rand(), torch.rand(()).item()])


def test_draws_do_not_depend_on_workers_or_on_when_it_was_resumed() -> None:
    whole = sublet.Loader(Drawing(), 5)
    want = [next(whole) for _ in range(20)]
    got: list[Any] = []
    state: Any = None
    for workers, count in [(0, 3), (2, 4), (1, 6), (0, 7)]:
        loader = sublet.Loader(Drawing(), 5, workers=workers)
        random.seed(count)
        numpy.random.seed(count)
        torch.manual_seed(count)
        if state is not None:
            loader.load_state_dict(state)
        got += [next(loader) for _ in range(count)]
        state = loader.state_dict()
        loader.close()
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert not torch.equal(want[0][:, 1:], want[8][:, 1:]), "another epoch draws something else"
    assert not torch.equal(want[0][:, 1:], want[1][:, 1:]), "and so does another batch"


@pytest.mark.parametrize("workers", [0, 1])
def test_the_random_states_of_the_run_are_left_alone(workers: int) -> None:
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    want = random.random(), float(numpy.random.rand()), float(torch.rand(()))
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    loader = sublet.Loader(Drawing(), 5, workers=workers)
    for _ in range(3):
        next(loader)
    assert want == (random.random(), float(numpy.random.rand()), float(torch.rand(())))
    loader.close()


def test_what_was_fetched_ahead_does_not_count() -> None:
    loader = sublet.Loader(Drawing(), 5, workers=2, prefetch=4)
    next(loader)
    time.sleep(0.1)
    assert loader.cursor == {"epoch": 0, "position": 5, "batch": 1, "of": 8}
    assert loader.state_dict()["batch"] == 1
    loader.close()


def test_a_batch_is_what_its_samples_are() -> None:
    rows = numpy.arange(20.0).reshape(10, 2)
    assert next(sublet.Loader(rows, 4, shuffle=False)).tolist() == rows[:4].tolist()
    assert isinstance(next(sublet.Loader(torch.zeros(10, 2), 4)), torch.Tensor)
    pairs = [({"x": rows[i], "name": f"n{i}"}, i) for i in range(10)]
    first, numbers = next(sublet.Loader(pairs, 4, shuffle=False))
    assert first["x"].shape == (4, 2)
    assert first["name"] == ["n0", "n1", "n2", "n3"]
    assert numbers.tolist() == [0, 1, 2, 3]
    assert isinstance(next(sublet.Loader([(torch.zeros(2), 1)] * 8, 4))[1], torch.Tensor)
    assert next(sublet.Loader(list("abcdefgh"), 4, shuffle=False, collate="".join)) == "abcd"
    assert isinstance(next(sublet.Loader(Drawing(), 4)), torch.Tensor)


def test_a_failed_read_does_not_move_the_place() -> None:
    class Broken(list[int]):
        broken = True

        def __getitem__(self, index: Any) -> Any:
            if self.broken:
                raise OSError("the disk is away")
            return super().__getitem__(index)

    data = Broken(range(10))
    loader = sublet.Loader(data, 4, shuffle=False)
    with pytest.raises(OSError, match="away"):
        next(loader)
    data.broken = False
    assert next(loader).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"batch_size": 5}, "batch_size was 4, is 5"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"drop_last": True}, "drop_last was False, is True"),
        ({"dataset": range(41)}, "samples was 40, is 41"),
        ({"rank": 0, "world": 2}, "world was 1, is 2"),
    ],
)
def test_a_place_in_other_data_is_refused(other: dict[str, Any], named: str) -> None:
    saved = sublet.Loader(range(40), 4).state_dict()
    made = {"dataset": range(40), "batch_size": 4} | other
    with pytest.raises(sublet.BadInput, match=named):
        sublet.Loader(made.pop("dataset"), **made).load_state_dict(saved)


# --- torch's own DataLoader ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_counts_what_it_is_told(workers: int) -> None:
    rows = torch.arange(23)

    def run(state: Any, count: int) -> tuple[list[list[int]], Any]:
        sampler = sublet.Sampler(rows, 4)
        if state is not None:
            sampler.load_state_dict(state)
        seen: list[list[int]] = []
        while True:
            for batch in torch.utils.data.DataLoader(rows, batch_sampler=sampler, num_workers=workers):
                seen.append(batch.tolist())
                sampler.advance()
                if len(seen) == count:
                    return seen, sampler.state_dict()

    want, _ = run(None, 15)
    first, state = run(None, 4)
    second, state = run(state, 1)
    third, _ = run(state, 10)
    assert first + second + third == want
    assert sorted(x for batch in want[:6] for x in batch) == list(range(23))


def test_a_sampler_that_is_told_nothing_says_so() -> None:
    sampler = sublet.Sampler(10)
    next(iter(torch.utils.data.DataLoader(torch.arange(10), sampler=sampler, batch_size=2)))
    with pytest.raises(sublet.BadInput, match=r"nobody said"):
        sampler.state_dict()
    with pytest.raises(sublet.BadInput, match=r"nobody said"):
        next(iter(sampler))
    sampler.advance(2)
    assert sampler.state_dict()["batch"] == 2
    assert sampler.cursor["position"] == 2


# --- in a run that is lost -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_lost_ends_as_one_that_was_not(
    workers: int, torch_nursery: Nursery, losing: Callable[[Nursery], Losing]
) -> None:
    """S3, C4: every part of the state, at random steps, by kill -9 and SIGTERM."""
    job = losing(torch_nursery)
    want = job.final("tests.training.jobs:with_loader", "whole", 36, workers)
    losses = random_losses(36, LOSSES, seed=workers)
    got = job.through(losses, "tests.training.jobs:with_loader", "lost", 36, workers, PAUSE="0.01")
    assert got == want, losses
