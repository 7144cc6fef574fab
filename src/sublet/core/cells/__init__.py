"""Notebook cells: which names they read and bind, where they may stop, what they cost."""
