"""Verbs on tenants, prices and goodput."""
