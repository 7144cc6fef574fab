"""The last layer trained anew: built as PyTorch's transfer learning tutorial.

Most weights are frozen; each epoch has a training and a validation phase in an inner loop; the best weights are None at first and a
deep copy later, put back at the end; the schedule steps after the training phase.
"""

import copy
import time

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)


def make(count):
    y = torch.randint(0, 2, (count,))
    x = torch.randn(count, 3, 24, 24) + y.view(-1, 1, 1, 1) * torch.linspace(-0.15, 0.15, 24)
    return TensorDataset(x, y)


sets = {"train": make(800), "val": make(160)}
loaders = {x: DataLoader(sets[x], batch_size=16, shuffle=True) for x in ["train", "val"]}
sizes = {x: len(sets[x]) for x in ["train", "val"]}


def backbone():
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
    )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = backbone()
        self.fc = nn.Linear(48 * 9 * 9, 10)

    def forward(self, x):
        return self.fc(self.features(x))


def train_model(model, criterion, optimizer, scheduler, num_epochs):
    began = time.time()
    best_weights = None
    best_accuracy = 0.0
    for epoch in range(num_epochs):
        print(f"epoch {epoch} of {num_epochs}")
        print("-" * 10)
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            total = 0.0
            right = 0
            for inputs, labels in loaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    _, guesses = torch.max(outputs, 1)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                total += loss.item() * inputs.size(0)
                right += torch.sum(guesses == labels.data)
            if phase == "train":
                scheduler.step()
            mean_loss = total / sizes[phase]
            accuracy = right.double() / sizes[phase]
            print(f"{phase} loss of epoch {epoch}: {mean_loss:.6f} accuracy: {accuracy:.4f}")
            if phase == "val" and accuracy > best_accuracy:
                best_accuracy = accuracy
                best_weights = copy.deepcopy(model.state_dict())
    print(f"complete in {time.time() - began:.1f} s; best accuracy {best_accuracy:.4f}")
    last = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return model, last


tuned = Model()
for param in tuned.parameters():
    param.requires_grad = False
tuned.fc = nn.Linear(tuned.fc.in_features, 2)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(tuned.fc.parameters(), lr=0.001, momentum=0.9)
schedule = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
tuned, last = train_model(tuned, criterion, optimizer, schedule, num_epochs=8)
state = {"best": tuned.state_dict(), "last": last, "optimizer": optimizer.state_dict()}
torch.save(state | {"schedule": schedule.state_dict(), "random": torch.get_rng_state()}, "model.pt")
