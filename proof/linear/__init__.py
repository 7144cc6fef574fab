"""Linearizability: what concurrent clients saw of leases, heads and effects could have happened one after the other."""
