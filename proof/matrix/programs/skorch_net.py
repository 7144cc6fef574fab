"""A network as a scikit-learn estimator: built as skorch's basic usage.

The loop is the library's: fit() of a NeuralNetClassifier with a split for validation, callbacks for scores, early stopping, a schedule
and checkpoints, and a history that is written as JSON.
"""

import numpy as np
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, Checkpoint, EarlyStopping, EpochScoring, LRScheduler
from torch import nn


class MyModule(nn.Module):
    def __init__(self, num_units=400):
        super().__init__()
        self.dense0 = nn.Linear(20, num_units)
        self.dropout = nn.Dropout(0.5)
        self.dense1 = nn.Linear(num_units, num_units)
        self.output = nn.Linear(num_units, 2)

    def forward(self, X):
        X = self.dropout(torch.relu(self.dense0(X)))
        X = torch.relu(self.dense1(X))
        return torch.softmax(self.output(X), dim=-1)


class Batches(Callback):
    """Counts and tells."""

    def on_train_begin(self, net, **kwargs):
        self.count = 0

    def on_batch_end(self, net, training, **kwargs):
        if training:
            self.count += 1
            if self.count % 5 == 0:
                print(f"batch {self.count} loss {net.history[-1, 'batches', -1, 'train_loss']:.5f}")


if __name__ == "__main__":
    np.random.seed(0)
    torch.manual_seed(0)
    X = np.random.randn(1500, 20).astype(np.float32)
    y = ((X[:, :5].sum(1) + 0.5 * np.random.randn(1500)) > 0).astype(np.int64)
    net = NeuralNetClassifier(
        MyModule,
        max_epochs=8,
        lr=0.1,
        batch_size=50,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        iterator_train__shuffle=True,
        callbacks=[
            ("batches", Batches()),
            ("auc", EpochScoring("roc_auc", lower_is_better=False)),
            ("schedule", LRScheduler("StepLR", step_size=2, gamma=0.7)),
            ("stop", EarlyStopping(patience=8)),
            ("best", Checkpoint(dirname="best", monitor="valid_loss_best")),
        ],
    )
    net.fit(X, y)
    scores = [{k: row[k] for k in ("epoch", "train_loss", "valid_loss", "roc_auc")} for row in net.history]
    state = {"model": net.module_.state_dict(), "optimizer": net.optimizer_.state_dict(), "scores": scores}
    torch.save(state | {"random": torch.get_rng_state(), "numpy": np.random.random()}, "model.pt")
