"""A clean preemptible training step: leased, exactly once, nothing left behind. Then the same with torch, step after step.

First one kernel over one batch: reserve the step, compute on the leased device, save, commit, all or nothing. Asked again, the stored result
comes back and no device is touched; under a lease that was taken away nothing is even started. Then a torch model that trains through
a loss: the run is cut in the middle, a second one continues it, and ends with the very same weights as a run that nobody disturbed.
    python examples/recipe_52_training_step.py
"""

import sublet

OPENCL = """
__kernel void train_step(ulong step, uint n, __global uchar* batch) {
    uint i = get_global_id(0);
    if (i < n) batch[i] = (uchar)(batch[i] + step);
}
"""
PYTHON = """
def train_step(grid, step, n, batch):
    for i in range(n):
        batch[i] = (batch[i] + step) % 256
"""


def one_step() -> None:
    lease = sublet.gpu(vram="16MiB", ttl="2m", exclusivity="session").acquire()
    step = {
        "job": "spot-resnet",
        "step": 42,
        "lease": lease,
        "module": OPENCL if "opencl" in lease.devices[0] else PYTHON,
        "kernel": "train_step",
        "batch": bytes([1, 2, 3, 4]),
        "output_bytes": 4,
        "expected_version": 0,
        "grid": (4,),
    }
    done = sublet.run_step(**step)
    assert isinstance(done, sublet.Completed)
    print(f"step 42: {list(done.output)}, committed as version {done.version} ({done.digest[:12]})")

    again = sublet.run_step(**step)
    assert isinstance(again, sublet.Duplicate)
    print(f"step 42 again: a duplicate of version {again.version}, its stored result is {list(again.output)}")

    lease.release()
    try:
        sublet.run_step(**{**step, "step": 43, "expected_version": 1})
    except sublet.LeaseNotActive as refused:
        print(f"step 43 without the lease: {refused.message}")


def train(job: str, cut_at: int | None = None) -> dict:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    run = sublet.train(job, state={"model": model, "optim": optim}, every=5, vram="64MiB", progress=False)
    for step in run.steps(40):
        x = torch.randn(16, 8)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        step.log(loss=loss)
        if step.number == cut_at:
            break  # a step that is left in the middle does not count: to the ledger this is what a crash is
    print(f"{job}: begun after step {run.resumed_at}, left at {run.step}, committed {run.committed}")
    return model.state_dict()


def with_torch() -> None:
    import torch

    calm = train("calm")
    train("cut", cut_at=23)
    resumed = train("cut")
    assert all(torch.equal(calm[name], resumed[name]) for name in calm)
    print("the run that was cut ended with the same weights, bit for bit")


if __name__ == "__main__":
    one_step()
    with_torch()
    print("look at it: sublet checkpoint ls; sublet audit cut")
