"""Protocols over ports: holding a lease, keeping it, enforcing it."""
