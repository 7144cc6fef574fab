"""A small language model at the top level of a script: built as nanoGPT's train.py.

Settings are globals that `configurator.py` may overrule with exec; batches are cut from memory-mapped files at random places, the
next one while this one is worked on; gradients are accumulated; the learning rate is set by hand; a scaler, which is off; an
evaluation and a checkpoint of its own now and then; timing variables carried from step to step. The loop is `while True`.
"""

import math
import os
import pickle
import random
import time
from contextlib import nullcontext

import numpy as np
import torch
from model import GPT, GPTConfig

# settings, which a config file or the command line overrule
out_dir = "out"
eval_interval = 20
log_interval = 2
eval_iters = 5
always_save_checkpoint = False
init_from = "scratch"
dataset = "chars"
gradient_accumulation_steps = 2
batch_size = 8
block_size = 48
n_layer = 3
n_head = 4
n_embd = 64
dropout = 0.1
bias = False
learning_rate = 1e-3
max_iters = 90
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
decay_lr = True
warmup_iters = 10
lr_decay_iters = 90
min_lr = 1e-4
device = "cpu"
dtype = "bfloat16"
config_keys = [
    k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))
]
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "configurator.py")) as f:
    exec(f.read())
config = {k: globals()[k] for k in config_keys}

os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device, dtype=ptdtype)
data_dir = os.path.join("data", dataset)


def prepare():
    """What a prepare.py of the data set would leave: two files of numbers and the vocabulary."""
    os.makedirs(data_dir, exist_ok=True)
    chance = random.Random(9)
    syllables = [a + b for a in "bdfklmnprst" for b in "aeiou"]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(60)]
    text = " ".join(chance.choices(words, k=6000))
    stoi = {ch: i for i, ch in enumerate(sorted(set(text)))}
    ids = np.array([stoi[ch] for ch in text], dtype=np.uint16)
    cut = int(len(ids) * 0.9)
    ids[:cut].tofile(os.path.join(data_dir, "train.bin"))
    ids[cut:].tofile(os.path.join(data_dir, "val.bin"))
    with open(os.path.join(data_dir, "meta.pkl"), "wb") as f:
        pickle.dump({"vocab_size": len(stoi), "stoi": stoi}, f)


def get_batch(split):
    # mapped anew each time, so that pages which were read are given back
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    rows = [torch.from_numpy(data[s : s + block_size + 1].astype(np.int64)) for s in starts]
    both = torch.stack(rows)
    return both[:, :-1].contiguous().to(device), both[:, 1:].contiguous().to(device)


if not os.path.exists(data_dir):
    prepare()

iter_num = 0
best_val_loss = 1e9

with open(os.path.join(data_dir, "meta.pkl"), "rb") as f:
    meta = pickle.load(f)
model_args = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
model_args |= {"bias": bias, "vocab_size": meta["vocab_size"], "dropout": dropout}
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device, weights_only=False)
    model_args |= checkpoint["model_args"]
model = GPT(GPTConfig(**model_args))
if init_from == "resume":
    model.load_state_dict(checkpoint["model"])
    iter_num = checkpoint["iter_num"]
    best_val_loss = checkpoint["best_val_loss"]
model.to(device)

scaler = torch.amp.GradScaler(device, enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint = None


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            xb, yb = get_batch(split)
            with ctx:
                _, lossb = model(xb, yb)
            losses[k] = lossb.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    done = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * done)) * (learning_rate - min_lr)


X, Y = get_batch("train")
t0 = time.time()
local_iter_num = 0
running_mfu = -1.0
while True:
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"eval at {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}")
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "model_args": model_args,
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                    "config": config,
                }
                print(f"writing a checkpoint to {out_dir}")
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))

    for _micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        # the next batch while the device is busy with this one
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    t1 = time.time()
    dt = t1 - t0
    t0 = t1
    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        if local_iter_num >= 5:
            mfu = model.estimate_mfu(batch_size * gradient_accumulation_steps, dt)
            running_mfu = mfu if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * mfu
        print(f"iter {iter_num}: loss {lossf:.5f}, time {dt * 1000:.2f}ms, mfu {running_mfu * 100:.2f}%")
    iter_num += 1
    local_iter_num += 1
    if iter_num > max_iters:
        break

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num, "lr": lr}
torch.save(state | {"best": best_val_loss, "X": X, "Y": Y, "random": torch.get_rng_state()}, "model.pt")
