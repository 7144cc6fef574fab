"""Measurements of the ledger beside the tools people use for the same thing. `python -m bench` runs them all."""
