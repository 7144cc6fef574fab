"""Devices: who may sit beside whom (L2), and where a request fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.errors import BadInput, InvariantBroken
from sublet.core.scheduling.device import (
    MANY_TENANTS,
    MAY_JOIN,
    Device,
    DeviceState,
    Exclusivity,
    Resident,
    Shape,
    Slice,
    could_ever_fit,
    fit,
    join,
    largest_smaller,
    may_join,
    occupy,
    parse_exclusivity,
    usable,
)
from sublet.core.scheduling.spread import Spread
from tests.conftest import MORE_EXAMPLES
from tests.core.pool import DEVICE, GB, SESSION, SHARED, device

quick = settings(max_examples=60 * MORE_EXAMPLES, deadline=None)
TENANTS = ("ann", "bob", "cyd")

sizes = st.integers(1, 12).map(lambda n: n * 8 * GB)
residents = st.builds(
    Resident,
    tenant=st.sampled_from(TENANTS),
    exclusivity=st.sampled_from(Exclusivity),
    vram_bytes=st.integers(1, 40).map(lambda n: n * GB),
)


def shape(
    gb: int = 8, count: int = 1, exclusivity: Exclusivity = SHARED, tenant: str = "ann", host: str = ""
) -> Shape:
    return Shape(tenant=tenant, vram_bytes=gb * GB, count=count, exclusivity=exclusivity, host=host)


def pairwise(new: Resident, sitting: list[Resident]) -> bool:
    return all(may_join(new.exclusivity, r.exclusivity, same_tenant=new.tenant == r.tenant) for r in sitting)


def seated(wishes: list[Resident], capacity: int) -> list[Resident]:
    """Those of the wishes that may sit down, in order: a state the rules can reach."""
    sitting: list[Resident] = []
    for wish in wishes:
        room = capacity - sum(r.vram_bytes for r in sitting)
        if wish.vram_bytes <= room and pairwise(wish, sitting):
            sitting.append(wish)
    return sitting


# --- the matrix ----------------------------------------------------------------------------------------------


def test_the_matrix_is_complete() -> None:
    assert set(MAY_JOIN) == set(product(Exclusivity, Exclusivity))


@pytest.mark.parametrize(("new", "old"), list(product(Exclusivity, Exclusivity)))
@pytest.mark.parametrize("same_tenant", [True, False])
def test_l2_every_pair_follows_the_three_words(new: Exclusivity, old: Exclusivity, same_tenant: bool) -> None:
    if DEVICE in (new, old):
        expected = False  # alone
    elif SESSION in (new, old):
        expected = same_tenant  # beside its own tenant only
    else:
        expected = True
    assert may_join(new, old, same_tenant=same_tenant) is expected


def test_the_matrix_is_symmetric() -> None:
    for (new, old), answer in MAY_JOIN.items():
        assert MAY_JOIN[(old, new)] == answer


@pytest.mark.parametrize("unknown", ["shared", "exotic", None, 0, object()])
@pytest.mark.parametrize("known", list(Exclusivity))
def test_l2_an_unknown_exclusivity_joins_nobody(unknown: object, known: Exclusivity) -> None:
    assert not may_join(unknown, known, same_tenant=True)
    assert not may_join(known, unknown, same_tenant=True)


@pytest.mark.parametrize("unknown", ["shared", "exotic", None])
def test_l2_an_unknown_exclusivity_fits_nowhere_not_even_alone(unknown: Exclusivity) -> None:
    empty = device()
    assert not empty.accepts(unknown, "ann")
    assert fit(shape(exclusivity=unknown), [empty]) is None


def test_l2_an_unknown_exclusivity_fits_on_no_occupied_device() -> None:
    for resident in (SHARED, SESSION, DEVICE):
        taken = occupy(device(), [Resident("ann", resident, GB)])
        assert not taken.accepts("exotic", "ann")  # type: ignore[arg-type]


@pytest.mark.parametrize("new", list(Exclusivity))
def test_l2_nobody_joins_a_resident_of_unknown_exclusivity(new: Exclusivity) -> None:
    stranger = Resident("ann", "exotic", GB)  # type: ignore[arg-type]
    assert not occupy(device(), [stranger]).accepts(new, "ann")
    assert not join(device(), stranger).accepts(new, "ann")


def test_the_words_are_read_and_nothing_else() -> None:
    assert [parse_exclusivity(e.value) for e in Exclusivity] == list(Exclusivity)
    for text in ("", "SHARED", "exclusive", "shared ", "x" * 10_000, None, 1):
        with pytest.raises(BadInput) as caught:
            parse_exclusivity(text)  # type: ignore[arg-type]
        assert "shared, session or device" in caught.value.message
        assert len(caught.value.message) < 200


# --- sums ----------------------------------------------------------------------------------------------------


@quick
@given(st.lists(residents, max_size=6), residents)
def test_l2_the_sums_answer_as_the_matrix_does(wishes: list[Resident], new: Resident) -> None:
    sitting = seated(wishes, 80 * GB)
    assert occupy(device(), sitting).accepts(new.exclusivity, new.tenant) is pairwise(new, sitting)


@quick
@given(st.lists(residents, max_size=8))
def test_joining_one_by_one_gives_the_sums_recomputed(wishes: list[Resident]) -> None:
    sitting = seated(wishes, 80 * GB)
    one_by_one = device()
    for resident in sitting:
        one_by_one = join(one_by_one, resident)
    assert one_by_one == occupy(device(), sitting)


@quick
@given(st.lists(residents, max_size=8), st.randoms(use_true_random=False))
def test_the_sums_do_not_depend_on_who_came_first(wishes: list[Resident], random: Random) -> None:
    sitting = seated(wishes, 80 * GB)
    shuffled = random.sample(sitting, len(sitting))
    assert occupy(device(), sitting) == occupy(device(), shuffled)


def test_sums_name_the_sole_tenant_or_say_many() -> None:
    assert occupy(device(), []).sole_tenant == ""
    assert occupy(device(), [Resident("ann", SHARED, GB)] * 2).sole_tenant == "ann"
    assert (
        occupy(device(), [Resident("ann", SHARED, GB), Resident("bob", SHARED, GB)]).sole_tenant
        == MANY_TENANTS
    )


def test_l2_overcommit_is_a_bug_and_says_so() -> None:
    full = Resident("ann", SHARED, 80 * GB)
    assert occupy(device(), [full]).free_bytes == 0
    with pytest.raises(InvariantBroken, match="overcommitted"):
        occupy(device(), [full, Resident("ann", SHARED, 1)])
    with pytest.raises(InvariantBroken):
        join(occupy(device(), [full]), Resident("ann", SHARED, 1))


# --- fit -----------------------------------------------------------------------------------------------------


@st.composite
def pools(draw: st.DrawFn) -> list[Device]:
    found = []
    for i in range(draw(st.integers(1, 5))):
        empty = device(
            f"d{i}",
            draw(st.sampled_from([16, 24, 80])),
            host=draw(st.sampled_from(["h", "k"])),
            state=draw(st.sampled_from([DeviceState.READY] * 4 + list(DeviceState))),
        )
        wishes = draw(st.lists(residents, max_size=4))
        found.append(occupy(empty, seated(wishes, empty.capacity_bytes)))
    return found


shapes = st.builds(
    Shape,
    tenant=st.sampled_from(TENANTS),
    vram_bytes=st.integers(1, 90).map(lambda n: n * GB),
    count=st.integers(1, 4),
    exclusivity=st.sampled_from(Exclusivity),
    host=st.sampled_from(["", "", "h", "k"]),
    spread=st.sampled_from(Spread),
)


@quick
@given(pools(), shapes)
def test_fit_is_all_or_nothing_on_distinct_devices_fullest_first(pool: list[Device], wish: Shape) -> None:
    could = [d for d in pool if usable(d, wish)]
    slices = fit(wish, pool)
    alone = {h: [d for d in could if d.host == h] for h in ("h", "k")}
    whole = [h for h in alone if len(alone[h]) >= wish.count]
    if slices is None:
        assert len(could) < wish.count if wish.spread is Spread.OK else not whole
        return
    by_id = {d.id: d for d in pool}
    assert len(slices) == wish.count == len({s.device_id for s in slices})
    chosen = [by_id[s.device_id] for s in slices]
    assert all(d in could for d in chosen)
    hosts = {d.host for d in chosen}
    if wish.count > 1:
        assert len(hosts) == 1 if whole else wish.spread is Spread.OK, "several hosts where one had them all"
        could = [d for d in could if d.host in hosts]
    for host in hosts:
        fullest = max(d.free_bytes for d in chosen if d.host == host)
        left = [d for d in could if d not in chosen and (d.host == host or wish.count == 1)]
        assert all(d.free_bytes >= fullest for d in left), "a fuller device was passed over"
    for s, d in zip(slices, chosen, strict=True):
        assert s.vram_bytes == (d.capacity_bytes if wish.exclusivity is DEVICE else wish.vram_bytes)


@quick
@given(pools(), shapes)
def test_what_is_usable_is_ready_roomy_on_the_host_and_accepting(pool: list[Device], wish: Shape) -> None:
    for d in pool:
        expected = (
            d.state is DeviceState.READY
            and d.free_bytes >= wish.vram_bytes
            and wish.host in ("", d.host)
            and d.accepts(wish.exclusivity, wish.tenant)
        )
        assert usable(d, wish) is expected


@quick
@given(st.lists(shapes, max_size=12), st.lists(st.sampled_from([16, 24, 80]), min_size=1, max_size=4))
def test_l2_fit_then_join_never_overcommits_nor_breaks_the_matrix(
    wishes: list[Shape], gbs: list[int]
) -> None:
    pool = {f"d{i}": device(f"d{i}", gb) for i, gb in enumerate(gbs)}
    sitting: dict[str, list[Resident]] = {name: [] for name in pool}
    for wish in wishes:
        for s in fit(wish, pool.values()) or ():
            new = Resident(wish.tenant, wish.exclusivity, s.vram_bytes)
            assert pairwise(new, sitting[s.device_id])
            sitting[s.device_id].append(new)
            pool[s.device_id] = join(pool[s.device_id], new)
            assert (
                0
                <= pool[s.device_id].free_bytes
                == (pool[s.device_id].capacity_bytes - sum(r.vram_bytes for r in sitting[s.device_id]))
            )


@quick
@given(pools(), shapes, st.randoms(use_true_random=False))
def test_fit_does_not_depend_on_the_order_of_devices(pool: list[Device], wish: Shape, random: Random) -> None:
    assert fit(wish, pool) == fit(wish, random.sample(pool, len(pool)))


def test_small_leases_are_packed_to_keep_whole_devices_free() -> None:
    used = occupy(device("d9"), [Resident("bob", SHARED, 40 * GB)])
    assert fit(shape(8), [device("d0"), used]) == (Slice("d9", 8 * GB),)
    assert fit(shape(8, exclusivity=DEVICE), [device("d0"), used]) == (Slice("d0", 80 * GB),)
    assert fit(shape(8), [device("d1"), device("d0")]) == (Slice("d0", 8 * GB),)


@pytest.mark.parametrize("state", [s for s in DeviceState if s is not DeviceState.READY])
def test_only_a_ready_device_takes_a_lease(state: DeviceState) -> None:
    assert fit(shape(), [device(state=state)]) is None


def test_could_ever_fit_asks_an_empty_pool() -> None:
    capacities = [("h", 80 * GB), ("h", 24 * GB), ("k", 80 * GB)]
    assert not could_ever_fit(shape(80, count=2), capacities)
    assert could_ever_fit(replace(shape(80, count=2), spread=Spread.OK), capacities)
    assert could_ever_fit(shape(24, count=2), capacities)
    assert not could_ever_fit(shape(80, count=3), capacities)
    assert not could_ever_fit(shape(80, count=2, host="h"), capacities)
    assert could_ever_fit(shape(24, count=2, host="h"), capacities)
    assert not could_ever_fit(shape(81), capacities)
    assert not could_ever_fit(shape(1), [])


@quick
@given(pools(), shapes, st.integers(0, 30).map(lambda n: n * GB))
def test_a_smaller_proposal_fits_and_is_the_largest_that_does(
    pool: list[Device], wish: Shape, least: int
) -> None:
    least = min(least, wish.vram_bytes)

    def fits_at(vram: int) -> bool:
        other = Shape(
            tenant=wish.tenant,
            vram_bytes=vram,
            count=wish.count,
            exclusivity=wish.exclusivity,
            host=wish.host,
            spread=wish.spread,
        )
        return fit(other, pool) is not None

    found = largest_smaller(wish, pool, least)
    if found == 0:
        assert not fits_at(max(1, least))
        return
    assert max(1, least) <= found <= wish.vram_bytes
    assert fits_at(found)
    assert found == wish.vram_bytes or not fits_at(found + 1)
