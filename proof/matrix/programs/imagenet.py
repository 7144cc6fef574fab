"""Pictures into classes, with meters: built as pytorch/examples' imagenet.

Meters and a progress display as objects in the training function, a global best accuracy, worker processes that augment at random,
a checkpoint after each epoch with a copy of the best, a schedule, and a validation.
"""

import argparse
import os
import random
import shutil
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description="pictures into classes")
parser.add_argument("--workers", default=2, type=int)
parser.add_argument("--epochs", default=5, type=int)
parser.add_argument("--start-epoch", default=0, type=int)
parser.add_argument("--batch-size", default=24, type=int)
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--weight-decay", default=1e-4, type=float)
parser.add_argument("--print-freq", default=4, type=int)
parser.add_argument("--resume", default="")
parser.add_argument("--seed", default=3, type=int)

best_accuracy = 0


class Pictures(Dataset):
    """Stripes of six directions, cropped and turned over at random where a transform says so."""

    def __init__(self, count, transform):
        chance = torch.Generator().manual_seed(count)
        self.label = torch.randint(0, 6, (count,), generator=chance)
        self.noise = torch.randn(count, 3, 36, 36, generator=chance)
        self.transform = transform

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        label = int(self.label[index])
        rows, columns = torch.meshgrid(torch.arange(36.0), torch.arange(36.0), indexing="ij")
        angle = torch.tensor(label * 0.5)
        stripes = torch.sin((rows * torch.cos(angle) + columns * torch.sin(angle)) / 2)
        return self.transform(stripes + 0.7 * self.noise[index]), label


def augment(image):
    top, left = random.randint(0, 4), int(torch.randint(0, 5, ()))
    image = image[:, top : top + 32, left : left + 32]
    return image.flip(2) if torch.rand(()) < 0.1 else image


def centre(image):
    return image[:, 2:34, 2:34]


class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.short(x))


def small_resnet():
    return nn.Sequential(
        Residual(3, 8, 2), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 6)
    )


class Meter:
    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


class Progress:
    def __init__(self, count_of_batches, meters, prefix=""):
        self.count_of_batches, self.meters, self.prefix = count_of_batches, meters, prefix

    def display(self, batch):
        print("\t".join([f"{self.prefix}[{batch}/{self.count_of_batches}]", *map(str, self.meters)]))


def accuracy(output, target):
    with torch.no_grad():
        return (output.argmax(1) == target).float().mean().item() * 100


def train(train_loader, model, criterion, optimizer, epoch, args):
    took = Meter("Time", ":6.3f")
    losses = Meter("Loss", ":.4e")
    right = Meter("Acc", ":6.2f")
    progress = Progress(len(train_loader), [took, losses, right], prefix=f"epoch [{epoch}]")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        right.update(accuracy(output, target), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        took.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            progress.display(i + 1)
    return losses.avg, right.avg


def validate(val_loader, model, criterion):
    right = Meter("Acc", ":6.2f")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            right.update(accuracy(model(images), target), images.size(0))
    print(f" * accuracy {right.avg:.3f}")
    return right.avg


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


def main():
    global best_accuracy
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    model = small_resnet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    scheduler = StepLR(optimizer, step_size=2, gamma=0.3)
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume, weights_only=False)
        args.start_epoch = checkpoint["epoch"]
        best_accuracy = checkpoint["best_accuracy"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    train_loader = DataLoader(
        Pictures(960, augment), batch_size=args.batch_size, shuffle=True, num_workers=args.workers
    )
    val_loader = DataLoader(Pictures(240, centre), batch_size=80, shuffle=False)
    history = []
    for epoch in range(args.start_epoch, args.epochs):
        history.append(train(train_loader, model, criterion, optimizer, epoch, args))
        accuracy_now = validate(val_loader, model, criterion)
        scheduler.step()
        is_best = accuracy_now > best_accuracy
        best_accuracy = max(accuracy_now, best_accuracy)
        state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best_accuracy": best_accuracy}
        state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        save_checkpoint(state, is_best)
    torch.save(state | {"history": history, "random": torch.get_rng_state()}, "model.pt")


if __name__ == "__main__":
    main()
