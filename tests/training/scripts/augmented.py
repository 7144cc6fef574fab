"""Workers that augment at random, gradients accumulated over several batches, a meter, iterations that are skipped."""

import torch
from digest import digest
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, n):
        self.x = torch.arange(n * 4.0).reshape(n, 4) / n

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(4), self.x[i].sum()


class AverageMeter:
    def __init__(self):
        self.sum, self.count, self.values = 0.0, 0, []

    def update(self, value):
        self.sum += value
        self.count += 1
        self.values.append(value)


def main(workers=2, accumulate=4):
    torch.manual_seed(11)
    loader = DataLoader(Noisy(40), batch_size=4, shuffle=True, num_workers=workers)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    meter = AverageMeter()
    skipped = 0
    for _epoch in range(2):
        for i, (x, y) in enumerate(loader):
            if i == 3:
                skipped += 1
                continue
            loss = ((model(x).squeeze(1) - y) ** 2).mean() / accumulate
            loss.backward()
            meter.update(loss.item())
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    print(
        "result", digest(model.state_dict(), meter.sum, meter.count, meter.values, skipped, model.weight.grad)
    )


if __name__ == "__main__":
    main()
