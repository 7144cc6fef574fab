"""Protocols only: what sublet needs of the outside. Each method says who calls it and when."""
