"""Embeddings of sentences: built as sentence-transformers' training examples.

The loop is the library's: SentenceTransformerTrainer with two data sets sampled in turns, a loss with negatives of the batch and one of
scores, an evaluator every so many steps, over a model of a transformer and a pooling module.
"""

import random

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, TrainerCallback, set_seed


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.6f}", flush=True)


def write_model(folder, words):
    raw = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["[PAD]", "[UNK]", *words])}, unk_token="[UNK]")
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="[UNK]", pad_token="[PAD]", model_max_length=32
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words) + 2,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)


def main():
    set_seed(3)
    chance = random.Random(14)
    words = [f"w{i}" for i in range(100)]

    def sentence(subject):
        return " ".join(
            chance.choices(words[10 * subject : 10 * subject + 10], k=6) + chance.choices(words, k=3)
        )

    subjects = [chance.randrange(10) for _ in range(480)]
    pairs = Dataset.from_dict(
        {"anchor": [sentence(s) for s in subjects], "positive": [sentence(s) for s in subjects]}
    )
    others = [(s, s if chance.random() < 0.5 else chance.randrange(10)) for s in subjects]
    scored = Dataset.from_dict(
        {
            "sentence1": [sentence(a) for a, _ in others],
            "sentence2": [sentence(b) for _, b in others],
            "score": [float(a == b) for a, b in others],
        }
    )
    write_model("base", words)
    transformer = Transformer("base")
    model = SentenceTransformer(modules=[transformer, Pooling(64, pooling_mode="mean")], device="cpu")
    evaluator = EmbeddingSimilarityEvaluator(
        scored["sentence1"][:60], scored["sentence2"][:60], scored["score"][:60], name="near"
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir="out",
            num_train_epochs=3,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            warmup_steps=10,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=60,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=3,
        ),
        train_dataset={"pairs": pairs, "scored": scored},
        loss={
            "pairs": losses.MultipleNegativesRankingLoss(model),
            "scored": losses.CosineSimilarityLoss(model),
        },
        evaluator=evaluator,
        callbacks=[Told()],
    )
    trainer.train()
    model.save("embedder")
    state = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "steps": trainer.state.global_step,
    }
    seen = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    torch.save(
        state | {"losses": seen, "near": evaluator(model), "random": torch.get_rng_state()}, "model.pt"
    )


if __name__ == "__main__":
    main()
