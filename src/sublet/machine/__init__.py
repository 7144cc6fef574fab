"""Facts of this process and this machine that every adapter may use: its lease, the run folder, plug-ins,
failpoints.

Rules of this folder:
- It imports `core` and `ports` only, so that adapters can use it without knowing each other.
"""
