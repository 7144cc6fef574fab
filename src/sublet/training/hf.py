"""Hugging Face's Trainer as a run of ours: `sublet.hf.train(trainer, "my-job")` in place of
`trainer.train()`.

Rules of this file:
- The Trainer owns its loop. A step of ours is one of its optimizer steps, from one `on_step_begin` to the
  next: what it logs, evaluates and saves after a step belongs to that step, so a commit never stands between
  a step and its evaluation.
- What the Trainer would read from a checkpoint folder comes from the committed state: weights, optimizer,
  scheduler, scaler, its own counters. From a folder it reads only where it stands, because it decides by that
  how many batches to skip.
- The random states are put back last, after everything the Trainer draws on its way to the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from sublet.core.errors import BadInput, MissingExtra
from sublet.training.effects import Step
from sublet.training.loop import Run
from sublet.training.train import train as begin_run

try:
    _Callback: Any = import_module("transformers").TrainerCallback
except ImportError as e:
    raise MissingExtra(
        "sublet.hf works with Hugging Face's Trainer, and transformers (with accelerate) is not installed",
        remedy="install it with 'pip install sublet[hf]'",
    ) from e

_STATE_FILE = "trainer_state.json"


def train(trainer: Any, name: str | None = None, **options: Any) -> Any:
    """Train, resumed at the committed step: `sublet.hf.train(trainer, "my-job")`. Returns what
    `trainer.train()` returns.

    The options are those of `sublet.train`: `every`, `vram`, `ttl`, `tier`, `grace`, … On a notice the step
    is finished, committed, and the program ends with exit code 85.
    """
    return SubletCallback(name, **options).train(trainer)


class SubletCallback(_Callback):  # type: ignore[misc]
    """For those who want to see the run while it trains: `callback = SubletCallback("my-job");
    callback.train(trainer)`, `callback.run`."""

    def __init__(self, name: str | None = None, **options: Any) -> None:
        self.run: Run | None = None
        self._name = name
        self._options = options
        self._parts: dict[str, _Part] = {}
        self._steps: Iterator[Step] | None = None
        self._step: Step | None = None

    def train(self, trainer: Any) -> Any:
        _check(trainer)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._parts = {
            "model": _Part(lambda: trainer.model),
            "optimizer": _Part(lambda: trainer.optimizer),
            "scheduler": _Part(lambda: trainer.lr_scheduler),
            "scaler": _Part(lambda: trainer.accelerator.scaler),
            "trainer": _Progress(trainer),
        }
        self.run = begin_run(self._name, dict(self._parts), **self._options)
        ended = False
        try:
            if not self.run.step:
                output = trainer.train()
            elif (over := self._is_over(trainer)) is not None:
                output = over
            else:
                output = self._resume(trainer)
            ended = True
            return output
        finally:
            if self._steps is not None:
                self._steps.close()  # type: ignore[attr-defined]
            self.run.close(finished=ended)

    def _resume(self, trainer: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="sublet-") as folder, _weights_left_alone(trainer):
            (Path(folder) / _STATE_FILE).write_text(self._parts["trainer"].saved["state"])
            return trainer.train(resume_from_checkpoint=folder)

    def _is_over(self, trainer: Any) -> Any:
        """Answer for a run that is complete: the Trainer would train one more step before it notices."""
        then = json.loads(self._parts["trainer"].saved["state"])
        args = trainer.args
        total = args.max_steps
        if total <= 0:
            total = math.ceil(then["max_steps"] * args.num_train_epochs / max(then["num_train_epochs"], 1e-9))
        assert self.run is not None
        if self.run.step < total:
            return None
        self._parts["model"].put()
        trainer.state = type(trainer.state)(**then)
        logged = [entry["train_loss"] for entry in then["log_history"] if "train_loss" in entry]
        loss = logged[-1] if logged else float("nan")
        for _ in self.run.steps(self.run.step):
            pass
        return import_module("transformers.trainer_utils").TrainOutput(self.run.step, loss, {})

    # what the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.run is None:
            raise BadInput(
                "SubletCallback must begin the training itself, to put the committed state back",
                remedy="call callback.train(trainer), or sublet.hf.train(trainer, name), in place of "
                "trainer.train()",
            )
        for part in self._parts.values():
            part.put()
        self._steps = self.run.steps(state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._steps is None:
            return
        self._step = next(self._steps, None)
        if self._step is None:
            raise BadInput(
                "the run is over, and the Trainer trains on", remedy="do not change max_steps while it trains"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.run is not None
        if self.run.should_stop and self.run.notice is None:
            control.should_training_stop = True
        elif args.load_best_model_at_end and state.global_step >= state.max_steps:
            self._finish("")  # later the model no longer has this step's weights

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._step is not None and isinstance(logs, dict):
            self._step.log(**{name: value for name, value in logs.items() if isinstance(value, float)})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        early = state.global_step < state.max_steps
        if not (early and args.load_best_model_at_end):
            self._finish("the Trainer said so" if early else "")

    def _finish(self, stopped: str) -> None:
        steps, self._steps = self._steps, None
        if steps is None or self.run is None:
            return
        if stopped:
            self.run.stop(stopped)
        next(steps, None)


def _check(trainer: Any) -> None:
    args = trainer.args
    if args.ignore_data_skip:
        raise BadInput(
            "ignore_data_skip=True begins the data anew at each start: samples would be seen twice, and "
            "others never",
            remedy="leave ignore_data_skip out of TrainingArguments",
        )
    if not getattr(args.accelerator_config, "use_seedable_sampler", True):
        raise BadInput(
            "without use_seedable_sampler the order of an epoch cannot be made again",
            remedy="leave use_seedable_sampler out of accelerator_config",
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise BadInput(
            "weights sharded by DeepSpeed or FSDP are not in the model's own state_dict",
            remedy="train with DDP (plain torchrun), or write the loop with sublet.train and per_rank=...",
        )


@contextlib.contextmanager
def _weights_left_alone(trainer: Any) -> Iterator[None]:
    """Keep the Trainer from loading weights: they come from the committed state, and the folder has none."""
    trainer._load_from_checkpoint = lambda *_, **__: None
    try:
        yield
    finally:
        del trainer._load_from_checkpoint


class _Part:
    """One part of the Trainer. It is made by the Trainer on its way, so what was saved is kept until then."""

    def __init__(self, find: Any) -> None:
        self._find = find
        self.saved: Any = None

    def state_dict(self) -> Any:
        found = self._find()
        return None if found is None else found.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.saved = saved

    def put(self) -> None:
        found, saved, self.saved = self._find(), self.saved, None
        if saved is not None and found is not None:
            found.load_state_dict(saved)


class _Progress(_Part):
    """The Trainer's own counters, and what it has added up since it logged last."""

    per_rank = True
    _SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")

    def __init__(self, trainer: Any) -> None:
        super().__init__(lambda: trainer)

    def state_dict(self) -> Any:
        trainer = self._find()
        exportable = import_module("transformers.trainer_callback").ExportableState
        states: dict[str, Any] = {}
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, exportable):
                before = states.get(type(callback).__name__)
                state = callback.state()
                several = before if isinstance(before, list) else [before]
                states[type(callback).__name__] = state if before is None else [*several, state]
        text = json.dumps(dataclasses.asdict(trainer.state) | {"stateful_callbacks": states})
        return {
            "state": text,
            "sums": {name: getattr(trainer, name) for name in self._SUMS if hasattr(trainer, name)},
        }

    @staticmethod
    def comparable(saved: Any) -> Any:
        """Without how long it took."""
        state = json.loads(saved["state"])
        for entry in state["log_history"]:
            for name in [n for n in entry if n.endswith(("_runtime", "_per_second"))]:
                del entry[name]
        return {**saved, "state": state}

    def put(self) -> None:
        trainer, saved, self.saved = self._find(), self.saved, None
        if saved is not None:
            for name, value in saved["sums"].items():
                had = getattr(trainer, name)
                setattr(trainer, name, value.to(had.device) if hasattr(had, "device") else value)
