"""Training on a Spot VM that will be taken away: the warning trapped, the checkpoint outside, the resume exact, the mail sent once.

Run without arguments it plays both sides: it starts the trainer, sends it SIGTERM in the middle of training as Kubernetes does when the node
goes, starts it again as a rescheduled pod would be, kills that one with no warning at all, and lets the third one finish.
    python examples/gke_spot_training.py
In a cluster only the trainer runs (`python gke_spot_training.py train`), with SUBLET_STORE=gs://your-bucket/training in the pod's
environment, in the region of the cluster, and a PostgreSQL ledger that outlives the node: SUBLET_LEDGER=postgresql://...
"""

import os
import signal
import subprocess
import sys
import time

STEPS = 60


def train() -> None:
    import torch

    import sublet

    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # Resume, don't restart: what the name has committed is put back before this returns.
    run = sublet.train("spot-training", state={"model": model, "optim": optim}, every=10, vram="64MiB")
    for step in run.steps(STEPS):
        x = torch.randn(32, 16)
        loss = ((model(x) - x.mean(1, keepdim=True)) ** 2).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        step.log(loss=loss)
        if step.number == STEPS // 2:
            # Something outside the model, once for the job: it becomes true in the commit that makes the step true.
            step.effect("half-way-mail", lambda key: print(f"mail sent, with the key {key}") or "sent")
        time.sleep(0.03)  # a step that takes a moment, so that there is a middle to be hit in
    print(f"trained: step {run.step}, committed as version {run.version}")


def committed() -> int:
    import sublet

    try:
        return sublet.checkpoints().manifest("spot-training").step
    except sublet.NotFound:
        return 0


def wait_for_step(number: int) -> None:
    while committed() < number:
        time.sleep(0.05)


def play() -> None:
    def pod() -> subprocess.Popen:
        return subprocess.Popen([sys.executable, __file__, "train"])

    first = pod()
    wait_for_step(10)
    print("--- the Spot VM is reclaimed: SIGTERM, and 15 seconds", flush=True)
    first.send_signal(signal.SIGTERM)
    print(f"--- the pod left with exit code {first.wait()}: preempted, and everything committed", flush=True)
    left_at = committed()

    second = pod()
    wait_for_step(left_at + 10)
    print("--- the next node dies without a word: kill -9", flush=True)
    second.send_signal(signal.SIGKILL)
    second.wait()

    third = pod()
    assert third.wait() == 0
    assert committed() == STEPS
    print(f"--- {STEPS} steps, each committed once, over three pods; try: sublet audit spot-training")


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        os.environ.setdefault("PYTHONUNBUFFERED", "1")
        train()
    else:
        play()
