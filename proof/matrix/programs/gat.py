"""A graph's nodes by attention: built as pytorch/examples' gat.

As the graph convolutions, with attention layers of several heads and two dropouts; the graph is dense, and the random split is
drawn under the seed.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam


class Attention(nn.Module):
    def __init__(self, in_features, out_features, heads, concat=False, dropout=0.4, leaky_relu_slope=0.2):
        super().__init__()
        self.heads, self.concat, self.dropout = heads, concat, dropout
        self.width = out_features // heads if concat else out_features
        self.weight = nn.Parameter(torch.empty(size=(in_features, self.width * heads)))
        self.towards = nn.Parameter(torch.empty(size=(heads, 2 * self.width, 1)))
        self.bend = nn.LeakyReLU(leaky_relu_slope)
        self.softmax = nn.Softmax(dim=1)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.xavier_normal_(self.weight)
        nn.init.xavier_normal_(self.towards)

    def forward(self, h, edges):
        n_nodes = h.shape[0]
        moved = F.dropout(torch.mm(h, self.weight), self.dropout, training=self.training)
        moved = moved.view(n_nodes, self.heads, self.width).permute(1, 0, 2)
        source = torch.matmul(moved, self.towards[:, : self.width, :])
        target = torch.matmul(moved, self.towards[:, self.width :, :])
        e = self.bend(source + target.mT)
        attention = torch.where(edges > 0, e, -9e16 * torch.ones_like(e))
        attention = F.dropout(F.softmax(attention, dim=-1), self.dropout, training=self.training)
        gathered = torch.matmul(attention, moved)
        if self.concat:
            return gathered.permute(1, 0, 2).contiguous().view(n_nodes, self.heads * self.width)
        return gathered.mean(dim=0)


class GAT(nn.Module):
    def __init__(self, in_features, width, heads, num_classes, dropout=0.4):
        super().__init__()
        self.first = Attention(in_features, width, heads, concat=True, dropout=dropout)
        self.second = Attention(width, num_classes, 1, concat=False, dropout=dropout)

    def forward(self, input_tensor, edges):
        x = F.elu(self.first(input_tensor, edges))
        return F.log_softmax(self.second(x, edges), dim=1)


def make_graph(nodes=240, features=40, classes=4):
    labels = torch.randint(0, classes, (nodes,))
    taste = torch.randn(classes, features)
    inputs = taste[labels] + 2.0 * torch.randn(nodes, features)
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    adj = torch.rand(nodes, nodes) < torch.where(same, 0.05, 0.01)
    return inputs, labels, ((adj | adj.T).float() + torch.eye(nodes))


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
    parser = argparse.ArgumentParser(description="graph attention")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--l2", type=float, default=5e-4)
    parser.add_argument("--dropout-p", type=float, default=0.6)
    parser.add_argument("--hidden-dim", type=int, default=64)
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--val-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=13)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    features, labels, edges = make_graph()
    idx = torch.randperm(len(labels))
    test_rows, valid_rows, train_rows = idx[:60], idx[60:120], idx[120:]
    net = GAT(features.shape[1], args.hidden_dim, args.num_heads, int(labels.max()) + 1, args.dropout_p)
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
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(state, "model.pt")
