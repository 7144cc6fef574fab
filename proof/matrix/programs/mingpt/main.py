"""A language model of characters with a trainer of its own: built as minGPT's chargpt.

The loop is in a class, in a module of a package beside the script: `Trainer.run` holds the iterator in a local name and calls
callbacks, which the script adds as closures; these print, draw samples and save.
"""

import os
import random
import sys

import torch
from mingpt.model import GPT
from mingpt.trainer import Trainer
from mingpt.utils import CfgNode, set_seed, setup_logging
from torch.utils.data import Dataset


def get_config():
    C = CfgNode()
    C.system = CfgNode(seed=3407, work_dir="./out/chargpt")
    C.data = CharDataset.get_default_config()
    C.model = GPT.get_default_config()
    C.trainer = Trainer.get_default_config()
    C.trainer.learning_rate = 3e-3
    return C


class CharDataset(Dataset):
    @staticmethod
    def get_default_config():
        return CfgNode(block_size=32)

    def __init__(self, config, data):
        self.config, self.data = config, data
        chars = sorted(set(data))
        print(f"{len(data)} characters, {len(chars)} of them different")
        self.stoi = {ch: i for i, ch in enumerate(chars)}
        self.itos = dict(enumerate(chars))

    def __len__(self):
        return len(self.data) - self.config.block_size

    def __getitem__(self, idx):
        chunk = self.data[idx : idx + self.config.block_size + 1]
        dix = torch.tensor([self.stoi[s] for s in chunk], dtype=torch.long)
        return dix[:-1], dix[1:]


def write_text(path):
    chance = random.Random(8)
    words = ["the", "lamp", "under", "green", "river", "keeps", "a", "small", "bird", "and", "no", "wind"]
    with open(path, "w") as f:
        f.write("\n".join(" ".join(chance.choices(words, k=7)) for _ in range(400)))


if __name__ == "__main__":
    config = get_config()
    config.merge_from_args(sys.argv[1:])
    setup_logging(config)
    set_seed(config.system.seed)
    if not os.path.exists("input.txt"):
        write_text("input.txt")
    with open("input.txt") as f:
        train_dataset = CharDataset(config.data, f.read())
    config.model.vocab_size = len(train_dataset.stoi)
    config.model.block_size = config.data.block_size
    model = GPT(config.model)
    trainer = Trainer(config.trainer, model, train_dataset)

    def batch_end_callback(trainer):
        if trainer.iter_num % 4 == 0:
            print(
                f"iter_dt {trainer.iter_dt * 1000:.2f}ms; iter {trainer.iter_num}: loss {trainer.loss.item():.5f}"
            )
        if trainer.iter_num % 60 == 0:
            model.eval()
            with torch.no_grad():
                x = torch.tensor([train_dataset.stoi[s] for s in "the"], dtype=torch.long)[None, ...]
                y = model.generate(x, 20, do_sample=True, top_k=5)[0]
                print("sample:", repr("".join(train_dataset.itos[int(i)] for i in y)))
            torch.save(model.state_dict(), os.path.join(config.system.work_dir, "model.pt"))
            model.train()

    trainer.set_callback("on_batch_end", batch_end_callback)
    trainer.run()
    state = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "iter_num": trainer.iter_num,
    }
    torch.save(state | {"random": torch.get_rng_state()}, "model.pt")
