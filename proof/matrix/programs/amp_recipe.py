"""Automatic mixed precision with a scaler: built as PyTorch's AMP recipe, on the processor.

A GradScaler whose scale grows while training goes on and shrinks when a gradient is infinite, float16 in autocast, gradients
accumulated over two batches and clipped, and the scaler's state in a checkpoint.
"""

import torch
from torch.amp import GradScaler, autocast

torch.manual_seed(2)
device = "cpu"
batch_size, in_size, num_layers = 64, 160, 3


def make_model(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers += [torch.nn.Linear(in_size, in_size), torch.nn.ReLU(), torch.nn.Dropout(0.1)]
    layers.append(torch.nn.Linear(in_size, out_size))
    return torch.nn.Sequential(*layers)


truth = torch.randn(in_size, 10)
data = [torch.randn(batch_size, in_size) for _ in range(40)]
targets = [torch.tanh(x @ truth / 8) for x in data]
data[17] = data[17] * 1e30  # a batch that overflows: the step is left out and the scale halved

net = make_model(in_size, 10, num_layers)
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
scaler = GradScaler(device, init_scale=2.0**10, growth_interval=7)
loss_fn = torch.nn.MSELoss()
iters_to_accumulate = 2
scales = []

for epoch in range(5):
    for i, (input, target) in enumerate(zip(data, targets, strict=True)):
        with autocast(device_type=device, dtype=torch.bfloat16):
            output = net(input)
            loss = loss_fn(output.float(), target) / iters_to_accumulate
        scaler.scale(loss).backward()
        if (i + 1) % iters_to_accumulate == 0:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        scales.append(scaler.get_scale())
        if i % 4 == 0:
            print(f"epoch {epoch} batch {i} loss {loss.item():.6f} scale {scales[-1]:.0f}")
    torch.save(
        {"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()},
        "checkpoint.pt",
    )

state = {
    "model": net.state_dict(),
    "optimizer": opt.state_dict(),
    "scaler": scaler.state_dict(),
    "scales": scales,
}
torch.save(state | {"random": torch.get_rng_state()}, "model.pt")
