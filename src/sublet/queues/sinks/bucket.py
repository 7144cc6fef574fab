"""Results as objects in a bucket, one for each item, named as the files of a folder are.

Rules of this file:
- Every put is a conditional create: the first result stays, and nobody who comes later writes over it. A
  server that ignores the condition is refused before the first result is stored.
- A put that was confirmed is durable: that is the service's promise, and all we have.
- Nothing is sent before a result is stored or asked for: the client does not survive a fork, and whoever
  opens a sink may still fork its workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sublet.core.errors import Misconfigured, SinkDown
from sublet.ports.sink import Made
from sublet.queues.sinks.documents import document_of, place_of
from sublet.queues.sinks.rows import newest
from sublet.store.buckets.client import BucketClient
from sublet.store.buckets.connection import BucketTimeouts
from sublet.store.buckets.failure import BucketFailed
from sublet.store.buckets.opening import open_client, prove

T = TypeVar("T")
R = TypeVar("R")

#: Requests at once.
AT_ONCE = 16


class BucketSink:
    """Implements `ports.sink.Sink`."""

    def __init__(self, name: str, client: BucketClient) -> None:
        self.name = name
        self._client = client
        self._closed = False

    def check(self) -> None:
        """`Misconfigured` for what can never work, `SinkDown` for what does not work now."""
        try:
            prove(self._client, self.name, "a sink")
        except BucketFailed as e:
            if not e.lasting:
                raise self._down(e) from None
            raise Misconfigured(
                f"{self.name} cannot be a sink: {e}",
                remedy="check that the bucket exists and that these credentials may read, write and "
                "delete in it",
            ) from None

    def store(self, results: Sequence[Made]) -> None:
        def put(made: Made) -> None:
            # Stored in both cases: the object has these bytes, or the result that came first.
            self._client.create("/".join(place_of(made.key)), document_of(made))

        with self._translated():
            prove(self._client, self.name, "a sink")
            _each(put, newest(results))

    def known(self, keys: Sequence[str]) -> set[str]:
        def there(key: str) -> bool:
            return self._client.look("/".join(place_of(key))) is not None

        with self._translated():
            found = _each(there, keys)
        return {key for key, is_there in zip(keys, found, strict=True) if is_there}

    def describe(self) -> dict[str, str]:
        return {"kind": "bucket", "place": self.name}

    def close(self) -> None:
        self._closed = True

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        if self._closed:
            raise SinkDown("the sink was closed", remedy="open it again")
        try:
            yield
        except BucketFailed as e:
            raise self._down(e) from None
        except Misconfigured as e:
            raise SinkDown(f"{e.message}; nothing was acknowledged", remedy=e.remedy) from e

    def _down(self, error: BucketFailed) -> SinkDown:
        return SinkDown(f"{self.name} did not take it: {error}; nothing was acknowledged")


def _each(work: Callable[[T], R], values: Sequence[T]) -> list[R]:
    if len(values) <= 1:
        return [work(value) for value in values]
    with ThreadPoolExecutor(min(AT_ONCE, len(values)), thread_name_prefix="sublet-sink") as threads:
        try:
            return list(threads.map(work, values))
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def open_bucket(url: str, limits: BucketTimeouts | None = None) -> BucketSink:
    """`s3://bucket/prefix`, `gs://…`, `az://…`. Credentials and endpoints come from the environment, never
    from the address."""
    return BucketSink(*open_client(url, limits))
