"""Protocols only: what the runtime needs of the outside. Each method says who calls it and when."""
