"""Random states between a notebook and its worker: the numbers that come next, on either side, as if there were one."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy
import torch

from sublet.runtime import cell_random

ROOT = Path(__file__).parents[2]


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(numpy.random.rand()), float(torch.rand(1))


def test_after_a_state_was_put_back_the_same_numbers_come() -> None:
    random.gauss(0, 1)  # which keeps a second one for the next time
    taken = cell_random.take()
    assert set(taken) == {"python", "numpy", "torch"}
    first = draw()
    assert draw() != first
    cell_random.put(taken)
    assert draw() == first


def test_states_are_equal_until_something_is_drawn() -> None:
    for drawing in (random.random, numpy.random.rand, lambda: torch.rand(1)):
        taken = cell_random.take()
        assert cell_random.take() == taken
        drawing()
        assert cell_random.take() != taken


def test_what_is_opened_is_what_a_checkpoint_takes() -> None:
    opened = cell_random.opened(cell_random.take())
    assert opened["python"][0] == 3
    assert torch.equal(opened["torch"], torch.get_rng_state())


WITHOUT_LIBRARIES = """
import pickle, random, sys
from sublet.runtime import cell_random
assert not {"numpy", "torch"} & set(sys.modules)
states = pickle.load(open(sys.argv[1], "rb"))
others = cell_random.put_what_is_in_use(states)
assert not {"numpy", "torch"} & set(sys.modules), "imported"
assert others == {name: states[name] for name in ("numpy", "torch")}
assert set(cell_random.take()) == {"python"}
print(random.random())
import numpy
assert set(cell_random.put_what_is_in_use(states)) == {"torch"}
print(random.random(), numpy.random.rand())
"""


def test_a_library_nobody_uses_here_is_not_imported_and_its_state_is_handed_on(tmp_path: Path) -> None:
    states = cell_random.take()
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
    cell_random.put(states)
    second, by_numpy = random.random(), numpy.random.rand()
    assert first == second
    assert [float(word) for word in done.stdout.split()] == [first, second, by_numpy]


def test_a_device_this_process_has_not_touched_is_only_looked_after() -> None:
    states = cell_random.take() | {"cuda": pickle.dumps([torch.get_rng_state().numpy().tobytes()])}
    assert torch.equal(cell_random.opened(states)["cuda"][0], torch.get_rng_state())
    assert set(cell_random.put_what_is_in_use(states)) == {"cuda"}
