"""The demo's training job: a small network that lives on a leased device, trained by `sublet.train`. Run
again after any death.

`python -m sublet.cli.demo.job JOB STEPS SECONDS_PER_STEP`. Weights and momentum stay in the memory of the
device, which a leased worker holds; this process asks it for one step after the other, saves what it reads
back, and commits. It needs no NumPy and no torch.
"""

from __future__ import annotations

import math
import os
import signal
import struct
import sys
import time
from typing import Any

import sublet
from sublet.core.leasing.options import GpuOptions
from sublet.leases.request import local_gpu
from sublet.ports.device import GpuSession

HIDDEN = 12
#: Two inputs, a hidden layer, one output; then as many numbers of momentum.
WEIGHTS = HIDDEN * 2 + HIDDEN + HIDDEN + 1
SAMPLES = 32
SAVE_EVERY = 5

#: Is a point inside the ring? One work-item does it all, in one order: the same bits every time.
OPENCL = """
__kernel void train_step(uint samples, uint hidden, float rate, __global const float* batch,
                         __global float* net, __global float* out) {
    uint weights = hidden * 4 + 1;
    float gradient[64];
    float loss = 0.0f;
    for (uint i = 0; i < weights; i++) gradient[i] = 0.0f;
    for (uint s = 0; s < samples; s++) {
        float x = batch[3 * s], y = batch[3 * s + 1], h[16];
        float answer = net[4 * hidden];
        for (uint j = 0; j < hidden; j++) {
            h[j] = tanh(net[2 * j] * x + net[2 * j + 1] * y + net[2 * hidden + j]);
            answer += net[3 * hidden + j] * h[j];
        }
        float error = answer - batch[3 * s + 2];
        loss += error * error;
        gradient[4 * hidden] += error;
        for (uint j = 0; j < hidden; j++) {
            float back = error * net[3 * hidden + j] * (1.0f - h[j] * h[j]);
            gradient[3 * hidden + j] += error * h[j];
            gradient[2 * hidden + j] += back;
            gradient[2 * j] += back * x;
            gradient[2 * j + 1] += back * y;
        }
    }
    for (uint i = 0; i < weights; i++) {
        net[weights + i] = 0.9f * net[weights + i] - rate * gradient[i] / samples;
        net[i] += net[weights + i];
    }
    out[0] = loss / samples;
}
"""
#: The same for a machine without OpenCL.
PYTHON = """
import math

def train_step(grid, samples, hidden, rate, batch, net, out):
    batch, net, out = batch.cast("f"), net.cast("f"), out.cast("f")
    weights = hidden * 4 + 1
    gradient, loss = [0.0] * weights, 0.0
    for s in range(samples):
        x, y = batch[3 * s], batch[3 * s + 1]
        h = [math.tanh(net[2 * j] * x + net[2 * j + 1] * y + net[2 * hidden + j]) for j in range(hidden)]
        error = net[4 * hidden] + sum(net[3 * hidden + j] * h[j] for j in range(hidden)) - batch[3 * s + 2]
        loss += error * error
        gradient[4 * hidden] += error
        for j in range(hidden):
            back = error * net[3 * hidden + j] * (1.0 - h[j] * h[j])
            gradient[3 * hidden + j] += error * h[j]
            gradient[2 * hidden + j] += back
            gradient[2 * j] += back * x
            gradient[2 * j + 1] += back * y
    for i in range(weights):
        net[weights + i] = 0.9 * net[weights + i] - rate * gradient[i] / samples
        net[i] += net[weights + i]
    out[0] = loss / samples
"""


def first_weights() -> bytes:
    numbers = [math.sin(12.9898 * (i + 1)) for i in range(WEIGHTS)] + [0.0] * WEIGHTS
    return struct.pack(f"<{2 * WEIGHTS}f", *numbers)


def batch_of(step: int) -> bytes:
    """Deterministic by step: the place in the data is the step itself."""
    numbers: list[float] = []
    seed = step * 2654435761 % (1 << 32)
    for _ in range(SAMPLES):
        point = []
        for _ in range(2):
            seed = (seed * 1664525 + 1013904223) % (1 << 32)
            point.append(seed / (1 << 31) - 1.0)
        inside = 0.3 < math.hypot(*point) < 0.8
        numbers += [*point, 1.0 if inside else -1.0]
    return struct.pack(f"<{3 * SAMPLES}f", *numbers)


class Network:
    """The part of the run's state that is on the device."""

    def __init__(self, gpu: GpuSession, device: str) -> None:
        self._gpu = gpu
        self._net = gpu.alloc(8 * WEIGHTS)
        self._batch = gpu.alloc(12 * SAMPLES)
        self._out = gpu.alloc(4)
        self._module = gpu.load(OPENCL if "opencl" in device else PYTHON)
        gpu.write(self._net, first_weights())

    def train_one(self, step: int) -> float:
        self._gpu.write(self._batch, batch_of(step))
        numbers = [sublet.u32(SAMPLES), sublet.u32(HIDDEN), sublet.f32(0.05)]
        self._gpu.launch(self._module, "train_step", args=[*numbers, self._batch, self._net, self._out])
        self._gpu.sync()
        return float(struct.unpack("<f", self._gpu.read(self._out))[0])

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self._gpu.read(self._net)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._gpu.write(self._net, state["weights"])


def run(job: str, steps: int, pause: float) -> None:
    asked = local_gpu(
        GpuOptions(vram="64MiB", ttl="10s", tier="spot", exclusivity="device", job=job, holder="worker")
    )
    with asked as lease, lease.open() as gpu:
        network = Network(gpu, lease.devices[0])
        training = sublet.train(job, {"network": network}, lease=lease, every=SAVE_EVERY, progress=False)
        for step in training.steps(steps):
            step.log(loss=network.train_one(step.number))
            time.sleep(pause)


def misbehave() -> None:
    """What the tour runs in a leased worker: it ignores every request to leave and leaves daemons behind."""
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()  # away from its parent's group, where a simple kill does not reach
            while True:
                time.sleep(60)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    try:
        run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    except sublet.LeaseLost:
        sys.exit(76)
