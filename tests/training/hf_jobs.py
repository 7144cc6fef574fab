"""Trainings with Hugging Face's Trainer: a tiny language model with random weights, and a plain module."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import sublet.training.hf
from tests.training.jobs import digest, tell


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        row = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8))

    def forward(self, input_ids: Any, labels: Any) -> Any:
        out = self.net(input_ids.float())
        return {"loss": (out - labels).pow(2).mean(), "logits": out}


class Telling(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        tell(state.global_step)


def train(name: str, plain: bool, epochs: int = 3) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = Plain() if plain else GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=0.01, warmup_steps=3, logging_steps=4, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, eval_strategy="steps", eval_steps=5,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Telling()])
        output = sublet.training.hf.train(
            trainer, name, every=int(os.environ.get("EVERY", "2")), vram="64MiB", ttl="10s", progress=False
        )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    print("final", digest(model), output.global_step, losses, evaluated, rates)
