"""How CPython lays out what it runs and what it holds."""
