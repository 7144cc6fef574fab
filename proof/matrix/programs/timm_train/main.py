"""A network for pictures with all that usually goes with it: built as timm's train.py.

A loader that wraps a DataLoader with persistent worker processes, normalises and erases at random; mixup; an averaged copy of the
model that is made before the loop and one name bound late in the outer loop; a schedule by updates; gradients accumulated; a saver
that keeps the best checkpoints by name; a summary in CSV; a best metric and its epoch; a try around the epochs for Ctrl-C.
"""

import argparse
import logging
import os
import random
import time
from collections import OrderedDict

import numpy as np
import torch
import torch.nn as nn
from loader import create_loader
from utils import (
    AverageMeter,
    CheckpointSaver,
    CosineScheduler,
    Mixup,
    ModelEma,
    SoftTargetCrossEntropy,
    update_summary,
)

_logger = logging.getLogger("train")
parser = argparse.ArgumentParser(description="pictures")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--grad-accum-steps", type=int, default=2)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.3)
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--mixup", type=float, default=0.4)
parser.add_argument("--reprob", type=float, default=0.3)
parser.add_argument("--model-ema", action="store_true", default=True)
parser.add_argument("--model-ema-decay", type=float, default=0.95)
parser.add_argument("--clip-grad", type=float, default=2.0)
parser.add_argument("--log-interval", type=int, default=4)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--output", default="output")


class Squeeze(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.expand(torch.relu(self.reduce(x.mean((2, 3), keepdim=True)))))


def create_model(classes):
    layers = [
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        Squeeze(16),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.SiLU(),
    ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, classes)
    )


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    random.seed(args.seed)
    model = create_model(5)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=2e-5
    )
    model_ema = ModelEma(model, decay=args.model_ema_decay) if args.model_ema else None
    mixup_fn = Mixup(args.mixup, num_classes=5) if args.mixup else None
    loader_train = create_loader(
        480, args.batch_size, True, args.workers, re_prob=args.reprob, seed=args.seed
    )
    loader_eval = create_loader(120, 40, False, args.workers, seed=args.seed + 1)
    train_loss_fn = SoftTargetCrossEntropy() if mixup_fn else nn.CrossEntropyLoss()
    validate_loss_fn = nn.CrossEntropyLoss()

    best_metric = None
    best_epoch = None
    output_dir = os.path.join(args.output, "run")
    os.makedirs(output_dir, exist_ok=True)
    saver = CheckpointSaver(model, optimizer, args, model_ema, checkpoint_dir=output_dir, max_history=2)
    updates_per_epoch = (len(loader_train) + args.grad_accum_steps - 1) // args.grad_accum_steps
    lr_scheduler = CosineScheduler(
        optimizer, args.epochs * updates_per_epoch, args.warmup_epochs * updates_per_epoch
    )
    lr_scheduler.step_update(0)
    results = []
    try:
        for epoch in range(args.epochs):
            train_metrics = train_one_epoch(
                epoch, model, loader_train, optimizer, train_loss_fn, args,
                lr_scheduler=lr_scheduler, updates_per_epoch=updates_per_epoch, mixup_fn=mixup_fn, model_ema=model_ema,
            )  # fmt: skip
            eval_metrics = validate(model, loader_eval, validate_loss_fn)
            if model_ema is not None:
                ema_eval_metrics = validate(
                    model_ema.module, loader_eval, validate_loss_fn, log_suffix=" (EMA)"
                )
                eval_metrics = ema_eval_metrics
            lrs = [param_group["lr"] for param_group in optimizer.param_groups]
            update_summary(
                epoch, train_metrics, eval_metrics, os.path.join(output_dir, "summary.csv"), lr=sum(lrs) / len(lrs),
                write_header=best_metric is None,
            )  # fmt: skip
            best_metric, best_epoch = saver.save_checkpoint(epoch, metric=eval_metrics["top1"])
            results.append({"epoch": epoch, "train": train_metrics, "validation": eval_metrics})
    except KeyboardInterrupt:
        pass
    _logger.info(f"best metric {best_metric} (epoch {best_epoch})")
    state = {
        "model": model.state_dict(),
        "ema": model_ema.module.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    state |= {"best": [best_metric, best_epoch], "results": results, "random": torch.get_rng_state()}
    torch.save(state, "model.pt")


def train_one_epoch(
    epoch, model, loader, optimizer, loss_fn, args, lr_scheduler, updates_per_epoch, mixup_fn, model_ema
):
    update_time_m = AverageMeter()
    losses_m = AverageMeter()
    model.train()
    accum_steps = args.grad_accum_steps
    num_updates = epoch * updates_per_epoch
    optimizer.zero_grad()
    update_start_time = time.time()
    for batch_idx, (input, target) in enumerate(loader):
        need_update = (batch_idx + 1) % accum_steps == 0
        if mixup_fn is not None:
            input, target = mixup_fn(input, target)
        loss = loss_fn(model(input), target) / accum_steps
        loss.backward()
        losses_m.update(loss.item() * accum_steps, input.size(0))
        if not need_update:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        num_updates += 1
        if model_ema is not None:
            model_ema.update(model, step=num_updates)
        now = time.time()
        update_time_m.update(now - update_start_time)
        update_start_time = now
        if batch_idx % args.log_interval == 1:
            lr = sum(group["lr"] for group in optimizer.param_groups) / len(optimizer.param_groups)
            print(
                f"epoch {epoch} [{batch_idx:>4d}/{len(loader)}] Loss: {losses_m.val:#.5g} ({losses_m.avg:#.4g}) "
                f"Time: {update_time_m.val:.3f}s LR: {lr:.3e}"
            )
        lr_scheduler.step_update(num_updates=num_updates)
    return OrderedDict([("loss", losses_m.avg)])


def validate(model, loader, loss_fn, log_suffix=""):
    losses_m = AverageMeter()
    top1_m = AverageMeter()
    model.eval()
    with torch.no_grad():
        for input, target in loader:
            output = model(input)
            losses_m.update(loss_fn(output, target).item(), input.size(0))
            top1_m.update((output.argmax(1) == target).float().mean().item() * 100, input.size(0))
    print(f"Test{log_suffix}: loss {losses_m.avg:.5f} top1 {top1_m.avg:.3f}")
    return OrderedDict([("loss", losses_m.avg), ("top1", top1_m.avg)])


if __name__ == "__main__":
    main()
