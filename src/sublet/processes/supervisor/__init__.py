"""Supervisors: one process per worker or command that ends it at the deadline, whatever else has failed."""
