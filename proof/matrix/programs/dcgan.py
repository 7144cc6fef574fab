"""Two networks against each other: built as pytorch/examples' dcgan.

The loop is at the top level of the script. Two models, two Adams, a fixed noise made before the loop, batch normalisation, labels
filled in place, pictures every few batches, and a checkpoint of both models after each epoch. The seed is drawn if none is given.
"""

import argparse
import os
import random

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--noise_size", type=int, default=24)
parser.add_argument("--painter_width", type=int, default=8)
parser.add_argument("--judge_width", type=int, default=8)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.0002)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--folder", default="out")
parser.add_argument("--manual_seed", type=int, default=7)
args = parser.parse_args()
print(args)

os.makedirs(args.folder, exist_ok=True)
if args.manual_seed is None:
    args.manual_seed = random.randint(1, 10000)
print("seed", args.manual_seed)
random.seed(args.manual_seed)
torch.manual_seed(args.manual_seed)


class Blobs(Dataset):
    """Coloured squares at random places, turned over at random when they are read."""

    def __init__(self, count):
        self.at = torch.randint(4, 20, (count, 2))
        self.colour = torch.rand(count, 3, 1, 1)

    def __len__(self):
        return len(self.at)

    def __getitem__(self, index):
        image = torch.full((3, 32, 32), -1.0)
        row, column = self.at[index]
        image[:, row : row + 8, column : column + 8] = self.colour[index]
        if random.random() < 0.5:
            image = image.flip(2)
        return image, 0


dataset = Blobs(640)
dataloader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, num_workers=0)
device = torch.device("cpu")
noise_size, painter_width, judge_width, colours = (
    int(args.noise_size),
    int(args.painter_width),
    int(args.judge_width),
    3,
)


def initialise(m):
    kind = m.__class__.__name__
    if kind.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif kind.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(noise_size, painter_width * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(painter_width * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(painter_width * 4, painter_width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(painter_width * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(painter_width * 2, painter_width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(painter_width),
            nn.ReLU(True),
            nn.ConvTranspose2d(painter_width, colours, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(colours, judge_width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(judge_width, judge_width * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(judge_width * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(judge_width * 2, judge_width * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(judge_width * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(judge_width * 4, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


painter = Painter().to(device)
painter.apply(initialise)
judge = Judge().to(device)
judge.apply(initialise)

bce = nn.BCELoss()
same_noise = torch.randn(args.batch_size, noise_size, 1, 1, device=device)
is_real = 1
is_made = 0

judge_optimizer = optim.Adam(judge.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
painter_optimizer = optim.Adam(painter.parameters(), lr=args.lr, betas=(args.beta1, 0.999))

for epoch in range(args.epochs):
    for i, data in enumerate(dataloader, 0):
        # the discriminator, on real pictures and then on made ones
        judge.zero_grad()
        real = data[0].to(device)
        batch_size = real.size(0)
        label = torch.full((batch_size,), is_real, dtype=real.dtype, device=device)
        output = judge(real)
        loss_real = bce(output, label)
        loss_real.backward()
        score_real = output.mean().item()

        noise = torch.randn(batch_size, noise_size, 1, 1, device=device)
        made = painter(noise)
        label.fill_(is_made)
        output = judge(made.detach())
        loss_made = bce(output, label)
        loss_made.backward()
        score_made = output.mean().item()
        loss_judge = loss_real + loss_made
        judge_optimizer.step()

        # the generator
        painter.zero_grad()
        label.fill_(is_real)
        output = judge(made)
        loss_painter = bce(output, label)
        loss_painter.backward()
        score_after = output.mean().item()
        painter_optimizer.step()

        if i % 4 == 0:
            print(
                f"[{epoch}/{args.epochs}][{i}/{len(dataloader)}] judge {loss_judge.item():.4f} painter {loss_painter.item():.4f} "
                f"real {score_real:.4f} made {score_made:.4f} / {score_after:.4f}"
            )
        if i % 20 == 0:
            torch.save(real, f"{args.folder}/real.pt")
            made = painter(same_noise)
            torch.save(made.detach(), f"{args.folder}/fake_samples_epoch_{epoch:03d}.pt")

    torch.save(painter.state_dict(), f"{args.folder}/painter_{epoch}.pth")
    torch.save(judge.state_dict(), f"{args.folder}/judge_{epoch}.pth")

final = {
    "G": painter.state_dict(),
    "D": judge.state_dict(),
    "optG": painter_optimizer.state_dict(),
    "optD": judge_optimizer.state_dict(),
}
torch.save(final | {"random": torch.get_rng_state(), "python": random.getstate()}, "model.pt")
