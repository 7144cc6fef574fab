"""One place for results per kind of sink: opened as a user would, read back by other means, broken and mended."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from sublet.ports.sink import Made, Sink
from sublet.queues.sinks.bucket import open_bucket
from sublet.queues.sinks.directory import open_directory
from sublet.queues.sinks.function import CallableSink
from sublet.queues.sinks.other_databases import open_sqlalchemy
from sublet.queues.sinks.postgres import open_postgres
from sublet.queues.sinks.sqlite import open_sqlite
from sublet.store.buckets import client as bucket_client
from sublet.store.buckets.connection import open_store
from sublet.testing.postgres import PostgresServer
from tests.store.servers import BUCKET, QUICK, Proxy, Seen, Server

OPENERS: dict[str, Callable[[str], Sink]] = {
    "sqlite": open_sqlite,
    "postgres": open_postgres,
    "sqlalchemy-sqlite": open_sqlalchemy,
    "sqlalchemy-postgres": open_sqlalchemy,
    "dir": open_directory,
    "s3": open_bucket,
    "gs": open_bucket,
}


class Place:
    """Where one test's results go."""

    kind: str
    url: str
    newest_wins = True
    environment: ClassVar[dict[str, str]] = {}

    def open(self) -> Sink:
        return OPENERS[self.kind](self.url)

    def stored(self) -> dict[str, dict[str, Any]]:
        """Key to the rest, as somebody else reads it. Twice the same key is an error."""
        raise NotImplementedError

    def broken(self) -> contextlib.AbstractContextManager[None]:
        """For as long as it lasts the other side is down."""
        raise NotImplementedError

    def end(self) -> None:
        pass


def _from_rows(rows: Sequence[Sequence[Any]]) -> dict[str, dict[str, Any]]:
    names = ("queue", "item", "item_key", "delivery", "body", "result")
    found: dict[str, dict[str, Any]] = {}
    for key, *values in rows:
        assert key not in found
        row = dict(zip(names, values, strict=True))
        found[key] = {**row, "body": json.loads(row["body"]), "result": json.loads(row["result"])}
    return found


SELECT = "SELECT key, queue, item, item_key, delivery, body, result FROM results"


class SqlitePlace(Place):
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder / "db"
        self.folder.mkdir()
        self.file = self.folder / "results.db"
        self.url = (
            f"sqlite:{self.file}" if kind == "sqlite" else f"sqlite+pysqlite:///{self.file}?timeout=0.2"
        )

    def stored(self) -> dict[str, dict[str, Any]]:
        with contextlib.closing(sqlite3.connect(self.file)) as db:
            return _from_rows(db.execute(SELECT).fetchall())

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        if self.kind == "sqlite":
            self.folder.rename(self.folder.with_name("away"))
            yield
            self.folder.with_name("away").rename(self.folder)
            return
        with contextlib.closing(sqlite3.connect(self.file, isolation_level=None)) as db:
            db.execute("BEGIN EXCLUSIVE")
            yield
            db.execute("ROLLBACK")


class PostgresPlace(Place):
    def __init__(self, kind: str, server: PostgresServer) -> None:
        import psycopg

        self.kind, self.server = kind, server
        self.schema = f"sink_{secrets.token_hex(6)}"
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {self.schema}")  # type: ignore[call-overload]
        self.plain = f"{server.url}&options=-csearch_path%3D{self.schema}"
        self.url = (
            self.plain if kind == "postgres" else self.plain.replace("postgresql:", "postgresql+psycopg:")
        )

    def sql(self, text: str, *parameters: Any) -> list[Any]:
        import psycopg

        with psycopg.connect(self.plain, autocommit=True) as connection:
            done = connection.execute(text, parameters)  # type: ignore[arg-type]
            return done.fetchall() if done.description else []

    def stored(self) -> dict[str, dict[str, Any]]:
        return _from_rows(self.sql(SELECT))

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        self.server.crash()
        try:
            yield
        finally:
            self.server.start()

    def end(self) -> None:
        import psycopg

        with psycopg.connect(self.server.url, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA {self.schema} CASCADE")  # type: ignore[call-overload]


class FolderPlace(Place):
    kind = "dir"
    newest_wins = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "files"
        self.url = f"dir:{self.folder}"

    def stored(self) -> dict[str, dict[str, Any]]:
        return {content.pop("key"): content for content in map(json.loads, _texts(self.folder))}

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        self.folder.rename(self.folder.with_name("away"))
        yield
        self.folder.with_name("away").rename(self.folder)


def _texts(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*/*/*.json"))]


class BucketPlace(Place):
    newest_wins = False

    def __init__(self, kind: str, server: Server) -> None:
        self.kind, self._server = kind, server
        self._faults: list[str] = []
        self._proxy = Proxy(server, lambda seen: self._faults[0] if self._faults else None)
        self.url = server.url()
        self.environment = {**self._proxy.server.environment, "SUBLET_BUCKET_PATIENCE": "0.5"}

    @property
    def seen(self) -> list[Seen]:
        return self._proxy.seen

    def open(self) -> Sink:
        with mock.patch.dict(os.environ, self.environment):
            return open_bucket(self.url)

    def stored(self) -> dict[str, dict[str, Any]]:
        import obstore

        prefix = self.url.partition("://")[2].removeprefix(f"{BUCKET}/")
        with mock.patch.dict(os.environ, self._server.environment):
            store = open_store(self.kind, BUCKET, prefix, QUICK)
        listed = [meta["path"] for batch in obstore.list(store) for meta in batch]
        texts = [bytes(obstore.get(store, path).bytes()) for path in listed if not path.startswith("probe/")]
        return {content.pop("key"): content for content in map(json.loads, texts)}

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        self._faults.append("503")
        with mock.patch.object(bucket_client, "REST_SECONDS", 0.05):
            yield
        self._faults.clear()

    def end(self) -> None:
        self._proxy.__exit__()


class FunctionPlace(Place):
    """A function of the user's that keeps the highest delivery of each key."""

    kind = "function"

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._down = False

    def open(self) -> Sink:
        return CallableSink(self)

    def __call__(self, one: Made) -> None:
        if self._down:
            raise ConnectionError("CANARY")
        with self._lock:
            there = self.rows.get(one.key)
            if there is None or there["delivery"] < one.delivery:
                self.rows[one.key] = {name: getattr(one, name) for name in
                                      ("queue", "item", "item_key", "delivery", "body", "result")}  # fmt: skip

    def known(self, keys: Sequence[str]) -> set[str]:
        if self._down:
            raise ConnectionError
        return {key for key in keys if key in self.rows}

    def stored(self) -> dict[str, dict[str, Any]]:
        return self.rows

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        self._down = True
        yield
        self._down = False
