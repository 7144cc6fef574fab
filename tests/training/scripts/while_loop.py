"""One long `while True`: batches drawn at random, the rate set by hand, evaluation inside the loop, a counter that ends it."""

import math

import torch
from digest import digest

torch.manual_seed(1337)
data = torch.randint(0, 32, (500,))
model = torch.nn.Sequential(torch.nn.Embedding(32, 12), torch.nn.Dropout(0.1), torch.nn.Linear(12, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
max_iters = 24
iter_num = 0
best_val_loss = 1e9
running = -1.0


def get_batch():
    ix = torch.randint(len(data) - 9, (4,))
    return torch.stack([data[i : i + 8] for i in ix]), torch.stack([data[i + 1 : i + 9] for i in ix])


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [
        torch.nn.functional.cross_entropy(model(x).view(-1, 32), y.view(-1))
        for x, y in [get_batch() for _ in range(2)]
    ]
    model.train()
    return sum(losses) / len(losses)


while True:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (1 + math.cos(math.pi * iter_num / max_iters))
    if iter_num % 5 == 0:
        best_val_loss = min(best_val_loss, estimate_loss().item())
    for _micro in range(2):
        x, y = get_batch()
        loss = torch.nn.functional.cross_entropy(model(x).view(-1, 32), y.view(-1)) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    running = loss.item() if running == -1.0 else 0.9 * running + 0.1 * loss.item()
    iter_num += 1
    if iter_num > max_iters:
        break

print("result", digest(model.state_dict(), best_val_loss, running, iter_num, torch.rand(2)))
