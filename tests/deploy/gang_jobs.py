"""What members of a gang run in the tests: one process on each of its hosts."""

from __future__ import annotations

import hashlib
import os
import time

import sublet


def member(name: str, total: int) -> None:
    """One rank of a training over several hosts. Rank 0 commits for all, under the gang's epoch."""
    with sublet.join() as gang:
        print("sits", gang.rank, gang.world, gang.epoch, os.getpid(), flush=True)
        print("final", trained(name, total, gang), flush=True)


def trained(name: str, total: int, lease: sublet.Lease | None = None) -> str:
    """With torch.distributed as the environment says; what it ends with."""
    import torch
    import torch.distributed as distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    try:
        rank = distributed.get_rank()
        torch.manual_seed(7)
        net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
        torch.manual_seed(100 + rank)  # so that dropout is another on each rank
        model = DistributedDataParallel(net)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        samples = torch.randn(61, 6, generator=torch.Generator().manual_seed(3))
        data = sublet.Loader(samples, 4)
        state = {"model": model, "optimizer": optimizer, "data": data}
        run = sublet.train(name, state, every=3, lease=lease, progress=False, rank_timeout=30)
        for step in run.steps(total):
            optimizer.zero_grad()
            model(next(data)).pow(2).mean().backward()
            optimizer.step()
            print("step", step.number, flush=True)
            time.sleep(float(os.environ.get("PAUSE", "0")))
        weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
        return f"{hashlib.sha256(weights).hexdigest()} {data.cursor} {run.committed}"
    finally:
        distributed.destroy_process_group()
