"""Removed tenants on both engines: nobody else gets what they had (T1)."""

from __future__ import annotations

import pytest

from sublet.core.errors import BadInput, NotFound
from sublet.core.leasing.tenancy import Tenant
from tests.ledger.rig import Rig


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.tenant("ada")
    rig.device("gpu0", 1000)
    held = rig.ask(10)
    rig.commit(held, 1)
    rig.release(held)
    rig.ledger.remove_tenant("ada", actor="op")
    return rig


@pytest.mark.parametrize("exist_ok", [False, True])
def test_the_name_of_a_removed_tenant_is_not_given_to_another(pool: Rig, exist_ok: bool) -> None:
    """T1: its checkpoints, leases and journal rows are found by name, so the name is nobody else's; not on first use either."""
    with pool.only_journals(), pytest.raises(BadInput, match="the name ada is reserved") as raised:
        pool.ledger.add_tenant(Tenant(name="ada"), actor="somebody", exist_ok=exist_ok)
    assert "another name" in raised.value.remedy
    with pytest.raises(NotFound):
        pool.ledger.tenant("ada")
    with pytest.raises(NotFound):
        pool.ask(1)
    assert [h.job for h in pool.ledger.heads(tenant="ada")] == ["train"], "it is kept"


def test_it_may_come_back_to_what_it_had(pool: Rig) -> None:
    """Said by name, once: it is there then, and adding it again is refused as for everybody."""
    pool.ledger.add_tenant(Tenant(name="ada"), actor="op", returning=True)
    held = pool.ask(10)
    pool.commit(held, 2)
    pool.release(held)
    with pytest.raises(BadInput, match="exists already"):
        pool.tenant("ada")
    pool.ledger.remove_tenant("ada", actor="op")
    with pytest.raises(BadInput, match="reserved"):
        pool.tenant("ada")
    assert pool.faults() == []


def test_one_that_was_never_removed_cannot_come_back(pool: Rig) -> None:
    with pool.only_journals(), pytest.raises(BadInput, match="no tenant eve was removed"):
        pool.ledger.add_tenant(Tenant(name="eve"), actor="op", returning=True)
