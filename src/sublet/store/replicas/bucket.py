"""A replica in a bucket: S3 and what speaks like it, Google Cloud Storage, Azure Blob Storage.

Rules of this file:
- Every write is a conditional create. A server that ignores the condition would let one save's bytes be
  changed under another's name, so each process proves it before its first write, and refuses a server that
  does not keep it (C2).
- A put that was confirmed is durable: that is the service's promise, and all we have.
- Ages are by the server's clock: an object written now says what time it is there.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime

from sublet.core.checkpoints.checkpoint import MAX_MANIFEST_BYTES
from sublet.core.errors import Misconfigured, NotDurable
from sublet.store.buckets.client import BucketClient
from sublet.store.buckets.connection import BucketTimeouts
from sublet.store.buckets.failure import BucketFailed
from sublet.store.buckets.opening import open_client, prove
from sublet.store.replicas.bucket_pack import BucketDraft, KnownLayouts, PackReader, pack_path

#: A store that is opened waits no longer than this for a bucket: it may be the one that is down.
CHECK_SECONDS = 5.0


class BucketReplica:
    """Implements `ports.store.Replica`."""

    near = False

    def __init__(
        self, name: str, domain: str, client: BucketClient, known: KnownLayouts | None = None
    ) -> None:
        self.name = name
        self.domain = domain or client.where
        self.lane = client.where
        self._client = client
        self._reader = PackReader(client, known)

    # being away

    @property
    def away(self) -> str:
        return self._client.away

    def give_up(self) -> None:
        self._client.give_up()

    def take_up(self) -> None:
        self._client.take_up()

    def ask_again(self) -> None:
        self._client.ask_again()

    def hurried(self, seconds: float) -> BucketReplica:
        return BucketReplica(self.name, self.domain, self._client.hurried(seconds), self._reader.known)

    def check(self) -> None:
        """One that cannot be reached now is not refused: the others may be enough. It is proven before it is
        written to."""
        try:
            prove(self._client, self.name, "a replica", patience=CHECK_SECONDS)
        except BucketFailed as e:
            if e.lasting:
                raise Misconfigured(f"{self.name} cannot be a replica: {e}", remedy=self._remedy(e)) from None

    def _ready(self) -> None:
        try:
            prove(self._client, self.name, "a replica")
        except BucketFailed as e:
            raise self._not_durable(e) from None

    def _not_durable(self, error: OSError) -> NotDurable:
        said = f"{self.name} did not take it: {error.strerror or error}"
        return NotDurable(said, remedy=self._remedy(error) if isinstance(error, BucketFailed) else "")

    def _remedy(self, error: BucketFailed) -> str:
        scheme, _, rest = self.name.partition("://")
        return error.what_next(scheme, rest.partition("/")[0])

    # packs

    def begin_pack(self, size: int) -> BucketDraft:
        self._ready()
        return BucketDraft(self.name, self._client, self._reader, size)

    def has_pack(self, pack: str) -> bool:
        """Asks anew: what is remembered of the pack is forgotten."""
        self._reader.known.forget(pack)
        return self._client.look(pack_path(pack)) is not None

    def read_pack(self, pack: str, at: int, into: memoryview) -> bool:
        return self._reader.read(pack, at, into)

    # manifests

    def put_manifest(self, digest: str, data: bytes) -> None:
        self._ready()
        try:
            if not self._client.create(_manifest_path(digest), data):
                raise NotDurable(
                    f"{self.name} did not take it: manifest {digest[:12]} exists already with other bytes"
                )
        except OSError as e:
            raise self._not_durable(e) from None

    def get_manifest(self, digest: str) -> bytes | None:
        return self._client.whole(_manifest_path(digest), MAX_MANIFEST_BYTES)

    # keeping order

    def set_aside(self, kind: str, name: str) -> None:
        """Of a pack in parts, only the object that names them is set aside: the parts stay where they are,
        for whoever looks into it."""
        source = pack_path(name) if kind == "pack" else _manifest_path(name)
        target = f"aside/{source.rpartition('/')[2]}.{secrets.token_hex(6)}"
        there = self._client.look(source)
        if there is None or not self._client.copy(source, target):
            return
        copied = self._client.look(target)
        if copied is None or copied.size != there.size:
            raise BucketFailed("the copy to be set aside is not whole")
        self._client.delete(source)
        self._reader.known.forget(name)

    def packs(self) -> Iterator[tuple[str, float, int]]:
        """Also what was begun and never published, under the name of its draft: nothing refers to it, so a
        sweep takes it away."""
        now = self.clock()
        drafts: dict[str, tuple[datetime, int]] = {}
        for part in self._client.list(
            "parts"
        ):  # before the packs: what is published meanwhile must not look forgotten
            draft = part.path.split("/")[1]
            youngest, size = drafts.get(draft, (part.changed, 0))
            drafts[draft] = max(youngest, part.changed), size + part.size
        for found in self._client.list("packs"):
            name = found.path.removeprefix("packs/").removesuffix(".pack")
            layout = self._reader.layout(name)
            if layout is not None and layout.draft:
                drafts.pop(layout.draft, None)
            yield (
                name,
                (now - found.changed).total_seconds(),
                layout.size if layout is not None else found.size,
            )
        for draft, (changed, size) in drafts.items():
            yield draft, (now - changed).total_seconds(), size

    def manifests(self) -> Iterator[tuple[str, float]]:
        now = self.clock()
        for found in self._client.list("manifests"):
            name = found.path.removeprefix("manifests/").removesuffix(".json")
            yield name, (now - found.changed).total_seconds()

    def clock(self) -> datetime:
        path = f"probe/clock-{secrets.token_hex(16)}"
        self._client.create(path, b"")
        try:
            found = self._client.look(path)
        finally:
            with suppress(OSError):
                self._client.delete(path, patience=0.0)
        if found is None:
            raise BucketFailed("an object that was written is not there")
        return found.changed

    def remove(self, kind: str, name: str) -> None:
        if kind != "pack":
            self._client.delete(_manifest_path(name))
            return
        self._reader.known.forget(name)
        layout = self._reader.layout(name)
        # The name first: a pack that is half removed must not be found.
        self._client.delete(pack_path(name))
        self._reader.known.forget(name)
        draft = layout.draft if layout is not None else name
        for part in self._client.list(f"parts/{draft}") if draft else ():
            self._client.delete(part.path)


def _manifest_path(digest: str) -> str:
    return f"manifests/{digest}.json"


def open_bucket(address: str, domain: str, limits: BucketTimeouts | None = None) -> BucketReplica:
    """`s3://bucket/prefix`, `gs://…`, `az://…`. Credentials and endpoints come from the environment, never
    from the address."""
    name, client = open_client(address, limits)
    return BucketReplica(name, domain, client)
