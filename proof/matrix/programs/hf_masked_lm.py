"""A masked language model under transformers' Trainer: built as Hugging Face's masked language modelling course.

As the causal one, with a collator that masks at random each time a batch is made, padding to the longest, a linear schedule and the best
model loaded at the end.
"""

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.6f}", flush=True)


def make_tokenizer(words):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def main():
    set_seed(23)
    chance = random.Random(2)
    words = [f"w{i}" for i in range(80)]
    texts = []
    for _ in range(1500):
        start = chance.randrange(80)
        texts.append(" ".join(words[(start + 3 * k) % 80] for k in range(chance.randint(6, 20))))
    tokenizer = make_tokenizer(words)
    dataset = Dataset.from_dict({"text": texts})
    dataset = dataset.map(
        lambda e: {"input_ids": tokenizer(e["text"])["input_ids"]}, batched=True, remove_columns=["text"]
    )
    dataset = dataset.train_test_split(test_size=0.1, seed=3)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=40,
    )
    model = BertForMaskedLM(config)
    collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.2)
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=4,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=50,
        save_steps=50,
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=23,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        data_collator=collator,
        callbacks=[Told()],
    )
    trainer.train()
    state = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "steps": trainer.state.global_step,
    }
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    torch.save(
        state | {"losses": losses, "best": trainer.state.best_metric, "random": torch.get_rng_state()},
        "model.pt",
    )


if __name__ == "__main__":
    main()
