"""A plain loop with metrics as modules, one that averages over the run and one that is reset each epoch, and the best model
kept as a deep copy in a name that was None before: built as torchmetrics' quick start."""

import csv
from copy import deepcopy

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

torch.manual_seed(4)
classes, epochs = 6, 6
centres = torch.randn(classes, 40)
labels = torch.randint(0, classes, (1920,))
inputs = centres[labels] + 1.2 * torch.randn(1920, 40)
train_loader = DataLoader(TensorDataset(inputs, labels), batch_size=48, shuffle=True)
valid_loader = DataLoader(TensorDataset(inputs[:300], labels[:300]), batch_size=100)

model = torch.nn.Sequential(
    torch.nn.Linear(40, 256),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(256, 256),
    torch.nn.ReLU(),
    torch.nn.Linear(256, classes),
)
optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
metrics = MetricCollection({"accuracy": MulticlassAccuracy(classes), "f1": MulticlassF1Score(classes)})
train_metrics, valid_metrics = metrics.clone(prefix="train_"), metrics.clone(prefix="valid_")
confusion = MulticlassConfusionMatrix(classes)
mean_loss = MeanMetric()
history = []
best, best_accuracy = None, 0.0

with open("metrics.csv", "w", newline="") as f:
    writer = csv.writer(f)
    for epoch in range(epochs):
        model.train()
        for i, (x, y) in enumerate(train_loader):
            optimizer.zero_grad()
            out = model(x)
            loss = torch.nn.functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            mean_loss.update(loss.detach())
            batch = train_metrics(out, y)
            confusion.update(out, y)
            if i % 5 == 0:
                print(
                    f"epoch {epoch} batch {i} accuracy {batch['train_accuracy'].item():.4f} mean {mean_loss.compute().item():.5f}"
                )
        model.eval()
        with torch.no_grad():
            for x, y in valid_loader:
                valid_metrics.update(model(x), y)
        found = {k: v.item() for k, v in (train_metrics.compute() | valid_metrics.compute()).items()}
        if found["valid_accuracy"] > best_accuracy:
            best, best_accuracy = deepcopy(model), found["valid_accuracy"]
        train_metrics.reset()
        valid_metrics.reset()
        schedule.step(mean_loss.compute())
        history.append(found)
        writer.writerow([epoch, *found.values()])
        f.flush()

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
state |= {
    "history": history,
    "confusion": confusion.compute(),
    "loss": mean_loss.compute(),
    "random": torch.get_rng_state(),
}
torch.save(state | {"best": best.state_dict(), "best_accuracy": best_accuracy}, "model.pt")
