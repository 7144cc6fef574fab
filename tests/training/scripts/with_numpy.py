"""No framework: a network as a dict of arrays, momentum, a generator of batches, a function that updates in place, a global counter."""

import random
import sys
from collections import defaultdict, deque

import numpy as np
from digest import digest

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
rng = np.random.default_rng(0)
np.random.seed(3)
random.seed(4)
updates = 0
log = defaultdict(list)


def batches(x, y, size):
    order = np.random.permutation(len(x))
    for i in range(0, len(x), size):
        rows = order[i : i + size]
        yield x[rows] + 0.01 * np.random.standard_normal(x[rows].shape), y[rows]


def update(params, grads, momenta, rate):
    global updates
    for name in params:
        momenta[name] = 0.9 * momenta[name] + grads[name]
        params[name] -= rate * momenta[name]
    updates += 1


def main():
    x = rng.standard_normal((48, 5))
    y = np.sin(x).sum(1, keepdims=True)
    params = {"w1": rng.standard_normal((5, 8)) * 0.3, "w2": rng.standard_normal((8, 1)) * 0.3}
    momenta = {name: np.zeros_like(value) for name, value in params.items()}
    recent = deque(maxlen=5)
    rate = 0.05
    kept_by_reference = rate_of_epoch = np.array([rate])
    for epoch in range(EPOCHS):
        rate *= 0.9
        for xb, yb in batches(x, y, 6):
            hidden = np.tanh(xb @ params["w1"])
            error = hidden @ params["w2"] - yb
            back = (error @ params["w2"].T) * (1 - hidden**2)
            grads = {"w1": xb.T @ back / len(xb), "w2": hidden.T @ error / len(xb)}
            mask = rng.random(8) > 0.1 * random.random()
            grads["w2"] *= mask[:, None]
            update(params, grads, momenta, rate)
            recent.append(float((error**2).mean()))
            log[epoch].append(recent[-1])
            rate_of_epoch = rate_of_epoch * 0.99
    print(
        "result",
        digest(
            params,
            momenta,
            list(recent),
            dict(log),
            updates,
            rate,
            kept_by_reference,
            rate_of_epoch,
            rng.random(2),
        ),
    )


main()
