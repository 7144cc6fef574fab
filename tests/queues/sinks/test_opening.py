"""What may be given as a sink, and what is said about the rest."""

from __future__ import annotations

import sys
import tomllib
import traceback
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from sublet.core.errors import BadInput, Misconfigured, MissingExtra, SinkDown, SubletError
from sublet.machine import plugins
from sublet.ports.sink import Made
from sublet.queues.sinks.bucket import BucketSink
from sublet.queues.sinks.directory import DirectorySink
from sublet.queues.sinks.function import CallableSink
from sublet.queues.sinks.opening import open_sink
from sublet.queues.sinks.other_databases import SqlalchemySink
from sublet.queues.sinks.postgres import PostgresSink
from sublet.queues.sinks.sqlite import SqliteSink
from tests.conftest import repository
from tests.queues.sinks.results import made
from tests.queues.sinks.rig import PostgresPlace

PROJECT = tomllib.loads(repository("pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an installation of this tree registers."""
    offered = PROJECT["entry-points"]["sublet.sinks"]
    points = EntryPoints(EntryPoint(name, value, "sublet.sinks") for name, value in offered.items())
    monkeypatch.setattr(plugins, "entry_points", lambda: points)
    monkeypatch.setattr(plugins, "_read", None)


def test_every_entry_leads_to_an_opener() -> None:
    offered = plugins.installed("sublet.sinks")
    assert {"sqlite", "postgresql", "postgres", "dir", "s3", "gs", "az", "sqlalchemy"} == set(offered.names)
    for point in offered:
        assert callable(point.load())
    assert "sqlalchemy" in PROJECT["optional-dependencies"]


def test_by_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: PostgresPlace) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for address, kind in {
        "sqlite:here.db": SqliteSink,
        f" SQLITE:{tmp_path}/b.db?table=main.mine ".replace("SQLITE", "sqlite"): SqliteSink,
        f"sqlite+pysqlite:///{tmp_path}/c.db": SqlalchemySink,
        "dir:out": DirectorySink,
        "s3://bucket/prefix": BucketSink,
        postgres.plain: PostgresSink,
        postgres.plain.replace("postgresql:", "postgres:"): PostgresSink,
        postgres.plain.replace("postgresql:", "postgresql+psycopg:"): SqlalchemySink,
    }.items():
        sink = open_sink(address)
        assert type(sink) is kind
        sink.close()
    assert (tmp_path / "here.db").exists()
    assert (tmp_path / "out").is_dir()


def test_an_object_and_a_function_are_taken_as_they_are(tmp_path: Path) -> None:
    own = open_sink(f"dir:{tmp_path}")
    assert open_sink(own) is own
    assert isinstance(open_sink(print), CallableSink)


class HalfASink:
    def store(self, results: Any) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    "what",
    [
        "", "results.db", "/data/results.db", "CANARY", "user:CANARY@host/db", "C:\\CANARY", "http://user:CANARY@host/x",
        "redis://:CANARY@host", "nosuch://x", "mysql:CANARY", "postgresql+nodriver://user:CANARY@host/x", 7, None, b"sqlite:x", [], DirectorySink,
    ],
)  # fmt: skip
def test_what_is_no_sink(what: Any) -> None:
    with pytest.raises(SubletError) as caught:
        open_sink(what)
    assert isinstance(caught.value, BadInput | MissingExtra)
    if isinstance(caught.value, BadInput) and "address is not usable" not in caught.value.message:
        for word in ("sqlite:PATH", "postgresql://", "dir:PATH", "s3://", "function"):
            assert word in caught.value.remedy
    assert "CANARY" not in "".join(traceback.format_exception(caught.value)) + caught.value.remedy


def test_half_a_sink_is_told_what_it_lacks() -> None:
    with pytest.raises(BadInput, match="known, describe"):
        open_sink(HalfASink())


