"""A script as it is written, and as it runs under `python -m sublet.shim`: what its training loop is, and what is put around it. Pure."""
