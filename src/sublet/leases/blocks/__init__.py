"""Leases on blocks of storage, and the values kept in them."""
