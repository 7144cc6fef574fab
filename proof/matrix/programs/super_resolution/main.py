"""Small pictures made large again: built as pytorch/examples' super_resolution.

Four modules in one folder; loops at the top level over functions that read globals; pictures read from a folder by a loader with
worker processes; the whole model is saved as a file of its own after each epoch.
"""

import argparse
from math import log10

import torch
import torch.nn as nn
import torch.optim as optim
from data import get_test_set, get_training_set
from model import Net
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description="small pictures made large")
parser.add_argument("--upscale_factor", type=int, default=2)
parser.add_argument("--batchSize", type=int, default=8)
parser.add_argument("--testBatchSize", type=int, default=10)
parser.add_argument("--nEpochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--seed", type=int, default=123)
opt = parser.parse_args()
print(opt)

torch.manual_seed(opt.seed)
device = torch.device("cpu")

print("loading")
train_set = get_training_set(opt.upscale_factor)
test_set = get_test_set(opt.upscale_factor)
training_data_loader = DataLoader(
    dataset=train_set, num_workers=opt.threads, batch_size=opt.batchSize, shuffle=True
)
testing_data_loader = DataLoader(dataset=test_set, num_workers=0, batch_size=opt.testBatchSize, shuffle=False)

print("building")
model = Net(upscale_factor=opt.upscale_factor).to(device)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=opt.lr)


def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        print(f"epoch [{epoch}] batch {iteration} of {len(training_data_loader)}: loss {loss.item():.4f}")
    print(f"all of epoch {epoch}: mean loss: {epoch_loss / len(training_data_loader):.4f}")


def test():
    avg_psnr = 0
    with torch.no_grad():
        for batch in testing_data_loader:
            input, target = batch[0].to(device), batch[1].to(device)
            prediction = model(input)
            mse = criterion(prediction, target)
            avg_psnr += 10 * log10(1 / mse.item())
    print(f"mean PSNR: {avg_psnr / len(testing_data_loader):.4f} dB")


def checkpoint(epoch):
    model_out_path = f"model_epoch_{epoch}.pth"
    torch.save(model, model_out_path)
    print(f"written to {model_out_path}")


for epoch in range(1, opt.nEpochs + 1):
    train(epoch)
    test()
    checkpoint(epoch)
torch.save(
    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()},
    "model.pt",
)
