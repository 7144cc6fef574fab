"""`sublet doctor` on what lies elsewhere: a PostgreSQL that refuses, is down, is locked; stores that lie; placements that are not there."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from sublet import wiring
from sublet.cli.doctor import ledger as of_ledger
from sublet.cli.doctor import placement
from sublet.cli.doctor import stores as of_stores
from sublet.cli.doctor.checks import Check
from sublet.cli.doctor.doctor import doctor
from sublet.cli.doctor.ledger import check_ledger
from sublet.cli.doctor.placement import check_placement
from sublet.cli.doctor.stores import check_stores
from sublet.core.errors import Disconnected
from sublet.ports.ledger import FoundDevice
from sublet.settings import Settings, load_settings
from sublet.store.buckets.failure import BucketFailed
from sublet.testing.postgres import PostgresServer, find_binaries
from tests.conftest import need
from tests.store.servers import Proxy, Seen, Server, Servers


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [n for n in os.environ if n.startswith("SUBLET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SUBLET_HOME", str(tmp_path / "h"))
    yield
    wiring.close_all()


def by_part(checks: Iterator[Check]) -> dict[str, Check]:
    return {c.part: c for c in checks}


@pytest.fixture(autouse=True)
def _nothing_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine answers as late as one in another region."""
    monkeypatch.setattr(of_ledger, "FAR_MS", 60_000.0)
    monkeypatch.setattr(of_stores, "FAR_MS", 60_000.0)


# --- the ledger ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[PostgresServer]:
    """A server with a user who has a password, and one who may nothing."""
    need(find_binaries() is not None, "a PostgreSQL server")
    import psycopg

    server = PostgresServer()
    rules = server.data / "pg_hba.conf"
    rules.write_text(f"local all guarded scram-sha-256\n{rules.read_text()}")
    server.start()
    with psycopg.connect(server.url, autocommit=True) as db:
        db.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
        db.execute("GRANT CREATE ON DATABASE postgres TO guarded")
        db.execute("CREATE ROLE meagre LOGIN")
    yield server
    server.stop()


def address(server: PostgresServer, user: str, password: str = "") -> Settings:
    who = f"{user}:{password}@" if password else f"{user}@"
    schema = f"d{uuid.uuid4().hex[:10]}"
    return load_settings(
        ledger=f"postgresql://{who}/postgres?host={server.folder}&sublet_schema={schema}", host="here"
    )


def test_a_postgresql_that_is_well(guarded: PostgresServer) -> None:
    found = by_part(check_ledger(address(guarded, "guarded", "right")))
    assert {c.status for c in found.values()} == {"ok"}, found
    assert set(found) == {"ledger", "ledger read", "ledger to disk", "clock", "journal"}
    assert "PostgreSQL" in found["ledger"].seen


def test_a_postgresql_that_is_far_is_said_and_a_file_never_is(
    guarded: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_ledger, "FAR_MS", 0.0)
    found = by_part(check_ledger(address(guarded, "guarded", "right")))
    late = [c for c in found.values() if c.status == "warn"]
    assert {c.part for c in late} == {"ledger read", "ledger to disk"}
    assert all("one region" in c.remedy for c in late)
    here = by_part(check_ledger(load_settings(ledger=f"sqlite:{tmp_path}/ledger.db", host="here")))
    assert {c.status for c in here.values()} == {"ok"}, here


def test_a_wrong_password_is_said_with_what_to_do_and_not_shown(guarded: PostgresServer) -> None:
    [check] = check_ledger(address(guarded, "guarded", "wr0ng-canary"))
    assert (check.part, check.status) == ("ledger", "fail")
    assert "refused" in check.seen
    assert "password" in check.remedy
    assert "wr0ng-canary" not in check.seen + check.remedy


def test_a_user_who_may_not_write_is_told_which_rights_are_missing(guarded: PostgresServer) -> None:
    """Neither make the tables, nor write in somebody else's."""
    import psycopg

    [check] = check_ledger(address(guarded, "meagre"))
    assert (check.status, "GRANT" in check.remedy) == ("fail", True), check
    made = address(guarded, "guarded", "right")
    assert by_part(check_ledger(made))["ledger"].status == "ok"
    schema = made["ledger"].rpartition("=")[2]
    with psycopg.connect(guarded.url, autocommit=True) as db:
        db.execute(f"GRANT USAGE ON SCHEMA {schema} TO meagre")
        db.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO meagre")
    poor = load_settings(ledger=made["ledger"].replace("guarded:right@", "meagre@"), host="here")
    last = list(check_ledger(poor))[-1]
    assert (last.part, last.status, "GRANT" in last.remedy) == ("ledger", "fail", True), last


def test_a_server_that_is_down_is_told_from_one_that_refuses() -> None:
    [check] = check_ledger(
        load_settings(ledger="postgresql://ada:pw-canary@127.0.0.1:1/nowhere", host="here")
    )
    assert (check.part, check.status) == ("ledger", "fail")
    assert check.remedy
    assert "pw-canary" not in check.seen + check.remedy


