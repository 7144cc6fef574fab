"""Sinks results may go to, beside the ledger: the user's own database, files, objects, a function."""