@pytest.mark.parametrize(
    "address",
    ["sqlite:", "sqlite://", "sqlite:///results.db", "sqlite:///data/results.db", "sqlite::memory:", "sqlite:x.db?mode=ro", "sqlite:x.db?table=a&x=1",
     "sqlite:x.db?table=temp.results", "sqlite:x.db?table=other.results", "sqlite+pysqlite://", "sqlite+pysqlite:///:memory:", "dir:"],
)  # fmt: skip
def test_addresses_that_say_nothing_sure(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as caught:
        open_sink(address)
    assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


NO_TABLES = [
    "", "a b", "1a", "a;drop table victim", 'a"; DROP TABLE victim; --', "a'--", "a.b.c", "a.", ".a", "a-b", "é", "a%22", "x" * 64, "a\x00", "a\nb", "results)",
]  # fmt: skip


@pytest.mark.parametrize("table", NO_TABLES)
def test_tables_that_are_none(table: str, tmp_path: Path, postgres: PostgresPlace) -> None:
    """Nothing of an address is ever SQL."""
    postgres.sql("CREATE TABLE victim (x int)")
    addresses = [
        f"sqlite:{tmp_path}/a.db?table={table}",
        f"{postgres.plain}&table={table}",
        f"{postgres.plain.replace('postgresql:', 'postgresql+psycopg:')}&table={table or '%20'}",
    ]
    for address in addresses:
        with pytest.raises(BadInput, match=r"is not a table's name|control character"):
            open_sink(address)
    assert postgres.sql("SELECT count(*) FROM victim") == [(0,)]
    assert not (tmp_path / "a.db").exists()


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg", "postgres"])
def test_no_secret_is_told(scheme: str, tmp_path: Path) -> None:
    for address in (
        f"{scheme}://user:CANARY@127.0.0.1:1/db?connect_timeout=1",
        f"{scheme}://user:CANARY@/db?host={tmp_path}",
        f"{scheme}://user:CAN@ARY@127.0.0.1:CANARY/db",
        f"{scheme}://user:CANARY@127.0.0.1:1/db?nonsense=CANARY",
    ):
        said = []
        try:
            sink = open_sink(address)
            said += [repr(sink), *sink.describe().values()]
            for call in (
                lambda s=sink: s.store([made(1, body="CANARYBODY")]),
                lambda s=sink: s.known(["images/1"]),
            ):
                with pytest.raises(SinkDown) as caught:
                    call()
                said += [*traceback.format_exception(caught.value), caught.value.remedy]
        except (BadInput, Misconfigured) as e:
            said += [*traceback.format_exception(e), e.remedy]
        text = "".join(line for part in said for line in part.splitlines(True) if "CANARYBODY" not in line)
        assert text
        assert "CANARY" not in text
        assert "CAN@ARY" not in text


@pytest.mark.parametrize(("module", "address", "extra"), [
    ("sqlalchemy", "mysql+pymysql://user@host/db", "sqlalchemy"), ("psycopg", "postgresql://host/db", "postgres"), ("obstore", "s3://bucket/x", "bucket"),
])  # fmt: skip
def test_a_missing_extra_is_named(
    module: str, address: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("sublet.queues.sinks.other_databases", "sublet.queues.sinks.postgres"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingExtra) as caught:
        open_sink(address)
    assert f"pip install 'sublet[{extra}]'" in caught.value.remedy


# --- functions -----------------------------------------------------------------------------------------------


def test_a_function_of_three_or_of_one() -> None:
    seen: list[Any] = []

    def three(key: str, body: Any, result: Any) -> None:
        seen.append((key, body, result))

    def one(it: Made) -> None:
        seen.append(it)

    class Both:
        def __call__(self, key: str, body: Any, result: Any, more: int = 0) -> None:
            seen.append((key, more))

        def method(self, it: Made, times: int = 1) -> None:
            seen.append((it.key, "method"))

    for function in (three, one, Both(), Both().method, lambda *all_of_it: seen.append(len(all_of_it))):
        open_sink(function).store([made(4)])
    assert seen == [("images/4", {"n": 4}, [4, 1]), made(4), ("images/4", 0), ("images/4", "method"), 3]


def test_what_a_function_raises() -> None:
    def fails(key: str, body: Any, result: Any) -> None:
        raise {1: RuntimeError("CANARY"), 2: BadInput("no such column"), 3: KeyboardInterrupt()}[body["n"]]

    sink = open_sink(fails)
    with pytest.raises(SinkDown, match=r"fails raised RuntimeError") as caught:
        sink.store([made(1)])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "CANARY" not in caught.value.message
    with pytest.raises(BadInput, match="no such column"):
        sink.store([made(2)])
    with pytest.raises(KeyboardInterrupt):
        sink.store([made(3)])


def test_functions_that_cannot_be_called() -> None:
    async def later(key: str, body: Any, result: Any) -> None: ...

    async def one(it: Made) -> None: ...

    for wrong in (lambda: None, lambda a, b: None, lambda a, b, c, d: None, lambda *, key: None, later, one):
        with pytest.raises(BadInput):
            open_sink(wrong)
    with pytest.raises(BadInput, match="asynchronous"):
        open_sink(lambda it: one(it)).store([made(1)])


def test_a_function_knows_only_what_it_was_asked() -> None:
    def store(key: str, body: Any, result: Any) -> None: ...

    sink = open_sink(store)
    assert sink.known(["images/1"]) == set()
    store.known = lambda keys: ["images/1", "images/99"]  # type: ignore[attr-defined]
    assert sink.known(["images/1", "images/2"]) == {"images/1"}
    store.known = lambda keys: None  # type: ignore[attr-defined]
    assert sink.known(["images/1"]) == set()