def test_clocks_that_differ_are_said_and_harm_nothing(guarded: PostgresServer) -> None:
    settings = address(guarded, "guarded", "right")
    ledger: Any = wiring.open_ledger(settings)
    assert by_part(check_ledger(settings))["clock"].status == "ok"
    ledger.engine.skew_us = 90_000_000
    clock = by_part(check_ledger(settings))["clock"]
    assert clock.status == "warn"
    assert "+90." in clock.seen or "+89." in clock.seen
    assert "time service" in clock.remedy


# --- stores --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stores() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


@contextlib.contextmanager
def tried(server: Server, url: str, *more: str, seconds: float = 20.0) -> Iterator[list[Check]]:
    quick = {"SUBLET_BUCKET_TIMEOUT": "2", "SUBLET_BUCKET_PATIENCE": "3"}
    with mock.patch.dict(os.environ, server.environment | quick):
        yield list(check_stores(load_settings(store=",".join([url, *more])), seconds=seconds))


def test_a_bucket_and_a_folder_that_are_well(stores: Servers, tmp_path: Path) -> None:
    server = stores["moto"]
    url = server.url()
    with tried(server, f"{url}@zone-a", f"dir:{tmp_path}/copy@disk-b") as checks:
        assert [c.status for c in checks] == ["ok", "ok", "ok"], checks
        assert all("a taken name refused" in c.seen for c in checks[:2])
        assert "zone-a" in checks[0].seen
        assert "2 of 2" in checks[2].seen
        # Nothing of the trial is left.
        assert list(server.open(url).manifests()) == []
        assert not [p for p in (tmp_path / "copy").rglob("*") if p.is_file()]


def test_a_bucket_that_is_far_is_said_and_a_folder_never_is(
    stores: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_stores, "FAR_MS", 0.0)
    server = stores["moto"]
    with tried(server, f"{server.url()}@zone-a", f"dir:{tmp_path}/copy@disk-b") as checks:
        assert [c.status for c in checks] == ["warn", "ok", "ok"], checks
        assert "it is far" in checks[0].remedy


@pytest.mark.parametrize(("where", "named"), [("", ""), ("/manifests/", ""), ("", "/team-403")])
def test_a_server_that_ignores_conditions_cannot_be_a_store(stores: Servers, where: str, named: str) -> None:
    """Everywhere, or only where checkpoints lie: what is tried when a store is opened is not all. A number in its name is no refusal."""
    with (
        Proxy(stores["moto"], lambda seen: "unconditional" if where in seen.object else None) as proxy,
        tried(proxy.server, proxy.server.url() + named) as [check],
    ):
        assert check.status == "fail"
        assert "ignores the condition" in check.seen or "name that was taken" in check.seen
        assert "If-None-Match" in check.remedy


def test_missing_rights_are_named(stores: Servers) -> None:
    with (
        Proxy(stores["moto"], lambda seen: "403" if seen.method == "PUT" else None) as proxy,
        tried(proxy.server, proxy.server.url()) as [check],
    ):
        assert check.status == "fail"
        assert "credentials" in check.remedy


def test_a_store_from_which_nothing_can_be_removed_is_warned_of(stores: Servers) -> None:
    with (
        Proxy(stores["moto"], lambda seen: "403" if seen.method in ("DELETE", "POST") else None) as proxy,
        tried(proxy.server, proxy.server.url()) as [check],
    ):
        assert check.status == "warn", check
        assert "delete" in check.remedy


def test_one_that_hangs_does_not_hide_the_others_nor_hold_up_the_doctor(
    stores: Servers, tmp_path: Path
) -> None:
    with (
        Proxy(stores["moto"], lambda seen: "slow") as proxy,
        tried(
            proxy.server, proxy.server.url(), f"dir:{tmp_path}/a@a", f"dir:{tmp_path}/b@b", seconds=1.5
        ) as checks,
    ):
        assert [c.status for c in checks] == ["fail", "ok", "ok", "warn"], checks
        assert "did not answer" in checks[0].seen
        assert "2 of 3" in checks[3].seen


def test_too_few_that_work_are_a_failure(stores: Servers, tmp_path: Path) -> None:
    with (
        Proxy(stores["moto"], lambda seen: "403") as proxy,
        tried(proxy.server, proxy.server.url(), f"dir:{tmp_path}/a@a") as checks,
    ):
        assert checks[-1].part == "store quorum"
        assert checks[-1].status == "fail"
        assert "nothing can be saved" in checks[-1].remedy


def test_copies_that_fail_together_are_warned_of(tmp_path: Path) -> None:
    settings = load_settings(store=f"dir:{tmp_path}/a,dir:{tmp_path}/b")
    assert by_part(check_stores(settings))["store quorum"].status == "warn"


