"""Replicas: directories and buckets, and the quorum over them."""
