"""Verbs on queues and items."""