# --- placement, and all of it --------------------------------------------------------------------------------


def test_placement_here_and_one_nobody_knows() -> None:
    [here] = check_placement(load_settings())
    assert here.status == "ok"
    [unknown] = check_placement(load_settings(placement="nowhere://head:10001"))
    assert (unknown.status, bool(unknown.remedy)) == ("fail", True)


def engine_with(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The contract of `sublet.placements`, with an engine of our own; what it was asked."""
    asked: list[str] = []

    class Engine:
        def __init__(self, where: str, ledger: str) -> None:
            asked.extend((where, ledger))

        def ready(self) -> None:
            if isinstance(hosts, Exception):
                raise hosts

        def hosts(self) -> frozenset[str]:
            return frozenset(hosts)

    monkeypatch.setattr(placement, "plug_in", lambda group, name: (Engine, asked.append(name))[0])
    return asked


@pytest.mark.parametrize("hosts", [[], RuntimeError("no cluster"), Disconnected("no cluster")])
def test_a_placement_that_cannot_place_is_a_failure(
    hosts: Any, guarded: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = engine_with(hosts, monkeypatch)
    url = address(guarded, "guarded", "right")["ledger"]
    [check] = check_placement(load_settings(placement="engine://head:1", ledger=url))
    assert (check.status, asked) == ("fail", ["engine", "engine://head:1", url])
    assert check.remedy


def test_a_placement_needs_a_ledger_all_nodes_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_with(["n1"], monkeypatch)
    [check] = check_placement(load_settings(placement="engine://head:1", ledger="sqlite:/tmp/x.db"))
    assert (check.status, "postgresql" in check.remedy) == ("fail", True)


def test_nodes_are_held_against_the_ledger(guarded: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_with(["n1", "n2"], monkeypatch)
    url = address(guarded, "guarded", "right")["ledger"]
    settings = load_settings(placement="engine://head:1", ledger=url)
    ledger = wiring.open_ledger(settings)
    for host in ("n1", "lonely"):
        device = FoundDevice(id=f"{host}-gpu", driver="host", ordinal=0, name="", capacity_bytes=1 << 30)
        ledger.report_host(host, [device])
    found = by_part(check_placement(settings))
    assert {part: c.status for part, c in found.items()} == {
        "placement": "ok",
        "node n1": "ok",
        "node n2": "warn",
        "host lonely": "warn",
    }
    assert "another ledger" in found["node n2"].seen


def test_as_json_every_failure_has_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUBLET_STORE", f"dir:{tmp_path}/file/store")
    monkeypatch.setenv("SUBLET_PLACEMENT", "nowhere://x")
    monkeypatch.setattr("sublet.cli.doctor.doctor._check_devices", lambda settings: ())  # no warden for this
    done = CliRunner().invoke(doctor, ["--json"])
    said = json.loads(done.stdout)
    failing = {c["part"]: c for c in said["checks"] if c["status"] == "fail"}
    assert set(failing) == {f"store dir:{tmp_path}/file/store"[:66], "placement"}
    assert all(c["remedy"] for c in failing.values())
    assert done.exit_code != 0
    plain = CliRunner().invoke(doctor, [])
    assert "What to do:" in plain.stdout


@pytest.mark.parametrize(
    ("only", "said", "next_step"),
    [
        ("", "403", "refuses this key"),
        ("PUT", "may be read, and not written to", "write, list and delete"),
        ("list-type", "cannot be listed", "list under the prefix"),
    ],
)
def test_what_a_key_may_not_do_is_named(stores: Servers, only: str, said: str, next_step: str) -> None:
    def refused(seen: Seen) -> str | None:
        return "403" if only in (seen.method, "") or only in seen.path else None

    with Proxy(stores["moto"], refused) as proxy, tried(proxy.server, proxy.server.url()) as [check]:
        assert check.status == "fail"
        assert said in check.seen
        assert next_step in check.remedy


def test_a_bucket_that_is_not_there_is_not_made(stores: Servers) -> None:
    with tried(stores["moto"], "s3://nobodys-bucket/x") as [check]:
        assert check.status == "fail"
        assert "create it" in check.remedy


@pytest.mark.parametrize(
    ("said", "next_step"),
    [
        ("the server answered 403 SignatureDoesNotMatch", "AWS_ACCESS_KEY_ID"),
        ("the server answered 403 RequestTimeTooSkewed", "clock"),
        ("the server answered 400 AuthorizationHeaderMalformed", "SUBLET_BUCKET_MY_EU_REGION"),
        ("no connection (3 times in 2 s)", "AWS_ENDPOINT_URL"),
        ("the server answered 503", "saves wait"),
    ],
)
def test_what_a_server_says_has_a_next_step(said: str, next_step: str) -> None:
    assert next_step in BucketFailed(said).what_next("s3", "my-eu")
