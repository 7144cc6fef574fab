"""Everything in the module: no function, tqdm, a scheduler per step, an average of the weights, an early end of each epoch."""

import copy
import random

import numpy as np
import torch
from digest import digest
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)

x = torch.randn(96, 8)
loader = DataLoader(
    TensorDataset(x, x.sum(1, keepdim=True)),
    batch_size=8,
    shuffle=True,
    generator=torch.Generator().manual_seed(4),
)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
losses, best, best_at = [], None, 0
initial = x

for epoch in range(3):
    running = 0.0
    pbar = tqdm(loader, disable=True)
    for step, (inputs, targets) in enumerate(pbar):
        inputs = inputs + 0.01 * random.random() + 0.01 * np.random.rand()
        loss = ((model(inputs) - targets) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
        running += loss.item()
        if best is None or loss < best:
            best, best_at = loss.detach(), epoch * 100 + step
        pbar.set_postfix(loss=running / (step + 1))
        if step == 8:
            break
    losses.append(running)
    x = x * 1.0

print(
    "result",
    digest(model.state_dict(), average.state_dict(), losses, best, best_at, step, initial, x, torch.rand(2)),
)
