"""Whether two pictures show the same: built as pytorch/examples' siamese_network.

The dataset chooses the second picture of each pair with Python's and NumPy's global random states while it is read; the loop calls
a training and a testing function; Adadelta with a schedule.
"""

import argparse
import random

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.ReLU(),
        )
        self.fc = nn.Sequential(nn.Linear(2 * 8 * 5 * 5, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))
        self.sigmoid = nn.Sigmoid()
        self.fc.apply(self.initialise)

    def initialise(self, m):
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def describe(self, x):
        output = self.features(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1, input2):
        output = torch.cat((self.describe(input1), self.describe(input2)), 1)
        return self.sigmoid(self.fc(output))


class Pairs(Dataset):
    def __init__(self, count, seed):
        super().__init__()
        chance = np.random.default_rng(seed)
        shapes = np.random.default_rng(0).random((10, 28, 28))
        targets = chance.integers(0, 10, count)
        self.data = torch.tensor(shapes[targets] + 0.4 * chance.random((count, 28, 28)), dtype=torch.float32)
        self.sort_by_class(targets)

    def sort_by_class(self, targets):
        self.by_class = {}
        for i in range(10):
            self.by_class[i] = np.where(targets == i)[0]

    def __len__(self):
        return self.data.shape[0]

    def __getitem__(self, index):
        one_class = random.randint(0, 9)
        of_class = self.by_class[one_class]
        first = self.data[of_class[random.randint(0, len(of_class) - 1)]].clone()
        other_class = one_class
        if index % 2:
            while other_class == one_class:
                other_class = random.randint(0, 9)
        second = self.data[np.random.choice(self.by_class[other_class])].clone()
        return first.unsqueeze(0), second.unsqueeze(0), torch.tensor(float(index % 2 == 0))


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    criterion = nn.BCELoss()
    for number, (left, right, targets) in enumerate(train_loader):
        left, right, targets = left.to(device), right.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = model(left, right).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        if number % args.log_interval == 0:
            print(f"epoch {epoch} [{number}/{len(train_loader)}] loss {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    criterion = nn.BCELoss()
    with torch.no_grad():
        for left, right, targets in test_loader:
            outputs = model(left.to(device), right.to(device)).squeeze()
            test_loss += criterion(outputs, targets).sum().item()
            pred = torch.where(outputs > 0.5, 1, 0)
            correct += pred.eq(targets.view_as(pred)).sum().item()
    print(f"\ntested: loss {test_loss:.4f}, accuracy {correct}/{len(test_loader.dataset)}\n")


def main():
    parser = argparse.ArgumentParser(description="the same or not")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    np.random.seed(args.seed)
    device = torch.device("cpu")
    train_loader = DataLoader(Pairs(3200, 1), batch_size=args.batch_size)
    test_loader = DataLoader(Pairs(200, 2), batch_size=100)
    model = Twins().to(device)
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
    torch.save(
        state | {"python": random.getstate(), "numpy": np.random.random(), "torch": torch.get_rng_state()},
        "model.pt",
    )


if __name__ == "__main__":
    main()
