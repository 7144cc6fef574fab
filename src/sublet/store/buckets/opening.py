"""A client from an address, and the proof that its bucket gives a name once.

Rules of this file:
- Credentials and endpoints come from the environment, never from the address. What does not belong in an
  address may be a key, so a wrong one is not repeated.
- A server that ignores the condition of a create would let one writer's bytes be changed under another's
  name, so each process proves it before its first write, and refuses a server that does not keep it (C2).
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from contextlib import suppress

from sublet.core.errors import Misconfigured
from sublet.settings import variable
from sublet.store.buckets.client import BucketClient
from sublet.store.buckets.connection import BucketTimeouts, connect

_proven: set[str] = set()
_proving = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_proving=threading.Lock()))


def open_client(address: str, limits: BucketTimeouts | None = None) -> tuple[str, BucketClient]:
    """The name of `s3://bucket/prefix`, `gs://…` or `az://…`, which may be shown, and its client. Sends
    nothing yet."""
    found = re.fullmatch(
        r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]{1,254})(?:/([A-Za-z0-9._/-]*))?", address, re.ASCII
    )
    prefix = ((found.group(3) or "") if found else "").strip("/")
    if found is None or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise Misconfigured(
            f"an address that begins with {address.partition(':')[0][:8]!r} is not that of a bucket",
            remedy="write s3://bucket/prefix, gs://bucket/prefix or az://container/prefix; keys belong in "
            "the environment",
        )
    scheme, bucket = found.group(1), found.group(2)
    limits = limits or _limits()
    client = BucketClient(connect(scheme, bucket, prefix, limits), limits)
    return f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else ""), client


def prove(client: BucketClient, name: str, role: str, *, patience: float | None = None) -> None:
    """Prove that a name is given once, and that what is written is read. `role` is what it is for, such as 'a
    replica'."""
    key = f"{name} {client.where}"
    with _proving:
        if key in _proven:
            return
    path = f"probe/{secrets.token_hex(16)}"
    first, second = secrets.token_bytes(64), secrets.token_bytes(64)
    try:
        kept = client.create(path, first, patience=patience)
        written_over = client.create(path, second, patience=patience)
        there = client.whole(path, len(first))
    finally:
        with suppress(OSError):
            client.delete(path, patience=0.0)
    if written_over:
        raise Misconfigured(
            f"{name} cannot be {role}: {client.where} let a second object be created under a name that was "
            "taken. It ignores the condition of the request, so two writers could write over each other and "
            "what was committed be lost",
            remedy="use a server that honours 'If-None-Match: *' (S3, GCS, Azure, MinIO, SeaweedFS do), or a "
            "folder: dir:PATH",
        )
    if not kept or there != first:
        raise Misconfigured(
            f"{name} cannot be {role}: {client.where} does not return what was written to it",
            remedy="look for a cache or proxy between here and the bucket",
        )
    with _proving:
        _proven.add(key)


def _limits() -> BucketTimeouts:
    request = _seconds("BUCKET_TIMEOUT", BucketTimeouts().request_seconds)
    return BucketTimeouts(
        request_seconds=request,
        patience_seconds=_seconds("BUCKET_PATIENCE", BucketTimeouts().patience_seconds),
        connect_seconds=min(BucketTimeouts().connect_seconds, request),
    )


def _seconds(name: str, default: float) -> float:
    text = variable(name)
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 < value <= 3600:
        raise Misconfigured(
            f"SUBLET_{name} is {text[:40]!r}", remedy="give seconds, more than 0 and at most 3600"
        )
    return value
