"""A transformer of blocks in a ModuleDict, with parameter groups by kind of module."""

import torch
import torch.nn as nn
from torch.nn import functional as F

from mingpt.utils import CfgNode


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = nn.MultiheadAttention(
            config.n_embd, config.n_head, dropout=config.pdrop, batch_first=True
        )
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd),
                "c_proj": nn.Linear(4 * config.n_embd, config.n_embd),
                "act": nn.GELU(),
                "dropout": nn.Dropout(config.pdrop),
            }
        )
        self.register_buffer("mask", torch.triu(torch.ones(config.block_size, config.block_size), 1).bool())

    def forward(self, x):
        t = x.size(1)
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, attn_mask=self.mask[:t, :t], need_weights=False)[0]
        m = self.mlp
        return x + m.dropout(m.c_proj(m.act(m.c_fc(self.ln_2(x)))))


class GPT(nn.Module):
    @staticmethod
    def get_default_config():
        return CfgNode(n_layer=2, n_head=4, n_embd=48, vocab_size=None, block_size=None, pdrop=0.1)

    def __init__(self, config):
        super().__init__()
        self.block_size = config.block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.pdrop),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def configure_optimizers(self, config):
        decay, no_decay = set(), set()
        for mn, m in self.named_modules():
            for pn, _ in m.named_parameters(recurse=False):
                name = f"{mn}.{pn}" if mn else pn
                weighs = "weight" in pn and not isinstance(m, (nn.LayerNorm, nn.Embedding))
                (decay if weighs else no_decay).add(name)
        params = dict(self.named_parameters())
        groups = [
            {"params": [params[pn] for pn in sorted(decay)], "weight_decay": config.weight_decay},
            {"params": [params[pn] for pn in sorted(no_decay)], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long).unsqueeze(0)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, do_sample=False, top_k=None):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.block_size :])
            logits = logits[:, -1, :]
            if top_k is not None:
                v, _ = torch.topk(logits, top_k)
                logits[logits < v[:, [-1]]] = -float("inf")
            probs = F.softmax(logits, dim=-1)
            step = (
                torch.multinomial(probs, num_samples=1) if do_sample else probs.argmax(dim=-1, keepdim=True)
            )
            idx = torch.cat((idx, step), dim=1)
        return idx
