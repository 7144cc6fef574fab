"""Verbs that read, verify, seal, prune and audit the journal."""
