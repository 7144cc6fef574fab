"""Random states between a notebook and its worker: the numbers that come next, on either side, as if there
were one."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy
import torch

from sublet.notebook.cells import process_state

ROOT = Path(__file__).parents[3]


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(numpy.random.rand()), float(torch.rand(1))


def test_after_a_state_was_put_back_the_same_numbers_come() -> None:
    random.gauss(0, 1)  # which keeps a second one for the next time
    taken = process_state.take_random_states()
    assert set(taken) == {"python", "numpy", "torch"}
    assert type(pickle.loads(taken["torch"])) is bytes  # two pickles of a tensor need not be equal
    first = draw()
    assert draw() != first
    process_state.put_random_states(taken)
    assert draw() == first


def test_states_are_equal_until_something_is_drawn() -> None:
    for drawing in (random.random, numpy.random.rand, lambda: torch.rand(1)):
        taken = process_state.take_random_states()
        assert process_state.take_random_states() == taken
        drawing()
        assert process_state.take_random_states() != taken


def test_what_is_opened_is_what_a_checkpoint_takes() -> None:
    opened = process_state.opened(process_state.take_random_states())
    assert opened["python"][0] == 3
    assert torch.equal(opened["torch"], torch.get_rng_state())


WITHOUT_LIBRARIES = """
import pickle, random, sys
from sublet.notebook.cells import process_state
assert not {"numpy", "torch"} & set(sys.modules)
states = pickle.load(open(sys.argv[1], "rb"))
others = process_state.put_what_is_in_use(states)
assert not {"numpy", "torch"} & set(sys.modules), "imported"
assert others == {name: states[name] for name in ("numpy", "torch")}
assert set(process_state.take_random_states()) == {"python"}
print(random.random())
import numpy
assert set(process_state.put_what_is_in_use(states)) == {"torch"}
print(random.random(), numpy.random.rand())
"""


def test_a_library_nobody_uses_here_is_not_imported_and_its_state_is_handed_on(tmp_path: Path) -> None:
    states = process_state.take_random_states()
    (tmp_path / "states").write_bytes(pickle.dumps(states))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, tmp_path / "states"],
        env=dict(os.environ) | {"PYTHONPATH": f"{ROOT}/src"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first, _, _, _ = draw()
    process_state.put_random_states(states)
    second, by_numpy = random.random(), numpy.random.rand()
    assert first == second
    assert [float(word) for word in done.stdout.split()] == [first, second, by_numpy]


def test_a_device_this_process_has_not_touched_is_only_looked_after() -> None:
    states = process_state.take_random_states() | {
        "cuda": pickle.dumps([torch.get_rng_state().numpy().tobytes()])
    }
    assert torch.equal(process_state.opened(states)["cuda"][0], torch.get_rng_state())
    assert set(process_state.put_what_is_in_use(states)) == {"cuda"}
