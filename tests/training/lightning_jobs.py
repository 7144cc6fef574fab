"""Trainings with Lightning's Trainer."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch

import sublet
import sublet.training.lightning
from sublet.training.loop import Run
from tests.training.jobs import Noisy, digest, small_net, tell


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.save_hyperparameters({"odd": object()})

    def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(rows).squeeze(-1) - rows.sum(1)).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, rows: torch.Tensor, index: int) -> None:
        self.log("val", self.net(rows).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Telling(pl.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append((trainer.current_epoch, index, trainer.global_step))
        tell(trainer.global_step)


def warned_as_it_begins(step: int) -> None:
    """The notice comes after the last look for one before the step, whose body has not begun."""
    check = Run._check

    def checked(run: Run) -> None:
        check(run)
        if run.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
            while run.notice is None:
                time.sleep(0.001)

    Run._check = checked  # type: ignore[method-assign]


def fit(name: str, accumulate: int, workers: int = 0, epochs: int = 3) -> None:
    warned_as_it_begins(int(os.environ.get("WARNED_AT", "0")))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = Module()
    data: Any = sublet.Loader(Noisy(30), 4, workers=workers).by_epoch()
    telling = Telling()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=epochs, accumulate_grad_batches=accumulate, accelerator="cpu", logger=False, callbacks=[telling],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            val_check_interval=4,
        )  # fmt: skip
        validate = torch.utils.data.DataLoader(Noisy(8), batch_size=4)
        run = sublet.training.lightning.fit(
            trainer, module, name, train_dataloaders=data, val_dataloaders=validate,
            every=int(os.environ.get("EVERY", "2")), vram="64MiB", ttl="10s", progress=False,
        )  # fmt: skip
    for one in telling.seen:
        print("batch", one)
    counted = trainer.fit_loop.total_batch_idx, trainer.fit_loop.epoch_loop._batches_that_stepped
    print("final", digest(module), trainer.global_step, trainer.current_epoch, counted, run.committed)


def refused(name: str) -> None:
    """Data that Lightning cannot resume exactly."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.set_num_threads(1)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    for kind in (torch.utils.data.DataLoader, StatefulDataLoader):
        data = kind(Noisy(8), batch_size=4)
        try:
            sublet.training.lightning.fit(
                trainer, Module(), name, train_dataloaders=data, vram="64MiB", ttl="10s", progress=False
            )
        except sublet.BadInput as e:
            print(e.message)
