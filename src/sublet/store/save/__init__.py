"""Saving: packing chunks and writing them behind the training loop."""
