"""The training loop with all it keeps."""

import csv
import math
import random
import time
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from engine.data import Shapes, build_dataloader

DEFAULTS = {
    "epochs": 3,
    "batch": 16,
    "nbs": 64,
    "workers": 0,
    "lr0": 0.01,
    "lrf": 0.1,
    "momentum": 0.9,
    "weight_decay": 5e-4,
}
DEFAULTS |= {
    "warmup_epochs": 1.0,
    "warmup_momentum": 0.8,
    "patience": 5,
    "seed": 0,
    "close_mosaic": 0,
    "save_dir": "runs/train",
}


class ModelEMA:
    def __init__(self, model, decay=0.99, tau=40):
        self.ema = deepcopy(model).eval()
        self.updates = 0
        self.decay = lambda x: decay * (1 - math.exp(-x / tau))
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        self.updates += 1
        d = self.decay(self.updates)
        msd = model.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= d
                v += (1 - d) * msd[k].detach()


class EarlyStopping:
    def __init__(self, patience):
        self.best_fitness, self.best_epoch, self.patience = 0.0, 0, patience

    def __call__(self, epoch, fitness):
        if fitness >= self.best_fitness:
            self.best_epoch, self.best_fitness = epoch, fitness
        return epoch - self.best_epoch >= self.patience


class Trainer:
    def __init__(self, model, overrides, callbacks):
        self.args = SimpleNamespace(**(DEFAULTS | overrides))
        self.model, self.callbacks = model, callbacks
        random.seed(self.args.seed)
        np.random.seed(self.args.seed)
        torch.manual_seed(self.args.seed)
        self.save_dir = Path(self.args.save_dir)
        self.wdir = self.save_dir / "weights"
        self.wdir.mkdir(parents=True, exist_ok=True)
        self.last, self.best, self.csv = (
            self.wdir / "last.pt",
            self.wdir / "best.pt",
            self.save_dir / "results.csv",
        )
        self.metrics, self.fitness, self.best_fitness = {}, 0.0, None
        self.stop = False

    def run_callbacks(self, event):
        for callback in self.callbacks.get(event, []):
            callback(self)

    def setup(self):
        args = self.args
        self.train_loader = build_dataloader(Shapes(480, True, 1), args.batch, args.workers, shuffle=True)
        self.test_loader = build_dataloader(Shapes(96, False, 2), 32, 0, shuffle=False)
        self.accumulate = max(round(args.nbs / args.batch), 1)
        groups = [], [], []
        for module in self.model.modules():
            for name, p in module.named_parameters(recurse=False):
                groups[2 if name == "bias" else 1 if isinstance(module, torch.nn.BatchNorm2d) else 0].append(
                    p
                )
        self.optimizer = torch.optim.SGD(groups[2], lr=args.lr0, momentum=args.momentum, nesterov=True)
        self.optimizer.add_param_group({"params": groups[0], "weight_decay": args.weight_decay})
        self.optimizer.add_param_group({"params": groups[1], "weight_decay": 0.0})
        self.lf = lambda x: max(1 - x / args.epochs, 0) * (1.0 - args.lrf) + args.lrf
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_lambda=self.lf)
        self.scheduler.last_epoch = -1
        self.ema = ModelEMA(self.model)
        self.stopper = EarlyStopping(args.patience)

    def optimizer_step(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(self.model)

    def train(self):
        self.setup()
        args = self.args
        nb = len(self.train_loader)
        nw = max(round(args.warmup_epochs * nb), 20)
        last_opt_step = -1
        self.train_time_start = time.time()
        self.run_callbacks("on_train_start")
        self.optimizer.zero_grad()
        self.epoch = 0
        while True:
            self.scheduler.step()
            self.model.train()
            if self.epoch == args.epochs - args.close_mosaic:
                self.train_loader.dataset.close_mosaic()
                self.train_loader.reset()
            self.tloss = None
            for i, batch in enumerate(self.train_loader):
                ni = i + nb * self.epoch
                if ni <= nw:
                    self.accumulate = max(1, int(np.interp(ni, [0, nw], [1, args.nbs / args.batch]).round()))
                    for j, x in enumerate(self.optimizer.param_groups):
                        start = 0.1 if j == 0 else 0.0
                        x["lr"] = float(
                            np.interp(ni, [0, nw], [start, x["initial_lr"] * self.lf(self.epoch)])
                        )
                        x["momentum"] = float(np.interp(ni, [0, nw], [args.warmup_momentum, args.momentum]))
                self.loss, self.loss_items = self.model.loss(batch)
                self.tloss = (
                    self.loss_items if self.tloss is None else (self.tloss * i + self.loss_items) / (i + 1)
                )
                self.loss.backward()
                if ni - last_opt_step >= self.accumulate:
                    self.optimizer_step()
                    last_opt_step = ni
                if i % 5 == 0:
                    print(
                        f"epoch {self.epoch} batch {i} box {self.tloss[0].item():.5f} cls {self.tloss[1].item():.5f}"
                    )
                self.run_callbacks("on_train_batch_end")
            self.validate()
            self.stop = self.stopper(self.epoch + 1, self.fitness) or self.epoch + 1 >= args.epochs
            self.save_metrics()
            self.save_model()
            self.run_callbacks("on_fit_epoch_end")
            if self.stop:
                break
            self.epoch += 1

    @torch.no_grad()
    def validate(self):
        near, right, count = 0.0, 0, 0
        for batch in self.test_loader:
            box, cls = self.ema.ema(batch["img"])
            near += (1 - (box - batch["bboxes"]).abs().mean(1)).sum().item()
            right += (cls.argmax(1) == batch["cls"]).sum().item()
            count += len(batch["cls"])
        self.metrics = {"near": near / count, "right": right / count}
        self.fitness = 0.5 * self.metrics["near"] + 0.5 * self.metrics["right"]
        if self.best_fitness is None or self.best_fitness < self.fitness:
            self.best_fitness = self.fitness

    def save_metrics(self):
        row = {
            "epoch": self.epoch + 1,
            "box": self.tloss[0].item(),
            "cls": self.tloss[1].item(),
            **self.metrics,
        }
        row |= {f"lr/pg{i}": group["lr"] for i, group in enumerate(self.optimizer.param_groups)}
        new = not self.csv.exists()
        with open(self.csv, "a", newline="") as f:
            writer = csv.DictWriter(f, row)
            if new:
                writer.writeheader()
            writer.writerow(row)

    def save_model(self):
        state = {
            "epoch": self.epoch,
            "best_fitness": self.best_fitness,
            "ema": deepcopy(self.ema.ema).half(),
            "updates": self.ema.updates,
        }
        state |= {"optimizer": self.optimizer.state_dict(), "time": time.time() - self.train_time_start}
        torch.save(state, self.last)
        if self.best_fitness == self.fitness:
            torch.save(state, self.best)
