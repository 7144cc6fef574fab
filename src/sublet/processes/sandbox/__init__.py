"""Containment of a worker and of a tenant: namespaces, users, mounts."""
