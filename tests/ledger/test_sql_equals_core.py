"""`slices.candidates` asked in SQL is `core.device.fit` asked in Python, over any pool (both engines)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sublet.core.device import (
    Device,
    DeviceState,
    Exclusivity,
    Resident,
    Shape,
    fit,
    may_join,
    occupy,
    usable,
)
from sublet.ledger import slices
from sublet.ledger.rows import DEVICE_COLUMNS
from tests.conftest import MORE_EXAMPLES

from .rig import Rig, postgres_rig, sqlite_rig

TENANTS = ["ada", "bob"]
residents = st.builds(
    Resident,
    tenant=st.sampled_from(TENANTS),
    exclusivity=st.sampled_from(list(Exclusivity)),
    vram_bytes=st.sampled_from([5, 10, 20]),
)


@st.composite
def a_device(draw: st.DrawFn, number: int) -> Device:
    empty = Device(
        id=f"gpu{number}",
        host=draw(st.sampled_from(["node-a", "node-b"])),
        driver="host",
        ordinal=number,
        name="",
        capacity_bytes=draw(st.sampled_from([20, 40, 80])),
        free_bytes=0,
        state=draw(st.sampled_from([DeviceState.READY] * 6 + list(DeviceState))),
    )
    here: list[Resident] = []
    for r in draw(st.lists(residents, max_size=4)):
        room = sum(x.vram_bytes for x in here) + r.vram_bytes <= empty.capacity_bytes
        welcome = all(may_join(r.exclusivity, x.exclusivity, same_tenant=r.tenant == x.tenant) for x in here)
        if room and welcome:
            here.append(r)
    return occupy(empty, here)


@st.composite
def pools(draw: st.DrawFn) -> list[Device]:
    return [draw(a_device(n)) for n in range(draw(st.integers(0, 6)))]


shapes = st.builds(
    Shape,
    tenant=st.sampled_from(TENANTS),
    vram_bytes=st.sampled_from([1, 5, 10, 20, 40, 80]),
    count=st.integers(1, 3),
    exclusivity=st.sampled_from(list(Exclusivity)),
    host=st.sampled_from(["", "", "node-a", "node-c"]),
)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "sqlite":
        rig, schema = sqlite_rig(tmp_path_factory.mktemp("bare")), None
    else:
        rig, schema = postgres_rig(request.getfixturevalue("postgres_server").url)
    yield rig
    rig.close()
    if schema is not None:
        schema.drop()


@settings(
    max_examples=60 * MORE_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(pool=pools(), wanted=st.lists(shapes, min_size=1, max_size=6))
def test_candidates_are_what_fit_would_choose(bare: Rig, pool: list[Device], wanted: list[Shape]) -> None:
    def work(tx: Any) -> None:
        tx.run("DELETE FROM device")
        for d in pool:
            tx.run(
                f"INSERT INTO device ({DEVICE_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
                d.id,
                d.host,
                d.driver,
                d.ordinal,
                d.name,
                d.capacity_bytes,
                d.free_bytes,
                d.state.value,
                d.leases,
                d.session_leases,
                d.device_leases,
                d.sole_tenant,
                d.note,
            )
        for shape in wanted:
            found, chosen = slices.candidates(tx, shape), fit(shape, pool)
            assert all(usable(d, shape) for d in found), shape
            assert len(found) == min(shape.count, sum(usable(d, shape) for d in pool)), shape
            assert fit(shape, slices.candidates(tx, shape)) == chosen, shape
            if chosen is not None:
                assert [d.id for d in found] == [s.device_id for s in chosen], shape

    bare.ledger.engine.write(work, durable=False)


@pytest.mark.parametrize("exclusivity", list(Exclusivity))
def test_every_exclusivity_has_its_sql(exclusivity: Exclusivity) -> None:
    assert exclusivity in slices._ACCEPTS
