"""Verbs on studio sessions and tokens."""
