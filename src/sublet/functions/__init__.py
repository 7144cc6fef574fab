"""`@sublet.on_gpu`: functions that run in a leased worker."""
