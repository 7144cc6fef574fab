"""The next word with an LSTM: built as pytorch/examples' word_language_model.

A texts read from text files, slices of it by position instead of a loader, the hidden state carried from batch to batch, the
weights changed by hand with a rate that a worse validation divides by four, the best model saved whole and loaded again at the
end, and a try around the epochs for Ctrl-C.
"""

import argparse
import math
import os
import random
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="./data")
parser.add_argument("--emsize", type=int, default=96)
parser.add_argument("--width", type=int, default=160)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--lr", type=float, default=20)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=10)
parser.add_argument("--bptt", type=int, default=12)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--tied", action="store_true")
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--save", default="best.pt")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cpu")


def write_texts(folder):
    """A made-up language: each word is followed by one of three."""
    chance = random.Random(3)
    words = [f"w{i}" for i in range(120)]
    after = {word: chance.sample(words, 3) for word in words}
    os.makedirs(folder, exist_ok=True)
    for name, count in (("train", 1600), ("valid", 60), ("test", 60)):
        with open(os.path.join(folder, f"{name}.txt"), "w") as f:
            word = words[0]
            for _ in range(count):
                line = []
                for _ in range(chance.randint(5, 15)):
                    word = chance.choice(after[word])
                    line.append(word)
                f.write(" ".join(line) + "\n")


class Vocabulary:
    def __init__(self):
        self.number_of = {}
        self.words = []

    def number(self, word):
        if word not in self.number_of:
            self.words.append(word)
            self.number_of[word] = len(self.words) - 1
        return self.number_of[word]

    def __len__(self):
        return len(self.words)


class Texts:
    def __init__(self, path):
        self.dictionary = Vocabulary()
        self.train = self.numbers(os.path.join(path, "train.txt"))
        self.valid = self.numbers(os.path.join(path, "valid.txt"))
        self.test = self.numbers(os.path.join(path, "test.txt"))

    def numbers(self, path):
        ids = []
        with open(path, encoding="utf8") as f:
            for line in f:
                ids += [self.dictionary.number(word) for word in [*line.split(), "<eos>"]]
        return torch.tensor(ids, dtype=torch.int64)


class WordModel(nn.Module):
    def __init__(self, vocabulary, width_in, width, layers, dropout=0.5, tie_weights=False):
        super().__init__()
        self.vocabulary = vocabulary
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocabulary, width_in)
        self.rnn = nn.LSTM(width_in, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, vocabulary)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        self.width, self.layers = width, layers

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.vocabulary)
        return F.log_softmax(decoded, dim=1), hidden

    def first_hidden(self, columns):
        weight = next(self.parameters())
        return (
            weight.new_zeros(self.layers, columns, self.width),
            weight.new_zeros(self.layers, columns, self.width),
        )


if not os.path.exists(args.data):
    write_texts(args.data)
texts = Texts(args.data)


def in_columns(data, columns):
    rows = data.size(0) // columns
    data = data.narrow(0, 0, rows * columns)
    return data.view(columns, -1).t().contiguous().to(device)


columns_to_judge = 10
train_data = in_columns(texts.train, args.batch_size)
valid_data = in_columns(texts.valid, columns_to_judge)
test_data = in_columns(texts.test, columns_to_judge)
count_of_words = len(texts.dictionary)
model = WordModel(count_of_words, args.emsize, args.width, args.layers, args.dropout, args.tied).to(device)
criterion = nn.NLLLoss()


def detached(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(detached(v) for v in h)


def piece(source, i):
    length = min(args.bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


def evaluate(of):
    model.eval()
    total = 0.0
    hidden = model.first_hidden(columns_to_judge)
    with torch.no_grad():
        for i in range(0, of.size(0) - 1, args.bptt):
            data, targets = piece(of, i)
            output, hidden = model(data, hidden)
            hidden = detached(hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(of) - 1)


def train():
    model.train()
    total = 0.0
    began = time.time()
    hidden = model.first_hidden(args.batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = piece(train_data, i)
        model.zero_grad()
        hidden = detached(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total += loss.item()
        if batch % args.log_interval == 0 and batch > 0:
            mean_loss = total / args.log_interval
            elapsed = time.time() - began
            print(
                f"epoch {epoch} batch {batch} of {len(train_data) // args.bptt:5d} rate {lr:02.2f} "
                f"each {elapsed * 1000 / args.log_interval:5.2f} loss {mean_loss:5.4f} perplexity {math.exp(mean_loss):8.2f}"
            )
            total = 0
            began = time.time()


lr = args.lr
best_loss = None

try:
    for epoch in range(1, args.epochs + 1):
        epoch_began = time.time()
        train()
        valid_loss = evaluate(valid_data)
        print("-" * 60)
        print(
            f"end of epoch {epoch} in {time.time() - epoch_began:5.2f}s "
            f"valid loss {valid_loss:5.4f} perplexity {math.exp(valid_loss):8.2f}"
        )
        print("-" * 60)
        if not best_loss or valid_loss < best_loss:
            with open(args.save, "wb") as f:
                torch.save(model, f)
            best_loss = valid_loss
        else:
            lr /= 4.0
except KeyboardInterrupt:
    print("-" * 60)
    print("left early")

last = {name: value.clone() for name, value in model.state_dict().items()}
with open(args.save, "rb") as f:
    model = torch.load(f, weights_only=False)
    model.rnn.flatten_parameters()

test_loss = evaluate(test_data)
print("=" * 60)
print(f"in the end: test loss {test_loss:5.4f} perplexity {math.exp(test_loss):8.2f}")
print("=" * 60)
torch.save({"best": model.state_dict(), "last": last, "lr": lr, "random": torch.get_rng_state()}, "model.pt")
