"""A Trainer with the loops in methods, the step in a third one, two optimizers of which one steps now and then, early stopping."""

import torch
from digest import digest
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, epochs):
        torch.manual_seed(5)
        x = torch.randn(32, 6)
        self.loader = DataLoader(TensorDataset(x, x.prod(1)), batch_size=4, shuffle=True)
        self.models = {"body": torch.nn.Linear(6, 8), "head": torch.nn.Linear(8, 1)}
        self.optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in self.models.values()]
        self.epochs, self.global_step, self.patience = epochs, 0, 0
        self.history = {"loss": [], "lr": []}
        self.best = None

    def training_step(self, x, y):
        out = self.models["head"](torch.tanh(self.models["body"](x))).squeeze(1)
        loss = ((out - y) ** 2).mean()
        self.optimizers[0].zero_grad()
        loss.backward()
        self.optimizers[0].step()
        if self.global_step % 3 == 2:
            self.optimizers[1].step()
            self.optimizers[1].zero_grad()
        return loss.item()

    def train_epoch(self):
        total = 0.0
        for x, y in self.loader:
            total += self.training_step(x, y)
            self.global_step += 1
        return total

    def fit(self):
        epoch = 0
        while epoch < self.epochs:
            total = self.train_epoch()
            self.history["loss"].append(total)
            if self.best is None or total < self.best:
                self.best, self.patience = total, 0
            else:
                self.patience += 1
            epoch += 1
            if epoch == 3:
                break
        return epoch


if __name__ == "__main__":
    trainer = Trainer(epochs=5)
    ended = trainer.fit()
    states = [m.state_dict() for m in trainer.models.values()]
    print("result", digest(states, trainer.history, trainer.best, trainer.global_step, ended, torch.rand(1)))
