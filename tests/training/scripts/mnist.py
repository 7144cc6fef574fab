"""The classic: train() and test() called from main(), argparse, a scheduler, the best model kept."""

import argparse
import copy

import torch
import torch.nn.functional as F
from digest import digest  # a module beside the script
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 24)
        self.norm = nn.BatchNorm1d(24)
        self.dropout = nn.Dropout(0.3)
        self.fc2 = nn.Linear(24, 4)

    def forward(self, x):
        return F.log_softmax(self.fc2(self.dropout(F.relu(self.norm(self.fc1(x))))), dim=1)


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}] Loss: {loss.item():.6f}")


def test(model, test_loader):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, target in test_loader:
            test_loss += F.nll_loss(model(data), target, reduction="sum").item()
    return test_loss / len(test_loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    x = torch.randn(80, 16)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    train_loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    best_loss, best_state, history = float("inf"), None, []
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        loss = test(model, test_loader)
        history.append(loss)
        if loss < best_loss:
            best_loss, best_state = loss, copy.deepcopy(model.state_dict())
        scheduler.step()
    print(
        "result",
        digest(model.state_dict(), best_state, best_loss, history, scheduler.get_last_lr(), torch.rand(3)),
    )


if __name__ == "__main__":
    main()
