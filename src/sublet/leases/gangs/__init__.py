"""Leases whose devices are on several hosts."""
