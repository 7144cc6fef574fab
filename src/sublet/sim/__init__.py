"""The same decisions under a virtual clock: a workload, a pool, a way of sharing it, and what came of it."""
