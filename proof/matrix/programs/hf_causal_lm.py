"""A causal language model under transformers' Trainer: built as Hugging Face's language modelling notebook.

The loop is the library's: texts tokenized with a map and grouped into blocks, the default collator, dropout, a schedule with warm-up, an
evaluation and a checkpoint every so many steps with a limit on how many are kept, and a callback that tells.
"""

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

BLOCK = 32


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(
                f"step {state.global_step} loss {logs['loss']:.6f} rate {logs['learning_rate']:.3e}",
                flush=True,
            )


def make_texts(count):
    chance = random.Random(21)
    words = [f"w{i}" for i in range(90)]
    after = {w: chance.sample(words, 3) for w in words}
    for _ in range(count):
        word, text = chance.choice(words), []
        for _ in range(chance.randint(10, 30)):
            text.append(word)
            word = chance.choice(after[word])
        yield " ".join(text)


def make_tokenizer(texts):
    vocabulary = {"<unk>": 0, "<eos>": 1}
    for text in texts:
        for word in text.split():
            vocabulary.setdefault(word, len(vocabulary))
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>")


def group_texts(examples):
    joined = [token for ids in examples["input_ids"] for token in ids]
    total = len(joined) // BLOCK * BLOCK
    blocks = [joined[i : i + BLOCK] for i in range(0, total, BLOCK)]
    return {"input_ids": blocks, "labels": [list(b) for b in blocks]}


def main():
    set_seed(17)
    texts = list(make_texts(1200))
    tokenizer = make_tokenizer(texts)
    raw = Dataset.from_dict({"text": texts}).train_test_split(test_size=0.1, seed=1)
    tokenized = raw.map(
        lambda e: {"input_ids": tokenizer(e["text"])["input_ids"]}, batched=True, remove_columns=["text"]
    )
    blocks = tokenized.map(group_texts, batched=True, remove_columns=tokenized["train"].column_names)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=BLOCK,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=3,
        per_device_train_batch_size=12,
        gradient_accumulation_steps=1,
        learning_rate=2e-3,
        warmup_steps=10,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=40,
        save_steps=40,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=17,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["test"],
        data_collator=default_data_collator,
        callbacks=[Told()],
    )
    trainer.train()
    found = trainer.evaluate()
    state = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "loss": found["eval_loss"],
    }
    state |= {"schedule": trainer.lr_scheduler.state_dict(), "steps": trainer.state.global_step}
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    torch.save(state | {"losses": losses, "random": torch.get_rng_state()}, "model.pt")


if __name__ == "__main__":
    main()
