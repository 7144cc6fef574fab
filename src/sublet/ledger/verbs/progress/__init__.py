"""Verbs on heads, effects and versions: the commit point."""
