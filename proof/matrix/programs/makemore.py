"""Names letter by letter: built as makemore.

An object holds a loader without end and the iterator over it; the loop asks that object for the next batch; worker processes load;
TensorBoard is written; samples are drawn and printed in the loop; the best model is kept as a file.
"""

import argparse
import os
import random
import time

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import default_collate
from torch.utils.tensorboard import SummaryWriter


class Letters(nn.Module):
    """The next letter from those before it, with a GRU."""

    def __init__(self, vocab_size, block_size, n_embd=64):
        super().__init__()
        self.block_size = block_size
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.start = nn.Parameter(torch.zeros(1, n_embd))
        self.rnn = nn.GRU(n_embd, n_embd, batch_first=True)
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets=None):
        hidden = self.start.expand(1, idx.size(0), -1).contiguous()
        out, _ = self.rnn(self.wte(idx), hidden)
        logits = self.head(out)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class Names(Dataset):
    def __init__(self, words, chars, longest):
        self.words, self.longest = words, longest
        self.stoi = {ch: i + 1 for i, ch in enumerate(chars)}
        self.itos = {i: ch for ch, i in self.stoi.items()}

    def __len__(self):
        return len(self.words)

    def __getitem__(self, idx):
        ix = torch.tensor([self.stoi[ch] for ch in self.words[idx]], dtype=torch.long)
        x = torch.zeros(self.longest + 1, dtype=torch.long)
        y = torch.zeros(self.longest + 1, dtype=torch.long)
        x[1 : 1 + len(ix)] = ix
        y[: len(ix)] = ix
        y[len(ix) + 1 :] = -1
        return x, y


class EndlessLoader:
    """Gives batches for ever: it has the iterator, whoever asks has not."""

    def __init__(self, dataset, **kwargs):
        sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=int(1e10))
        self.loader = DataLoader(dataset, sampler=sampler, **kwargs)
        self.batches = iter(self.loader)

    def next(self):
        try:
            batch = next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        return batch


def write_names(path):
    chance = random.Random(4)
    with open(path, "w") as f:
        for _ in range(1500):
            f.write(
                "".join(
                    chance.choice("bdgklmnrstv") + chance.choice("aeiou") for _ in range(chance.randint(1, 4))
                )
                + "\n"
            )


def create_datasets(path):
    with open(path) as f:
        words = [w.strip() for w in f.read().splitlines() if w.strip()]
    chars = sorted(set("".join(words)))
    longest = max(len(w) for w in words)
    order = torch.randperm(len(words)).tolist()
    cut = len(words) // 10
    train = Names([words[i] for i in order[:-cut]], chars, longest)
    return train, Names([words[i] for i in order[-cut:]], chars, longest)


@torch.inference_mode()
def evaluate(model, dataset, batch_size=50, max_batches=None):
    model.eval()
    loader = DataLoader(dataset, shuffle=True, batch_size=batch_size, num_workers=0)
    losses = []
    for i, batch in enumerate(loader):
        X, Y = batch
        _, loss = model(X, Y)
        losses.append(loss.item())
        if max_batches is not None and i >= max_batches:
            break
    model.train()
    return torch.tensor(losses).mean().item()


@torch.no_grad()
def print_samples(num):
    idx = torch.zeros(num, 1, dtype=torch.long)
    for _ in range(train_dataset.longest):
        logits, _ = model(idx)
        probs = F.softmax(logits[:, -1, :], dim=-1)
        idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
    for row in idx[:, 1:].tolist():
        row = row[: row.index(0)] if 0 in row else row
        print("sample:", "".join(train_dataset.itos[i] for i in row))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="names")
    parser.add_argument("--input-file", default="names.txt")
    parser.add_argument("--work-dir", default="out")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=260)
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    args = parser.parse_args()
    print(vars(args))

    torch.manual_seed(args.seed)
    os.makedirs(args.work_dir, exist_ok=True)
    writer = SummaryWriter(log_dir=args.work_dir)
    if not os.path.exists(args.input_file):
        write_names(args.input_file)
    train_dataset, test_dataset = create_datasets(args.input_file)
    model = Letters(len(train_dataset.stoi) + 1, train_dataset.longest + 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=0.01, betas=(0.9, 0.99)
    )
    endless = EndlessLoader(
        train_dataset, batch_size=args.batch_size, num_workers=args.num_workers, collate_fn=default_collate
    )

    best_loss = None
    step = 0
    while True:
        t0 = time.time()
        batch = endless.next()
        X, Y = (t.to("cpu") for t in batch)
        logits, loss = model(X, Y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        t1 = time.time()
        if step % 5 == 0:
            print(f"step {step} | loss {loss.item():.4f} in {(t1 - t0) * 1000:.2f}ms")
        if step > 0 and step % 50 == 0:
            train_loss = evaluate(model, train_dataset, batch_size=50, max_batches=5)
            test_loss = evaluate(model, test_dataset, batch_size=50, max_batches=5)
            writer.add_scalar("Loss/train", train_loss, step)
            writer.add_scalar("Loss/test", test_loss, step)
            writer.flush()
            print(f"after {step}: train {train_loss:.5f} test {test_loss:.5f}")
            if best_loss is None or test_loss < best_loss:
                out_path = os.path.join(args.work_dir, "model.pt")
                torch.save(model.state_dict(), out_path)
                best_loss = test_loss
        if step > 0 and step % 60 == 0:
            print_samples(num=3)
        step += 1
        if args.max_steps >= 0 and step >= args.max_steps:
            break
    writer.close()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": best_loss}
    torch.save(state | {"random": torch.get_rng_state()}, "model.pt")
