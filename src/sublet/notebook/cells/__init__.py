"""One cell: which variables travel, how it runs in the worker, what is kept of it."""
