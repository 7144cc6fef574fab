"""Lightning's Trainer as a run of ours: `sublet.lightning.fit(trainer, model, "my-job",
train_dataloaders=...)` in place of `trainer.fit`.

Rules of this file:
- The Trainer owns its loop. A step of ours is one of its optimizer steps, from the batch that begins it to
  the batch that begins the next: a validation after a step belongs to that step, so a commit never stands
  between the two.
- What is committed is the checkpoint Lightning makes itself, taken through its checkpoint plugin as values,
  not as a file; so is what it is given back. Hyper-parameters are left out: they may be any object, and a
  resumed program makes them again.
- Only data that knows its place is accepted: with torch's DataLoader, Lightning begins the epoch's data anew
  in the middle of it; with torchdata's, a resume at the end of an epoch leaves the next one out.
- The random states are put back last, after everything the Trainer draws on its way to the first batch.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from sublet.core.errors import BadInput, MissingExtra
from sublet.training.data import Epochs
from sublet.training.effects import Step
from sublet.training.loop import Run
from sublet.training.train import train as begin_run


def _lightning() -> str:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        with contextlib.suppress(ImportError):
            import_module(package)
            return package
    raise MissingExtra(
        "sublet.lightning works with Lightning's Trainer, and lightning is not installed",
        remedy="install it with 'pip install sublet[lightning]'",
    )


_PACKAGE = _lightning()
_Callback: Any = import_module(f"{_PACKAGE}.callbacks").Callback
_CheckpointIO: Any = import_module(f"{_PACKAGE}.plugins.io").CheckpointIO
#: The path of the checkpoint that is no file.
_OURS = "sublet:committed"
_HYPER = (
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
)
_ENDLESS = 1 << 40


def fit(
    trainer: Any,
    model: Any,
    name: str | None = None,
    *,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    **options: Any,
) -> Run:
    """Fit, resumed at the committed step. The training data is `sublet.Loader(...).by_epoch()`.

    The options are those of `sublet.train`: `every`, `vram`, `ttl`, `tier`, `grace`, … On a notice the step
    is finished, committed, and the program ends with exit code 85.
    """
    callback = SubletCallback(name, **options)
    given = {
        "train_dataloaders": train_dataloaders,
        "val_dataloaders": val_dataloaders,
        "datamodule": datamodule,
    }
    return callback.fit(trainer, model, **{key: value for key, value in given.items() if value is not None})


class SubletCallback(_Callback):  # type: ignore[misc]
    """For those who want to see the run while it trains: `callback = SubletCallback("my-job");
    callback.fit(trainer, model, ...)`."""

    def __init__(self, name: str | None = None, **options: Any) -> None:
        self.run: Run | None = None
        self._name = name
        self._options = options
        self._steps: Iterator[Step] | None = None
        self._checkpoint = _Checkpoint()
        self._handler: Any = None

    def fit(self, trainer: Any, model: Any, **data: Any) -> Run:
        if not model.automatic_optimization:
            raise BadInput(
                "with manual optimization it is not known where a step ends",
                remedy="use automatic optimization, or write the loop with sublet.train",
            )
        if trainer.world_size > 1:
            raise BadInput(
                f"Lightning on {trainer.world_size} devices starts its ranks itself, after a run would have "
                "to begin",
                remedy="use one device, or write the loop with sublet.train under torchrun",
            )
        if self not in trainer.callbacks:
            trainer.callbacks.append(self)
        self._checkpoint.trainer = trainer
        self.run = run = begin_run(self._name, {"trainer": self._checkpoint}, **self._options)
        self._handler = signal.getsignal(signal.SIGTERM)
        before = trainer.strategy.checkpoint_io
        trainer.strategy.checkpoint_io = _Through(before, self._checkpoint)
        ended = False
        try:
            trainer.fit(model, ckpt_path=_OURS if run.step else None, **data)
            ended = True
        finally:
            trainer.strategy.checkpoint_io = before
            if self._steps is not None:
                self._steps.close()  # type: ignore[attr-defined]
            run.close(finished=ended)
        return run

    # what the Trainer calls

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.run is None:
            raise BadInput(
                "SubletCallback must begin the training itself, to put the committed state back",
                remedy="call callback.fit(trainer, model, ...), or sublet.lightning.fit, in place of "
                "trainer.fit",
            )
        _check_data(trainer)
        if threading.current_thread() is threading.main_thread():
            # Lightning took SIGTERM to leave without a save. It gives back what it found when it ends.
            signal.signal(signal.SIGTERM, self._handler)
        self._checkpoint.data = _places(trainer)
        total = trainer.estimated_stepping_batches
        self._steps = self.run.steps(int(total) if math.isfinite(total) and total > 0 else _ENDLESS)
        self._stepped = None if not self.run.step else self._checkpoint.stepped

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self.run is not None
        if self._stepped is not None:
            # Lightning counts one more whenever it restarts; its loggers would be a step ahead.
            trainer.fit_loop.epoch_loop._batches_that_stepped, self._stepped = self._stepped, None
        if self._steps is not None and trainer.global_step >= self.run.begun:
            next(self._steps, None)
            # A notice that has just come counts before the next step. Told to stop, the Trainer would take
            # this epoch for a whole one.
            if self.run.should_stop and self.run.notice is None:
                trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._checkpoint.data = _places(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        steps, self._steps = self._steps, None
        if steps is None or self.run is None:
            return
        self.run.stop("the Trainer came to its end")
        next(steps, None)


def _loaders(trainer: Any) -> list[Any]:
    found = trainer.train_dataloader
    if isinstance(found, dict):
        return list(found.values())
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _places(trainer: Any) -> list[Any]:
    return [loader.state_dict() for loader in _loaders(trainer)]


def _check_data(trainer: Any) -> None:
    for loader in _loaders(trainer):
        if not isinstance(loader, Epochs):
            raise BadInput(
                f"a {type(loader).__name__} cannot be resumed exactly by Lightning, in the middle of an "
                "epoch or at its end",
                remedy="give sublet.Loader(dataset, batch_size=...).by_epoch() as the training data",
            )


class _Checkpoint:
    """Lightning's own checkpoint as a part of the state."""

    per_rank = False

    def __init__(self) -> None:
        self.data: list[Any] = []  # where the loaders stood when the last batch was done
        self.trainer: Any = None
        self.values: Any = None
        self.stepped: int | None = None

    def state_dict(self) -> Any:
        self.trainer.save_checkpoint(_OURS)
        values, self.values = self.values, None
        for name in _HYPER:
            values.pop(name, None)
        fit = values["loops"]["fit_loop"]
        fit["state_dict"]["combined_loader"] = self.data  # by now the next batch has been fetched
        for progress in (
            fit["epoch_loop.batch_progress"]["total"],
            fit["epoch_loop.batch_progress"]["current"],
        ):
            progress["ready"] = progress["completed"]  # and counted as ready, which it is not after a resume
        return values

    def load_state_dict(self, saved: Any) -> None:
        self.values = saved
        self.stepped = saved["loops"]["fit_loop"]["epoch_loop.state_dict"].get("_batches_that_stepped")


class _Through(_CheckpointIO):  # type: ignore[misc]
    """A checkpoint plugin that passes values for our path, and files for every other."""

    def __init__(self, others: Any, checkpoint: _Checkpoint) -> None:
        self._others = others
        self._checkpoint = checkpoint

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if str(path) == _OURS:
            self._checkpoint.values = checkpoint
        else:
            self._others.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
        if str(path) == _OURS:
            values, self._checkpoint.values = self._checkpoint.values, None
            return values
        return self._others.load_checkpoint(path, *args, **options)

    def remove_checkpoint(self, path: Any) -> None:
        self._others.remove_checkpoint(path)

    def teardown(self) -> None:
        self._others.teardown()
