"""What is asked in SQL is what `core` says, on both engines: `slices.candidates` is `core.scheduling.device.fit` over any pool, and a lease
costs its tenant what `core.billing.allowance` says, whichever way the verbs run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sublet.core.billing.allowance import paid, payable_us, settled
from sublet.core.leasing.tenancy import PPM, Tenant, rate_of
from sublet.core.scheduling.device import (
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
from sublet.core.scheduling.spread import Spread
from sublet.ledger.rows import DEVICE_COLUMNS
from sublet.ledger.verbs.leasing import slices
from tests.conftest import MORE_EXAMPLES
from tests.ledger.rig import MINUTE, SECOND, Rig, postgres_rig, sqlite_rig

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
    spread=st.sampled_from(list(Spread)),
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
            assert fit(shape, found) == chosen, shape
            if shape.count > 1 and not shape.host:
                continue  # which hosts it will be is for `fit` to say, of all that could
            assert len(found) == min(shape.count, sum(usable(d, shape) for d in pool)), shape
            if chosen is not None:
                assert [d.id for d in found] == [s.device_id for s in chosen], shape

    bare.ledger.engine.write(work, durable=False)


@pytest.mark.parametrize("exclusivity", list(Exclusivity))
def test_every_exclusivity_has_its_sql(exclusivity: Exclusivity) -> None:
    assert exclusivity in slices._ACCEPTS


@settings(
    max_examples=25 * MORE_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(
    per_day=st.sampled_from([0, 0, 1, 60, 3600]),
    vram=st.sampled_from([1, 10, 80]),
    exclusivity=st.sampled_from(list(Exclusivity)),
    steps=st.lists(st.sampled_from(["renew", "later", "release"]), max_size=4),
)
def test_gpu_time_by_the_day_is_paid_by_core_alone(
    bare: Rig, per_day: int, vram: int, exclusivity: Exclusivity, steps: list[str]
) -> None:
    """Whichever way the verbs run: what a lease costs is what `core.billing.allowance` says of its row, to a microsecond for each rounding."""

    def empty(tx: Any) -> None:
        for table in ("slice", "lease", "device", "tenant"):
            tx.run(f"DELETE FROM {table}")

    bare.ledger.engine.write(empty, durable=False)
    bare.device()
    bare.tenant("ada", gpu_us_per_day=per_day * SECOND)
    with answered_in_sql(bare) as answered:
        _live_through(bare, per_day, vram, exclusivity, steps)
    if bare.engine == "postgres":
        assert bool(answered) == (not per_day)


def _live_through(bare: Rig, per_day: int, vram: int, exclusivity: Exclusivity, steps: list[str]) -> None:
    answer = bare.ask(vram, exclusivity=exclusivity, ttl_us=MINUTE, wait_us=0)
    begun, lease = bare.ledger.tenant("ada"), answer.lease
    rate = rate_of(exclusivity, lease.slices[0].vram_bytes, 80)
    known = Tenant(name="ada", gpu_us_per_day=per_day * SECOND, left_us=per_day * SECOND, left_at=answer.at)
    if per_day:
        assert lease.expires_at - answer.at == min(MINUTE, per_day * SECOND * PPM // rate)
        known = paid(known, rate, lease.expires_at - answer.at, answer.at)
    else:
        assert lease.expires_at - answer.at == MINUTE
    assert (begun.left_us, begun.left_at if per_day else 0) == (
        known.left_us,
        known.left_at if per_day else 0,
    )
    for step in steps:
        if step == "later":
            bare.advance(min(2 * SECOND, (lease.expires_at - bare.ledger.now()) // 2))
            continue
        before = bare.ledger.tenant("ada")
        if step == "renew":
            renewed = bare.ledger.renew(bare.key(lease))
            more = renewed.lease.expires_at - lease.expires_at
            assert more >= 0
            if per_day:
                can = payable_us(before, rate, renewed.at)
                assert more == max(0, min(can, renewed.at + MINUTE - lease.expires_at))
                before = paid(before, rate, more, renewed.at)
            else:
                assert renewed.lease.expires_at == renewed.at + MINUTE
            lease = renewed.lease
        else:
            bare.release(answer)
            ended = bare.look(lease.id)
            if per_day:
                before = settled(before, rate, lease.expires_at - ended.ended_at, ended.ended_at)
        after = bare.ledger.tenant("ada")
        assert (after.left_us, after.gpu_us_per_day) == (before.left_us, before.gpu_us_per_day)
        if step == "release":
            break


@contextlib.contextmanager
def answered_in_sql(rig: Rig) -> Iterator[list[Any]]:
    """What the one-call verbs answered by themselves; the rest went through `core`."""
    engine, answers = rig.ledger.engine, []
    if rig.engine == "postgres":
        call = engine.call

        def listening(sql: str, *args: Any, **options: Any) -> Any:
            row = call(sql, *args, **options)
            if re.search("sublet_(acquire|renew|release)", sql) and row is not None and row[0] is not None:
                answers.append(row)
            return row

        engine.call = listening
    try:
        yield answers
    finally:
        if rig.engine == "postgres":
            del engine.call
