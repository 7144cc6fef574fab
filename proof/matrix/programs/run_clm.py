"""The script around the Trainer: built as transformers' run_clm.py.

Settings in three dataclasses read by HfArgumentParser, logging, a look for an earlier checkpoint to resume from, texts from a file,
training, saving of the model and the state, metrics as files, an evaluation after it. TensorBoard is written by the library.
"""

import json
import logging
import math
import os
import random
import sys
from dataclasses import dataclass, field

import torch
import transformers
from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_type: str = field(default="llama", metadata={"help": "which architecture"})
    hidden_size: int = field(default=64)


@dataclass
class DataTrainingArguments:
    train_file: str = field(default="train.txt")
    validation_file: str = field(default="valid.txt")
    block_size: int = field(default=48)


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.6f}", flush=True)


def write_texts(data_args):
    chance = random.Random(31)
    stems = ["run", "sing", "light", "stone", "hand", "open", "turn", "read"]
    ends = ["", "s", "ing", "ed", "er"]
    for path, count in ((data_args.train_file, 900), (data_args.validation_file, 90)):
        with open(path, "w") as f:
            for _ in range(count):
                f.write(" ".join(chance.choice(stems) + chance.choice(ends) for _ in range(12)) + "\n")


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    given = sys.argv[1:] or [
        "--output_dir",
        "out",
        "--do_train",
        "--do_eval",
        "--num_train_epochs",
        "2",
        "--per_device_train_batch_size",
        "4",
        "--learning_rate",
        "1e-3",
        "--gradient_accumulation_steps",
        "2",
        "--logging_steps",
        "3",
        "--save_steps",
        "30",
        "--save_total_limit",
        "2",
        "--use_cpu",
        "--disable_tqdm",
        "True",
        "--report_to",
        "tensorboard",
        "--seed",
        "5",
        "--dataloader_num_workers",
        "1",
    ]
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(given)
    logging.basicConfig(
        format="%(levelname)s %(name)s %(message)s", handlers=[logging.StreamHandler(sys.stderr)]
    )
    transformers.utils.logging.set_verbosity_warning()
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
        if last_checkpoint is not None:
            logger.warning(f"a checkpoint was found, it goes on from {last_checkpoint}")
    set_seed(training_args.seed)
    if not os.path.exists(data_args.train_file):
        write_texts(data_args)
    raw = load_dataset(
        "text",
        data_files={"train": data_args.train_file, "validation": data_args.validation_file},
        cache_dir="cache",
    )
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre_tokenizers.Whitespace()
    with open(data_args.train_file) as f:
        learned.train_from_iterator(
            f, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<eos>"], show_progress=False)
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned, unk_token="<unk>", eos_token="<eos>")
    config = AutoConfig.for_model(
        model_args.model_type, vocab_size=len(tokenizer), hidden_size=model_args.hidden_size, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, attention_dropout=0.1, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)

    def group(examples):
        ids = [token for text in examples["text"] for token in [*tokenizer(text)["input_ids"], 1]]
        size = data_args.block_size
        blocks = [ids[i : i + size] for i in range(0, len(ids) // size * size, size)]
        return {"input_ids": blocks, "labels": [list(b) for b in blocks]}

    blocks = raw.map(group, batched=True, remove_columns=["text"])
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[Told()],
    )
    train_result = trainer.train(resume_from_checkpoint=last_checkpoint)
    trainer.save_model()
    trainer.save_state()
    metrics = trainer.evaluate()
    print(f"perplexity {math.exp(metrics['eval_loss']):.5f} after {trainer.state.global_step} steps")
    with open("result.json", "w") as f:
        json.dump({"train_loss": train_result.training_loss, "eval_loss": metrics["eval_loss"]}, f)
    state = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "loss": train_result.training_loss,
    }
    torch.save(state | {"random": torch.get_rng_state(), "python": random.getstate()}, "model.pt")


if __name__ == "__main__":
    main()
