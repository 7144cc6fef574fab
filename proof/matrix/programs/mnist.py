"""Digits with a small convolutional network: built as pytorch/examples' mnist.

Functions train() and test() under a main(); Adadelta, StepLR, dropout, two loaders with their own keyword arguments, a print
every few batches and one torch.save at the end. The digits are drawn by the program.
"""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    """Strokes of ten shapes, with noise."""

    def __init__(self, count, seed, transform=None):
        chance = np.random.default_rng(seed)
        shapes = np.random.default_rng(0).random((10, 28, 28)) > 0.7
        self.targets = chance.integers(0, 10, count)
        self.data = (shapes[self.targets] * 200 + chance.integers(0, 56, (count, 28, 28))).astype(np.uint8)
        self.transform = transform

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image, target = self.data[index], int(self.targets[index])
        return (self.transform(image) if self.transform else image), target


def to_normal_tensor(image):
    return (torch.from_numpy(image).float().div(255).unsqueeze(0) - 0.1307) / 0.3081


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(16 * 12 * 12, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for number, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if number % args.log_interval == 0:
            seen = number * len(data)
            print(f"epoch {epoch} [{seen}/{len(train_loader.dataset)}] loss {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    total = 0
    right = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            total += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            right += pred.eq(target.view_as(pred)).sum().item()
    total /= len(test_loader.dataset)
    print(f"\ntested: mean loss {total:.4f}, accuracy {right}/{len(test_loader.dataset)}\n")


def main():
    parser = argparse.ArgumentParser(description="digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=250)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    train_kwargs = {"batch_size": args.batch_size, "shuffle": True}
    test_kwargs = {"batch_size": args.test_batch_size}
    train_loader = DataLoader(Digits(2000, 1, to_normal_tensor), **train_kwargs)
    test_loader = DataLoader(Digits(500, 2, to_normal_tensor), **test_kwargs)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": scheduler.state_dict(),
    }
    torch.save(state | {"random": torch.get_rng_state()}, "model.pt")


if __name__ == "__main__":
    main()
