"""Reading several things as of one moment, one thing without a transaction, and the journal as it can be seen."""

from __future__ import annotations

import pytest

from sublet.core.errors import NotFound
from sublet.core.leasing.tenancy import Tenant
from tests.ledger.rig import Rig


def test_what_is_read_at_once_is_of_one_moment(rig: Rig) -> None:
    rig.tenant("ada")
    other = rig.open()

    def twice() -> tuple[list[str], list[str], int]:
        first = [t.name for t in rig.ledger.tenants()]
        other.add_tenant(Tenant(name="ben"), actor="test")
        return first, [t.name for t in rig.ledger.tenants()], len(rig.ledger.tail(limit=100))

    first, second, rows = rig.ledger.at_once(twice)
    assert first == second
    assert "ben" in [t.name for t in rig.ledger.tenants()]  # and afterwards it is as it is
    assert len(rig.ledger.tail(limit=100)) > rows


def test_an_error_inside_leaves_nothing_behind(rig: Rig) -> None:
    with pytest.raises(NotFound):
        rig.ledger.at_once(lambda: rig.ledger.tenant("nobody"))
    rig.tenant("ada")
    assert rig.ledger.tenant("ada").name == "ada"


def test_a_token_is_looked_up_also_inside(rig: Rig) -> None:
    rig.tenant("ada")
    rig.ledger.add_token("0" * 16, "1" * 64, "ada", actor="test")
    assert rig.ledger.look_token("0" * 16) == rig.ledger.at_once(lambda: rig.ledger.look_token("0" * 16))
    assert rig.ledger.look_token("f" * 16) is None


def test_following_gives_the_rows_after_one(rig: Rig) -> None:
    for name in ("ada", "ben", "cleo"):
        rig.tenant(name)
    every = rig.ledger.follow(after=0, limit=1000)
    assert list(every.rows) == rig.ledger.tail(after=0, limit=1000)
    assert every.at > 0
    assert every.running_from <= every.begun_before
    first = every.rows[0][0]
    assert rig.ledger.follow(after=first, limit=1).rows == every.rows[1:2]
    assert rig.ledger.follow(after=every.rows[-1][0], limit=10).rows == ()


def test_a_transaction_that_runs_is_told(postgres: Rig) -> None:
    """What it will write may still appear below the newest row."""
    with postgres.ledger.engine.connect() as held:  # type: ignore[attr-defined]
        held.execute("BEGIN")
        held.execute("INSERT INTO meta VALUES ('held', '1')")
        postgres.tenant("ada")
        seen = postgres.ledger.follow(after=0, limit=10)
        postgres.tenant("ben")
        later = postgres.ledger.follow(after=0, limit=10)
        assert later.running_from < seen.begun_before
        held.execute("ROLLBACK")
        assert postgres.ledger.follow(after=0, limit=10).running_from >= seen.begun_before
