"""The journal: its hash chain, verification, pruning, and what is read out of it."""
