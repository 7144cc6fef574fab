"""Which hosts a gang is laid over: every answer compared with all there could be."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.errors import BadInput, NeverFits
from sublet.core.leasing.lease import Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.scheduling.admission import Refusal, Wait, admit
from sublet.core.scheduling.device import Slice, fit
from sublet.core.scheduling.spread import Spread, parse_spread, share_out
from tests.conftest import MORE_EXAMPLES
from tests.core.pool import GB, NOW, active, device, view_of, waiter

rooms = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5), max_size=6)


@settings(max_examples=200 * MORE_EXAMPLES, deadline=None, database=None)
@given(st.integers(2, 12), rooms, st.sampled_from(Spread))
def test_the_fewest_hosts_and_then_the_fewest_left_over(
    count: int, room: dict[str, int], spread: Spread
) -> None:
    found = share_out(count, room, spread)
    fewest = next(
        (
            size
            for size in range(1, len(room) + 1 if spread is Spread.OK else 2)
            if any(sum(room[h] for h in some) >= count for some in combinations(room, size))
        ),
        None,
    )
    if found is None:
        assert fewest is None
        return
    assert sum(n for _, n in found) == count
    assert all(0 < n <= room[host] for host, n in found)
    assert len({host for host, _ in found}) == len(found) == fewest
    taken = {host for host, _ in found[:-1]}
    last, part = found[-1]
    assert all(room[host] == n for host, n in found[:-1]), "hosts but the last are taken whole"
    others = [room[h] - part for h in room if h not in taken and room[h] >= part]
    assert room[last] - part == min(others), "another host would have kept fewer devices idle"


def test_one_host_that_has_them_is_taken_before_several() -> None:
    pool = [device("a0", host="a"), device("b0", host="b"), device("b1", host="b"), device("c0", host="c")]
    two = Request(tenant="ann", vram_bytes=8 * GB, ttl_us=10**8, count=2, spread=Spread.OK).shape()
    assert fit(two, pool) == (Slice("b0", 8 * GB), Slice("b1", 8 * GB))
    assert fit(two, [d for d in pool if d.id != "b1"]) == (Slice("a0", 8 * GB), Slice("b0", 8 * GB))


def test_who_forbids_it_waits_for_one_host_and_is_told_what_would_do() -> None:
    pool = [device("a0", host="a"), device("b0", host="b"), device("b1", host="b")]
    view = view_of(pool, [active("x", "b1", gb=80)], tenants=[Tenant(name="ann"), Tenant(name="bob")])
    answer = admit(waiter("w", gb=80, count=2), view, NOW)
    assert isinstance(answer, Wait)
    assert (
        answer.reason
        == "resources: needs 2 × 80GB on one host, 1 such devices are free there; spread=ok takes them from several hosts now"
    )
    never = admit(waiter("w", gb=80, count=3), view, NOW)
    assert isinstance(never, Refusal)
    assert never.error is NeverFits
    assert never.reason == "3 × 80GB never fits on one host; spread=ok takes them from several"
    assert isinstance(admit(waiter("w", gb=80, count=4, spread=Spread.OK), view, NOW), Refusal)


def test_words() -> None:
    assert parse_spread("ok") is Spread.OK
    with pytest.raises(BadInput, match="use no or ok"):
        parse_spread("yes")
    with pytest.raises(BadInput, match="leave out one"):
        Request(tenant="a", vram_bytes=1, ttl_us=10**8, count=2, host="h", spread=Spread.OK)
