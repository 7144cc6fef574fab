"""Replicas from what the user writes: `dir:/mnt/a@rack1`, `s3://bucket/prefix@eu`."""

from __future__ import annotations

import os
from pathlib import Path

from sublet.core.errors import Misconfigured
from sublet.machine.plugins import installed
from sublet.ports.store import Replica
from sublet.store.replicas.directory import DirectoryReplica


def split_domain(url: str) -> tuple[str, str]:
    """The address, and the failure domain behind its last '@'. A '@' inside a path is part of the path."""
    address, at, domain = url.rpartition("@")
    if not at or "/" in domain or not address:
        return url, ""
    return address, domain


def open_replica(url: str) -> Replica:
    address, domain = split_domain(url.strip())
    scheme, colon, _ = address.partition(":")
    found = installed("sublet.stores", scheme)
    if not colon or scheme not in found.names:
        known = ", ".join(sorted(found.names))
        raise Misconfigured(
            f"SUBLET_STORE {url[:80]!r} is no store", remedy=f"write dir:PATH; known: {known}"
        )
    replica: Replica = found[scheme].load()(address, domain)
    return replica


def open_directory(address: str, domain: str) -> DirectoryReplica:
    path = Path(os.path.expanduser(address.removeprefix("dir:"))).absolute()
    if not domain:
        # Folders on one disk are lost together, whatever they are called.
        there = path
        while not there.exists():
            there = there.parent
        domain = f"disk {os.stat(there).st_dev}"
    return DirectoryReplica(path, domain)
