"""The kernel "Python 3 (leased GPU)"."""
