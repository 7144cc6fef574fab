"""Prices: the narrowest that was valid at the grant, and costs that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.billing.price import Price, PriceList, Tariff, check_class, check_micro, check_tier, class_of
from sublet.core.errors import BadInput
from sublet.core.leasing.lease import Holder, LeaseRecord, LeaseState, Request, Tier
from sublet.core.scheduling.device import Device, Slice
from sublet.core.values import HOUR_US

CLASSES = ["A100", "host", "*"]
TIERS = ["", "spot", "batch"]


def price(device_class: str, micro: int | None, at: int = 0, tier: str = "") -> Price:
    return Price(device_class=device_class, tier=tier, micro_per_gpu_hour=micro, valid_from=at)


def lease(at: int, tier: Tier, *devices: str) -> LeaseRecord:
    return LeaseRecord(
        id="L",
        request=Request(tenant="t", vram_bytes=1, ttl_us=1_000_000, tier=tier),
        holder=Holder(host="h"),
        state=LeaseState.ACTIVE,
        granted_at=at,
        slices=tuple(Slice(d, 1) for d in devices),
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(CLASSES),
            st.sampled_from(TIERS),
            st.integers(0, 9),
            st.one_of(st.none(), st.integers(0, 99)),
        ),
        unique_by=lambda p: p[:3],
    ),
    st.sampled_from(["A100", "host", "H200"]),
    st.sampled_from(["spot", "batch", "interactive"]),
    st.integers(-1, 11),
)
def test_the_narrowest_price_that_was_valid_then(
    rows: list[tuple[str, str, int, int | None]], device_class: str, tier: str, at: int
) -> None:
    """Against the rule said plainly: of each key the newest row not after then; the first key that has a price."""
    listed = PriceList([price(c, micro, since, t) for c, t, since, micro in rows])
    expected = None
    for key in [(device_class, tier), (device_class, ""), ("*", tier), ("*", "")]:
        valid = [(since, micro) for c, t, since, micro in rows if (c, t) == key and since <= at]
        if valid and (newest := max(valid, key=lambda v: v[0])[1]) is not None:
            expected = newest
            break
    assert listed.at(device_class, tier, at) == expected
    for shown in listed.current(at):
        assert listed.at(shown.device_class, shown.tier, at) == shown.micro_per_gpu_hour


def test_a_change_does_not_touch_what_was_granted_before() -> None:
    listed = PriceList([price("A100", 100, 10), price("A100", 300, 20), price("A100", None, 30)])
    classes = {"d": "A100"}
    found = [listed.tariff(lease(at, Tier.SPOT, "d"), classes) for at in (9, 10, 19, 20, 29, 30)]
    assert found == [None, Tariff(100, 1), Tariff(100, 1), Tariff(300, 1), Tariff(300, 1), None]
    assert listed.tariff(lease(9, Tier.SPOT, "d"), classes, 7) == Tariff(7, 1)
    assert listed.tariff(lease(0, Tier.SPOT), classes) is None
    assert not PriceList([])


def test_devices_of_one_lease_cost_what_each_costs() -> None:
    listed = PriceList([price("A100", 100), price("host", 20)])
    classes = {"a": "A100", "b": "host", "c": "H200"}
    both = listed.tariff(lease(1, Tier.SPOT, "a", "b"), classes)
    assert both == Tariff(120, 2)
    assert both.cost(2 * HOUR_US) == 120  # an hour of each
    assert listed.tariff(lease(1, Tier.SPOT, "a", "c"), classes) is None
    assert listed.tariff(lease(1, Tier.SPOT, "a", "c"), classes, 1) == Tariff(101, 2)


@given(st.integers(0, 10**9), st.integers(1, 8), st.lists(st.integers(0, 10**12), max_size=9))
def test_parts_never_cost_more_than_the_whole(micro: int, devices: int, parts: list[int]) -> None:
    tariff = Tariff(micro * devices, devices)
    whole = tariff.cost(sum(parts))
    assert whole - len(parts) <= sum(tariff.cost(part) for part in parts) <= whole


def test_what_devices_are_priced_by() -> None:
    device = Device(
        id="d", host="h", driver="cuda", ordinal=0, name="NVIDIA A100", capacity_bytes=1, free_bytes=1
    )
    assert class_of(device) == "NVIDIA A100"
    assert class_of(replace(device, driver="host", name="host memory 8GiB")) == "host"


def test_what_is_no_price_is_refused() -> None:
    for wrong in ("", "a\nb", "x" * 101):
        with pytest.raises(BadInput):
            check_class(wrong)
    with pytest.raises(BadInput):
        check_tier("gold")
    for micro in (-1, 10**13 + 1):
        with pytest.raises(BadInput):
            check_micro(micro)
    assert (check_class("*"), check_tier(""), check_tier("spot"), check_micro(0)) == ("*", "", "spot", 0)
