"""Boxes around shapes, by a trainer with everything in it: built as ultralytics' training.

A model object whose train() makes a trainer; the loop is in a module of a package beside the script: an endless loader whose workers and
iterator live on over epochs, warm-up by iterations, gradients accumulated more and more, an averaged model, callbacks by name, early
stopping, the last and the best weights as files, and a results.csv that is appended to.
"""

import torch
from engine.model import Detector
from engine.trainer import Trainer


class Model:
    """What a user sees: made, trained, asked."""

    def __init__(self, width=12):
        torch.manual_seed(0)
        self.model = Detector(width)
        self.callbacks = {}

    def add_callback(self, event, function):
        self.callbacks.setdefault(event, []).append(function)

    def train(self, **overrides):
        self.trainer = Trainer(self.model, overrides, self.callbacks)
        self.trainer.train()
        return self.trainer.metrics


if __name__ == "__main__":
    model = Model()
    seen = []
    model.add_callback(
        "on_fit_epoch_end", lambda trainer: seen.append((trainer.epoch, round(trainer.fitness, 6)))
    )
    metrics = model.train(
        epochs=6, batch=16, nbs=32, workers=1, warmup_epochs=1.5, patience=10, seed=3, close_mosaic=2
    )
    trainer = model.trainer
    state = {
        "model": trainer.model.state_dict(),
        "ema": trainer.ema.ema.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
    }
    torch.save(state | {"seen": seen, "metrics": metrics, "random": torch.get_rng_state()}, "model.pt")
