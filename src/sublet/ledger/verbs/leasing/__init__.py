"""Verbs on leases, waiters, devices, gangs and blocks."""
