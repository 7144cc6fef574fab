"""Rows of an image as a sequence: built as pytorch/examples' mnist_rnn.

As the convolutional one, with an LSTM, batch normalisation and two dropouts. A loader with one worker process, which draws noise
in the dataset.
"""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        chance = np.random.default_rng(seed)
        shapes = np.random.default_rng(0).random((10, 28, 28)).astype(np.float32)
        self.targets = chance.integers(0, 10, count)
        self.shapes = shapes[self.targets]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return torch.from_numpy(self.shapes[index]).unsqueeze(0) + 0.3 * torch.randn(1, 28, 28), int(
            self.targets[index]
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(input_size=28, hidden_size=48, batch_first=True)
        self.batchnorm = nn.BatchNorm1d(48)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(48, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, input):
        input = input.reshape(-1, 28, 28)
        output, _ = self.rnn(input)
        output = self.batchnorm(output[:, -1, :])
        output = self.dropout1(output)
        output = F.relu(self.fc1(output))
        output = self.dropout2(output)
        return F.log_softmax(self.fc2(output), dim=1)


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
            print(f"epoch {epoch} [{number}/{len(train_loader)}] loss {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    total = 0
    right = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            total += F.nll_loss(output, target.to(device), reduction="sum").item()
            right += output.argmax(dim=1).eq(target).sum().item()
    count = len(test_loader.dataset)
    print(f"tested: mean loss {total / count:.4f}, accuracy {100.0 * right / count:.1f} %")


def main():
    parser = argparse.ArgumentParser(description="digits row by row")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    kwargs = {"num_workers": 1}
    train_loader = torch.utils.data.DataLoader(
        Rows(1600, 1), batch_size=args.batch_size, shuffle=True, **kwargs
    )
    test_loader = torch.utils.data.DataLoader(Rows(320, 2), batch_size=160, shuffle=True)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()},
        "model.pt",
    )


if __name__ == "__main__":
    main()
