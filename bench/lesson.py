"""A first forward and backward pass, in a module that imports nothing else: what a worker has to import is the user's choice."""

from __future__ import annotations


def lesson() -> float:
    import torch

    model = torch.nn.Linear(64, 64)
    total = model(torch.randn(8, 64)).sum()
    total.backward()
    return float(total.detach())
