"""What the tests stand on: a schema that was used before is as a new one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ledger.rig import PostgresSchema, Rig, postgres_rig


@pytest.fixture
def server_url(postgres_server: Any) -> str:
    return str(postgres_server.url)


def used(server_url: str) -> tuple[Rig, PostgresSchema, dict[str, Any]]:
    rig, schema = postgres_rig(server_url)
    first = rig.dump()
    assert all(not rows for table, rows in first.items() if table not in ("meta", "pool"))
    rig.tenant()
    rig.device()
    rig.commit(rig.ask(10), 1)
    rig.policy(grace_us=12345)
    assert rig.sql("SELECT min(id) FROM journal") == [(1,)]
    rig.close()
    return rig, schema, first


def test_rows_and_numbers_begin_again(server_url: str) -> None:
    _, schema, first = used(server_url)
    schema.hand_on()
    rig, again, second = used(server_url)
    assert again is schema
    assert second == first
    rig.close()
    again.hand_on()


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE slice",
        "ALTER TABLE lease ADD COLUMN more int",
        "DROP INDEX IF EXISTS {index}",
        "CREATE OR REPLACE FUNCTION sublet_now() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT 1::bigint'",
        'DROP SCHEMA "{name}" CASCADE',
    ],
)
def test_one_that_is_built_otherwise_is_not_handed_on(server_url: str, change: str) -> None:
    _, schema, _ = used(server_url)
    [(index,), *_] = schema.sql(
        "SELECT indexname FROM pg_indexes WHERE schemaname = ? AND indexdef NOT LIKE '%%UNIQUE%%'",
        (schema.name,),
    )
    schema.sql(change.format(index=index, name=schema.name))
    schema.hand_on()
    rig, other = postgres_rig(server_url)
    assert other is not schema
    assert other.sql("SELECT to_regnamespace(?) IS NULL", (schema.name,)) == [(True,)]
    rig.close()
    other.hand_on()


def test_one_that_somebody_is_still_connected_to_is_not_handed_on(server_url: str) -> None:
    _, schema, _ = used(server_url)
    left = schema.connect()
    schema.hand_on()
    left.close()
    rig, other = postgres_rig(server_url)
    assert other is not schema
    rig.close()
    other.hand_on()
