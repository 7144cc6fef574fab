"""Meters, the averaged model, mixup, a schedule by updates, checkpoints and a summary."""

import csv
import math
import os
from copy import deepcopy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class ModelEma(nn.Module):
    """A copy of the model whose weights follow slowly."""

    def __init__(self, model, decay):
        super().__init__()
        self.module = deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model, step):
        decay = min(self.decay, (1 + step) / (10 + step))
        mine = [v for v in self.module.state_dict().values() if v.dtype.is_floating_point]
        theirs = [v for v in model.state_dict().values() if v.dtype.is_floating_point]
        torch._foreach_lerp_(mine, theirs, 1 - decay)


class Mixup:
    def __init__(self, alpha, num_classes):
        self.alpha, self.num_classes = alpha, num_classes

    def __call__(self, x, target):
        lam = float(np.random.beta(self.alpha, self.alpha))
        x = x * lam + x.flip(0) * (1 - lam)
        hot = F.one_hot(target, self.num_classes).float() * 0.9 + 0.02
        return x, hot * lam + hot.flip(0) * (1 - lam)


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


class CosineScheduler:
    def __init__(self, optimizer, total, warmup):
        self.optimizer, self.total, self.warmup = optimizer, total, warmup
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.metric = None

    def step_update(self, num_updates):
        if num_updates < self.warmup:
            scale = (num_updates + 1) / (self.warmup + 1)
        else:
            done = (num_updates - self.warmup) / max(1, self.total - self.warmup)
            scale = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale


class CheckpointSaver:
    """Keeps the best few files, and one that is always the last."""

    def __init__(self, model, optimizer, args, model_ema, checkpoint_dir, max_history):
        self.model, self.optimizer, self.args, self.model_ema = model, optimizer, args, model_ema
        self.checkpoint_dir, self.max_history = checkpoint_dir, max_history
        self.checkpoint_files = []
        self.best_epoch = None
        self.best_metric = None

    def save_checkpoint(self, epoch, metric):
        last = os.path.join(self.checkpoint_dir, "last.pth.tar")
        temporary = os.path.join(self.checkpoint_dir, "tmp.pth.tar")
        state = {
            "epoch": epoch,
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        state |= {
            "args": vars(self.args),
            "metric": metric,
            "state_dict_ema": self.model_ema.module.state_dict(),
        }
        torch.save(state, temporary)
        os.replace(temporary, last)
        worst = self.checkpoint_files[-1] if self.checkpoint_files else None
        if len(self.checkpoint_files) < self.max_history or worst is None or metric > worst[1]:
            if len(self.checkpoint_files) >= self.max_history:
                for name, _ in self.checkpoint_files[self.max_history - 1 :]:
                    os.remove(name)
                self.checkpoint_files = self.checkpoint_files[: self.max_history - 1]
            name = os.path.join(self.checkpoint_dir, f"checkpoint-{epoch}.pth.tar")
            if os.path.exists(name):
                os.unlink(name)
            os.link(last, name)
            self.checkpoint_files.append((name, metric))
            self.checkpoint_files = sorted(self.checkpoint_files, key=lambda x: x[1], reverse=True)
            if self.best_metric is None or metric > self.best_metric:
                self.best_epoch, self.best_metric = epoch, metric
        return (None, None) if self.best_metric is None else (self.best_metric, self.best_epoch)


def update_summary(epoch, train_metrics, eval_metrics, filename, lr, write_header):
    row = {"epoch": epoch} | {f"train_{k}": v for k, v in train_metrics.items()}
    row |= {f"eval_{k}": v for k, v in eval_metrics.items()} | {"lr": lr}
    with open(filename, mode="a") as f:
        writer = csv.DictWriter(f, fieldnames=row.keys())
        if write_header:
            writer.writeheader()
        writer.writerow(row)
