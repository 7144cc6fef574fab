"""Brokers items may come from: what other programs publish there becomes items of a queue."""
