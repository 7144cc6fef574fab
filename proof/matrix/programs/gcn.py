"""A graph's nodes by two graph convolutions: built as pytorch/examples' net.

The graph is read from text files into sparse tensors; one step an epoch, in a function that is given everything; an evaluation on
two masks in each step.
"""

import argparse
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim, use_bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.Tensor(input_dim, output_dim))
        nn.init.xavier_normal_(self.weight)
        self.bias = None
        if use_bias:
            self.bias = nn.Parameter(torch.zeros(output_dim))

    def forward(self, input_tensor, edges):
        output = torch.spmm(edges, torch.mm(input_tensor, self.weight))
        return output if self.bias is None else output + self.bias


class GCN(nn.Module):
    def __init__(self, input_dim, hidden_dim, output_dim, use_bias=True, dropout_p=0.1):
        super().__init__()
        self.first = GraphConv(input_dim, hidden_dim, use_bias=use_bias)
        self.second = GraphConv(hidden_dim, output_dim, use_bias=use_bias)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input_tensor, edges):
        x = self.dropout(F.relu(self.first(input_tensor, edges)))
        return F.log_softmax(self.second(x, edges), dim=1)


def write_graph(path, nodes=1500, words=400, classes=5):
    chance = np.random.default_rng(11)
    os.makedirs(path)
    label = chance.integers(0, classes, nodes)
    taste = chance.random((classes, words)) > 0.9
    with open(f"{path}/graph.content", "w") as f:
        for node in range(nodes):
            has = (taste[label[node]] & (chance.random(words) > 0.5)) | (chance.random(words) > 0.98)
            has[node % words] = True
            f.write(f"{node}\t" + "\t".join(str(int(h)) for h in has) + f"\tclass{label[node]}\n")
    with open(f"{path}/graph.cites", "w") as f:
        for node in range(nodes):
            alike = np.flatnonzero(label == label[node])
            for other in sorted(set(chance.choice(alike, 3)) | set(chance.integers(0, nodes, 1))):
                f.write(f"{node}\t{other}\n")


def load_graph(path="./graph"):
    if not os.path.exists(path):
        write_graph(path)
    content = np.genfromtxt(f"{path}/graph.content", dtype=np.dtype(str))
    cites = np.genfromtxt(f"{path}/graph.cites", dtype=np.int32)
    features = torch.FloatTensor(content[:, 1:-1].astype(np.int32))
    features = torch.diag(1 / features.sum(dim=1)).to_sparse() @ features
    _, labels = np.unique(content[:, -1], return_inverse=True)
    count = len(labels)
    adj = torch.eye(count) + torch.sparse_coo_tensor(cites.T, torch.ones(len(cites)), (count, count))
    degree = torch.diag(torch.sqrt(1 / adj.sum(dim=1))).to_sparse()
    return features, torch.LongTensor(labels), (degree @ adj @ degree).to_sparse()


def train_once(epoch, model, optimizer, criterion, input, target, rows_train, rows_valid, print_every=10):
    began = time.time()
    model.train()
    optimizer.zero_grad()
    output = model(*input)
    loss = criterion(output[rows_train], target[rows_train])
    loss.backward()
    optimizer.step()
    loss_train, acc_train = test(model, criterion, input, target, rows_train)
    loss_val, acc_val = test(model, criterion, input, target, rows_valid)
    if epoch % print_every == 0:
        print(
            f"epoch {epoch} ({time.time() - began:.4f}s) train {loss_train:.4f} right {acc_train:.4f} "
            f"valid {loss_val:.4f} right {acc_val:.4f}"
        )


def test(model, criterion, input, target, mask):
    model.eval()
    with torch.no_grad():
        output = model(*input)
        output, target = output[mask], target[mask]
        loss = criterion(output, target)
        acc = (output.argmax(dim=1) == target).float().sum() / len(target)
    return loss.item(), acc.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="graph convolutions")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--l2", type=float, default=5e-4)
    parser.add_argument("--dropout-p", type=float, default=0.5)
    parser.add_argument("--hidden-dim", type=int, default=256)
    parser.add_argument("--val-every", type=int, default=5)
    parser.add_argument("--include-bias", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    features, labels, edges = load_graph()
    idx = torch.randperm(len(labels))
    test_rows, valid_rows, train_rows = idx[:200], idx[200:400], idx[400:]
    net = GCN(features.shape[1], args.hidden_dim, labels.max().item() + 1, args.include_bias, args.dropout_p)
    optimizer = Adam(net.parameters(), lr=args.lr, weight_decay=args.l2)
    criterion = nn.NLLLoss()
    for epoch in range(args.epochs):
        train_once(
            epoch + 1,
            net,
            optimizer,
            criterion,
            (features, edges),
            labels,
            train_rows,
            valid_rows,
            args.val_every,
        )
    loss_test, acc_test = test(net, criterion, (features, edges), labels, test_rows)
    print(f"tested: loss {loss_test:.4f} accuracy {acc_test:.4f}")
    torch.save(
        {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()},
        "model.pt",
    )
