"""The live system's decisions under a virtual clock: a workload, a pool, a way of sharing it, the result."""
