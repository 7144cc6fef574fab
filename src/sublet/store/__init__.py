"""A checkpoint's bytes: saving, loading, replicas, upkeep."""
