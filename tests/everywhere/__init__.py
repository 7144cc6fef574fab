"""User programs, the same on a laptop and on a cluster: the same results to the last bit."""
