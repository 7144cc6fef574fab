"""A polynomial's coefficients: built as pytorch/examples' regression.

The loop counts without end and leaves by `break`; batches are drawn by a function; the weights are changed by hand.
"""

from itertools import count

import torch
import torch.nn.functional as F

torch.manual_seed(5)
DEGREE = 4
true_weight = torch.randn(DEGREE, 1) * 5
true_bias = torch.randn(1) * 5


def powers(x):
    x = x.unsqueeze(1)
    return torch.cat([x**i for i in range(1, DEGREE + 1)], 1)


def truth(x):
    return x.mm(true_weight) + true_bias.item()


def formula(W, b):
    result = "y = "
    for i, w in enumerate(W):
        result += f"{w:+.2f} x^{i + 1} "
    return result + f"{b[0]:+.2f}"


def get_batch(batch_size=40000):
    random = torch.randn(batch_size)
    x = powers(random)
    return x, truth(x)


line = torch.nn.Linear(true_weight.size(0), 1)

for batch_idx in count(1):
    x, y = get_batch()
    line.zero_grad()
    output = F.smooth_l1_loss(line(x), y)
    loss = output.item()
    output.backward()
    for param in line.parameters():
        param.data.add_(-0.05 * param.grad)
    if batch_idx % 5 == 0:
        print(f"batch {batch_idx} loss {loss:.6f}")
    if loss < 2e-3 or batch_idx >= 300:
        break

print(f"loss {loss:.6f} after {batch_idx} batches")
print("found " + formula(line.weight.view(-1), line.bias))
print("true  " + formula(true_weight.view(-1), true_bias))
state = {"model": line.state_dict(), "batches": batch_idx, "loss": loss, "random": torch.get_rng_state()}
torch.save(state, "model.pt")
