"""A DataLoader with workers that goes on in another process, in the middle of an epoch."""

from __future__ import annotations

import sys
import types

from sublet.training.program_state.loader_workers import globals_used_by
from sublet.training.program_state.sorting import Sorting
from tests.conftest import needed
from tests.forked import with_torch
from tests.training.program_state.carried import carry_elsewhere

PROGRAM = """
import random
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from sublet.training.program_state.loader_workers import watch_loaders
watch_loaders(lambda: ["__main__"])
torch.manual_seed(1)
CALLS = [0]

class Augmented(Dataset):
    def __init__(self):
        self.seen = 0
    def __len__(self):
        return 16
    def __getitem__(self, index):
        self.seen += 1
        CALLS[0] += 1
        return torch.tensor([index, self.seen, CALLS[0], random.random(), torch.rand(()).item()])

class Stream(IterableDataset):
    def __iter__(self):
        for number in range(20):
            yield number + random.random()

loader = DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=2)
stream = iter(DataLoader(Stream(), batch_size=2, num_workers=1))
begin()
turn = 0
for epoch in range(2):
    for batch in loader:
        numbers = next(stream, None) if turn < 8 else None
        turn += 1
        if turn == 6:
            break
        step()
        print(batch.tolist(), numbers is not None and numbers.tolist(), torch.rand(()).item())
    if epoch:
        break
"""

PERSISTENT = """
import random
import torch
from torch.utils.data import DataLoader, Dataset
from sublet.training.program_state.loader_workers import watch_loaders
watch_loaders(lambda: ["__main__"])
torch.manual_seed(1)

class Augmented(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torch.tensor([index, random.random()])

evaluated = DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
found = [batch.tolist() for batch in evaluated]
begin()
for epoch in range(3):
    for turn in range(2):
        step()
        print(epoch, turn)
    print([batch.tolist() for batch in evaluated])
"""


def test_workers_that_persist_begin_another_epoch_after_a_resume() -> None:
    """X1. Put back where its epoch had ended, such a loader gave no batch at all."""
    needed("torch")
    carry_elsewhere({"persistent": PERSISTENT}, with_torch())["persistent"].check()


def test_every_batch_comes_once_and_workers_go_on_with_their_own_numbers() -> None:
    needed("torch")
    carry_elsewhere({"loaders": PROGRAM}, with_torch())["loaders"].check()


def test_the_variables_that_its_functions_name_are_found() -> None:
    module = types.ModuleType("mine")
    sys.modules["mine"] = module
    try:
        exec(
            "A = [1]\nB = [2]\nC = [3]\nD = [4]\n"
            "def f(x):\n    return [A for _ in x]\n"
            "class Data:\n    def get(self):\n        return (lambda: B)()\n"
            "data = Data()\ndata.transform = f\n",
            module.__dict__,
        )
        found = dict(globals_used_by({"dataset": module.data}, Sorting(lambda name: name == "mine")))
    finally:
        del sys.modules["mine"]
    assert found == {"mine.A": [1], "mine.B": [2]}
