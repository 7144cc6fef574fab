"""The Notice bus and everything that can warn: clouds, schedulers, files, time limits."""
