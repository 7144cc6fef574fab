"""A variational autoencoder: built as pytorch/examples' vae.

Model, optimizer and loaders are globals; train(epoch) and test(epoch) read them. Samples are drawn and written as pictures after
each epoch, the first batch of each test too.
"""

import argparse
import os

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="pictures from noise")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=5)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cpu")


def pictures(count, seed):
    chance = np.random.default_rng(seed)
    centres = chance.random((count, 2, 1, 1)) * 20 + 4
    rows, columns = np.mgrid[0:28, 0:28]
    return torch.tensor(
        np.exp(-((rows - centres[:, 0]) ** 2 + (columns - centres[:, 1]) ** 2) / 20), dtype=torch.float32
    )


train_loader = DataLoader(TensorDataset(pictures(1920, 1)), batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(pictures(256, 2)), batch_size=args.batch_size, shuffle=False)
os.makedirs("results", exist_ok=True)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(784, 400)
        self.to_mean = nn.Linear(400, 20)
        self.to_log_variance = nn.Linear(400, 20)
        self.outer = nn.Linear(20, 400)
        self.to_picture = nn.Linear(400, 784)

    def encode(self, x):
        hidden = F.relu(self.inner(x))
        return self.to_mean(hidden), self.to_log_variance(hidden)

    def draw(self, mean, log_variance):
        deviation = torch.exp(0.5 * log_variance)
        return mean + torch.randn_like(deviation) * deviation

    def decode(self, z):
        return torch.sigmoid(self.to_picture(F.relu(self.outer(z))))

    def forward(self, x):
        mean, log_variance = self.encode(x.view(-1, 784))
        return self.decode(self.draw(mean, log_variance)), mean, log_variance


def save_image(images, path):
    """A row of pictures as a PGM file."""
    row = torch.cat(list(images.view(-1, 28, 28)), dim=1)
    with open(path, "wb") as f:
        f.write(b"P5 %d %d 255\n" % (row.shape[1], row.shape[0]))
        f.write(row.mul(255).clamp(0, 255).to(torch.uint8).numpy().tobytes())


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def negative_bound(rebuilt, x, mean, log_variance):
    likelihood = F.binary_cross_entropy(rebuilt, x.view(-1, 784), reduction="sum")
    return likelihood - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


def train(epoch):
    model.train()
    total = 0
    for number, (data,) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        rebuilt, mean, log_variance = model(data)
        loss = negative_bound(rebuilt, data, mean, log_variance)
        loss.backward()
        total += loss.item()
        optimizer.step()
        if number % args.log_interval == 0:
            print(f"epoch {epoch} [{number}/{len(train_loader)}] loss {loss.item() / len(data):.6f}")
    print(f"all of epoch {epoch}: mean loss: {total / len(train_loader.dataset):.4f}")


def test(epoch):
    model.eval()
    total = 0
    with torch.no_grad():
        for i, (data,) in enumerate(test_loader):
            data = data.to(device)
            rebuilt, mean, log_variance = model(data)
            total += negative_bound(rebuilt, data, mean, log_variance).item()
            if i == 0:
                n = min(data.size(0), 8)
                beside = torch.cat([data[:n], rebuilt.view(-1, 28, 28)[:n]])
                save_image(beside.cpu(), f"results/reconstruction_{epoch}.pgm")
    print(f"tested: loss: {total / len(test_loader.dataset):.4f}")


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test(epoch)
        with torch.no_grad():
            sample = torch.randn(16, 20).to(device)
            sample = model.decode(sample).cpu()
            save_image(sample, f"results/sample_{epoch}.pgm")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()},
        "model.pt",
    )
