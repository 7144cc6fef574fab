"""Checkpoints: manifests, versions, retention, block regions, the order of replicas, storage quotas."""
