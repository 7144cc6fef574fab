"""Small real trainings that tell of each step and end with a digest of everything they made."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy
import torch

import sublet


def tell(step: int) -> None:
    """At the end of a step's body, in one write."""
    time.sleep(float(os.environ.get("PAUSE", "0")))
    os.write(1, f"step {step}\n".encode())


def digest(*what: Any) -> str:
    found = hashlib.sha256()
    for one in what:
        for tensor in one.state_dict().values() if hasattr(one, "state_dict") else [one]:
            found.update(
                tensor.detach().numpy().tobytes() if hasattr(tensor, "detach") else repr(tensor).encode()
            )
    return found.hexdigest()[:24]


def small_net() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    )


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that are changed at random when they are read."""

    def __init__(self, size: int) -> None:
        self.rows = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(8) + float(numpy.random.rand()) + random.random()
        return self.rows[index] + 0.1 * noise


def learn(net: Any, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = (net(rows).squeeze(-1) - rows.sum(1)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def with_loader(name: str, total: int, workers: int = 0, every: int = 3) -> None:
    torch.set_num_threads(1)
    net = small_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 12, 20], gamma=0.5)
    average = torch.optim.swa_utils.AveragedModel(net)
    own = torch.Generator().manual_seed(3)
    draws = {"of numpy": [numpy.random.default_rng(4)], "of python": random.Random(5)}
    data = sublet.Loader(Noisy(54), 4, workers=workers)
    seen: list[float] = []
    state = {
        "net": net, "optimizer": optimizer, "schedule": schedule, "average": average,
        "own": own, "draws": draws, "data": data, "seen": seen,
    }  # fmt: skip
    run = sublet.train(name, state, every=every, vram="64MiB", ttl="10s", progress=False)
    for step in run.steps(total):
        rows = next(data) + 0.01 * torch.randn(8, generator=own)
        rows += float(draws["of numpy"][0].random()) + draws["of python"].random()  # type: ignore[index,union-attr]
        seen.append(learn(net, optimizer, rows))
        schedule.step()
        average.update_parameters(net)
        tell(step.number)
    print("final", digest(net, average, seen), schedule.get_last_lr(), data.cursor, run.committed)


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def with_torchdata(name: str, total: int, workers: int, own_generator: bool, every: int = 2) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.set_num_threads(1)
    net = small_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    given = {"generator": torch.Generator().manual_seed(5)} if own_generator else {}
    loader = StatefulDataLoader(rows, batch_size=4, shuffle=True, num_workers=workers, **given)
    seen: list[Any] = []
    state = {"net": net, "optimizer": optimizer, "loader": loader, "seen": seen}
    run = sublet.train(name, state, every=every, vram="64MiB", ttl="10s", progress=False)
    batches = _forever(loader)
    for step in run.steps(total):
        batch = next(batches)
        seen.append(float(batch.sum()))
        learn(net, optimizer, batch)
        tell(step.number)
    print("final", digest(net, seen), run.committed)


def rank(name: str, total: int, fault: str = "", every: int | str = 3) -> None:
    """One rank of several."""
    import torch.distributed as distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    silent = int(os.environ.get("RANK_TIMEOUT", "60"))  # seconds, for the model's words as for ours
    distributed.init_process_group("gloo", timeout=timedelta(seconds=silent))
    number = distributed.get_rank()
    net = small_net()
    torch.manual_seed(100 + number)  # so that dropout is another on each rank
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = sublet.Loader(Noisy(53), 4)
    shard = torch.zeros(3) + number
    state = {"model": model, "optimizer": optimizer, "data": data, "shard": shard}
    try:
        run = sublet.train(
            name,
            state,
            every=every,
            vram="64MiB",
            ttl="5s",
            progress=False,
            per_rank=("shard",),
            rank_timeout=silent,
        )
        for step in run.steps(total):
            if fault == f"raise:{number}:{step.number}":
                raise ValueError("a fault of the user's code")
            shard += learn(model, optimizer, next(data))
            step.record(f"row-{step.number}", step.number)
            if fault == f"late:{number}:{step.number}":
                raise ValueError("a fault of the user's code")
            tell(step.number)
    except sublet.Preempted as left:
        print("left at", left.step, left.committed, flush=True)
        raise
    except ValueError:
        if not fault.startswith("late"):
            raise
        print("lingers", flush=True)  # caught by a program that does not end
        time.sleep(30)
        os._exit(4)
    except sublet.SubletError as e:
        print("error", e.code, e.message, flush=True)
        os._exit(3)
    print("final", digest(net, shard), data.cursor, run.committed)
    distributed.destroy_process_group()


def torchrun(name: str, total: int, *options: str) -> None:
    """The real launcher, whose ranks are new interpreters unless it is told otherwise."""
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node", "2", *options, __file__, name, str(total)])


if __name__ == "__main__":  # under torchrun
    import sys

    os.write(1, f"rank {os.environ['RANK']} is {os.getpid()}\n".encode())
    rank(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
