"""Sine waves with two LSTM cells and LBFGS: built as pytorch/examples' time_sequence_prediction.

The closure is defined anew in each step and evaluated many times in it. Double precision. After each step the ahead is predicted
and drawn: here written as an array, since the drawing is not what is tried.
"""

import argparse
import os

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.LSTMCell(1, 16)
        self.second = nn.LSTMCell(16, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, input, ahead=0):
        outputs = []
        h1 = torch.zeros(input.size(0), 16, dtype=torch.double)
        c1 = torch.zeros(input.size(0), 16, dtype=torch.double)
        h2 = torch.zeros(input.size(0), 16, dtype=torch.double)
        c2 = torch.zeros(input.size(0), 16, dtype=torch.double)
        for now in input.split(1, dim=1):
            h1, c1 = self.first(now, (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            output = self.out(h2)
            outputs += [output]
        for _ in range(ahead):
            h1, c1 = self.first(output, (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            output = self.out(h2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


def write_waves(path, waves=20, length=40, period=8):
    np.random.seed(2)
    x = np.empty((waves, length), "int64")
    x[:] = np.array(range(length)) + np.random.randint(-4 * period, 4 * period, waves).reshape(waves, 1)
    torch.save(np.sin(x / 1.0 / period).astype("float64"), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    opt = parser.parse_args()
    if not os.path.exists("traindata.pt"):
        write_waves("traindata.pt")
    np.random.seed(0)
    torch.manual_seed(0)
    data = torch.load("traindata.pt", weights_only=False)
    input = torch.from_numpy(data[3:, :-1])
    target = torch.from_numpy(data[3:, 1:])
    test_input = torch.from_numpy(data[:3, :-1])
    test_target = torch.from_numpy(data[:3, 1:])
    net = Waves()
    net.double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(net.parameters(), lr=0.8, max_iter=4)
    for i in range(opt.steps):
        print("step", i)

        def closure():
            optimizer.zero_grad()
            out = net(input)
            loss = criterion(out, target)
            print("  loss", loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            ahead = 30
            told = net(test_input, ahead=ahead)
            loss = criterion(told[:, :-ahead], test_target)
            print("  tested", loss.item())
            y = told.detach().numpy()
        if i % 10 == 9:
            np.save(f"predict{i}.npy", y)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
