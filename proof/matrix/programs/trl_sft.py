"""Supervised fine-tuning with TRL: built as its SFT quick start.

The loop is the library's: SFTTrainer over transformers' Trainer, prompts with completions, packing or padding by the library, LoRA through
peft_config, and a checkpoint now and then.
"""

import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.6f}", flush=True)


def main():
    set_seed(41)
    chance = random.Random(6)
    words = [f"w{i}" for i in range(60)]
    rows = []
    for _ in range(800):
        asked = chance.sample(words, 6)
        rows.append({"prompt": " ".join(asked) + " ->", "completion": " " + " ".join(reversed(asked))})
    raw = Tokenizer(
        models.WordLevel(
            {w: i for i, w in enumerate(["<pad>", "<unk>", "<eos>", "->", *words])}, unk_token="<unk>"
        )
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir="out",
            max_steps=100,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=4,
            save_steps=50,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=48,
            seed=41,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8,
            lora_alpha=16,
            lora_dropout=0.05,
            target_modules=["q_proj", "v_proj", "k_proj", "gate_proj"],
            task_type="CAUSAL_LM",
        ),
        callbacks=[Told()],
    )
    trainer.train()
    state = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "steps": trainer.state.global_step,
    }
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    torch.save(state | {"losses": losses, "random": torch.get_rng_state()}, "model.pt")


if __name__ == "__main__":
    main()
