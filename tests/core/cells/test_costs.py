"""The lines of an account tile each lease, so that they add up to the ledger's usage, to the microsecond."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.billing.meter import close, of_ended
from sublet.core.cells.costs import CellCost, NotebookCosts, price_micro
from sublet.core.errors import InvariantBroken
from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState
from sublet.core.scheduling.device import Slice
from sublet.core.values import HOUR_US
from tests.core.pool import GB, NOW, M, S, active

PRICES = st.one_of(st.integers(0, 10), st.integers(0, 50_000_000))
moments = st.integers(-M, 40 * M).map(lambda d: NOW + d)


@dataclass(frozen=True)
class Call:
    lease: int
    at: int
    busy_us: int


calls = st.lists(
    st.builds(Call, lease=st.integers(0, 2), at=moments, busy_us=st.integers(-S, 50 * M)), max_size=12
)


def granted(number: int, devices: int) -> LeaseRecord:
    made = active(
        f"L{number}", granted_at=NOW + number * S, expires_at=NOW + 30 * M, deadline_at=NOW + 30 * M
    )
    return replace(made, slices=tuple(Slice(f"d{i}", GB) for i in range(devices)))


def began(account: NotebookCosts, lease: LeaseRecord) -> None:
    account.begin(lease.id, lease.granted_at, "d0", len(lease.slices), GB)


def ended(lease: LeaseRecord, at: int) -> LeaseRecord:
    """As the ledger writes it."""
    usage = close(lease, EndReason.EXPIRED, at)
    return replace(lease, state=LeaseState.ENDED, ended_at=usage.to_at, reason=EndReason.EXPIRED)


@settings(max_examples=300, deadline=None)
@given(
    calls,
    st.lists(st.tuples(st.integers(1, 4), moments, st.integers(0, 12)), min_size=3, max_size=3),
    PRICES,
)
def test_lines_tile_each_lease_and_add_up_to_the_ledger_s_usage(
    made: list[Call], ends: list[tuple[int, int, int]], per_hour: int
) -> None:
    """Whatever the clocks say, and whether the end becomes known before, between or after the cells
    (`ends[i][2]`)."""
    account = NotebookCosts()
    leases = [granted(i, devices) for i, (devices, _, _) in enumerate(ends)]
    over = [ended(lease, at) for lease, (_, at, _) in zip(leases, ends, strict=True)]
    for lease in leases:
        began(account, lease)

    def learn(turn: int) -> None:
        for lease, (_, _, when) in zip(over, ends, strict=True):
            if when == turn or (turn == len(made) and when > turn):
                rest = account.lease_ended(lease.id, lease.ended_at)
                assert rest is None or (rest.cell, rest.busy_us) == (0, 0)

    for turn, call in enumerate(made):
        learn(turn)
        lease = leases[call.lease]
        line = account.cell_ended(lease.id, call.at, cell=turn + 1, busy_us=call.busy_us)
        assert line in account.lines(lease.id)
        assert line.cell == turn + 1
    learn(len(made))

    for lease in over:
        lines = account.lines(lease.id)
        ends_at = [lease.granted_at, *(line.to_at for line in lines)]
        assert [line.from_at for line in lines] == ends_at[:-1]
        assert ends_at[-1] == lease.ended_at
        assert all(a <= b for a, b in pairwise(ends_at))
        assert all(0 <= line.busy_us <= line.to_at - line.from_at for line in lines)
        assert account.gpu_us(lease.id) == sum(line.gpu_us for line in lines) == of_ended(lease).gpu_us
    total = sum(of_ended(lease).gpu_us for lease in over)
    assert account.gpu_us() == total

    prices = account.prices(per_hour)
    assert sum(prices) == account.price_micro(per_hour) == price_micro(total, per_hour)
    assert sum(account.price_micro(per_hour, lease.id) for lease in over) == sum(prices)
    for line, price in zip(account.lines(), prices, strict=True):
        assert abs(price - price_micro(line.gpu_us, per_hour)) <= 1
        assert price >= 0


@given(st.integers(0, 10**15), PRICES)
def test_a_price_is_rounded_half_up(gpu_us: int, per_hour: int) -> None:
    whole, rest = divmod(gpu_us * per_hour, HOUR_US)
    assert price_micro(gpu_us, per_hour) == whole + (2 * rest >= HOUR_US)


def lease_with_lines() -> NotebookCosts:
    account = NotebookCosts()
    account.begin("L", 100, "host:0", 2, GB)
    account.cell_ended("L", 160, cell=1, busy_us=50, launches=7, checkpoint_bytes=9)
    account.cell_ended("L", 260, cell=2, busy_us=80)
    return account


def test_time_held_warm_before_a_cell_is_the_cell_s() -> None:
    first, second = lease_with_lines().lines()
    assert first == CellCost(
        lease_id="L", cell=1, device="host:0", devices=2, vram_bytes=GB, from_at=100, to_at=160, busy_us=50,
        launches=7, checkpoint_bytes=9,
    )  # fmt: skip
    assert (second.from_at, second.to_at, second.busy_us, second.launches) == (160, 260, 80, 0)
    assert (first.gpu_us, second.gpu_us) == (120, 200)


def test_what_is_left_when_the_lease_ends_is_a_line_of_its_own() -> None:
    account = lease_with_lines()
    rest = account.lease_ended("L", 300)
    assert rest == account.lines()[-1]
    assert rest is not None
    assert (rest.cell, rest.from_at, rest.to_at, rest.busy_us, rest.launches) == (0, 260, 300, 0, 0)
    assert account.gpu_us("L") == 400


def test_an_end_that_leaves_nothing_over_adds_no_line() -> None:
    account = lease_with_lines()
    assert account.lease_ended("L", 260) is None
    assert len(account.lines()) == 2


def test_a_line_that_reached_past_the_end_is_cut_there() -> None:
    account = lease_with_lines()
    account.begin("M", 0, "host:1", 1, GB)
    other = account.cell_ended("M", 1000, cell=3, busy_us=900)
    assert account.lease_ended("L", 130) is None
    first, second, third = account.lines()
    assert (first.from_at, first.to_at, first.busy_us) == (100, 130, 30)
    assert (second.from_at, second.to_at, second.busy_us) == (130, 130, 0)
    assert third == other
    late = account.cell_ended("L", 900, cell=4, busy_us=5)
    assert (late.from_at, late.to_at, late.busy_us) == (130, 130, 0)


def test_a_clock_that_goes_back_makes_an_empty_line() -> None:
    account = lease_with_lines()
    line = account.cell_ended("L", 50, cell=3, busy_us=10)
    assert (line.from_at, line.to_at, line.busy_us) == (260, 260, 0)


def test_an_end_before_the_grant_is_the_grant() -> None:
    account = lease_with_lines()
    account.lease_ended("L", 5)
    assert account.gpu_us() == 0
    account.lease_ended("L", 7)  # the same end, clipped the same way


def test_the_end_may_be_told_twice_but_not_differently() -> None:
    account = lease_with_lines()
    account.lease_ended("L", 300)
    assert account.lease_ended("L", 300) is None
    before = account.lines()
    with pytest.raises(InvariantBroken, match="ended twice, at 300 and at 301"):
        account.lease_ended("L", 301)
    assert account.lines() == before


def test_a_lease_may_begin_twice_but_not_differently() -> None:
    account = lease_with_lines()
    account.begin("L", 100, "host:0", 2, GB)
    assert account.cell_ended("L", 300, cell=3, busy_us=0).from_at == 260
    with pytest.raises(InvariantBroken, match="began twice, differently"):
        account.begin("L", 101, "host:0", 2, GB)
    assert account.lines("L")[0].from_at == 100


def test_a_lease_that_never_began_has_no_account() -> None:
    for entry in (lambda a: a.cell_ended("X", 1, cell=1, busy_us=0), lambda a: a.lease_ended("X", 1)):
        with pytest.raises(InvariantBroken, match="never began"):
            entry(NotebookCosts())


def test_a_cell_s_line_is_found_as_the_end_of_its_lease_left_it() -> None:
    account = NotebookCosts()
    account.begin("L1", granted_at=0, device="d", devices=1, vram_bytes=1)
    written = account.cell_ended("L1", 100, cell=3, busy_us=90)
    assert account.line("L1", 3) == written
    account.lease_ended("L1", 60)  # the ledger knows better when it was over
    cut = account.line("L1", 3)
    assert cut is not None
    assert (cut.to_at, cut.busy_us) == (60, 60)
    assert cut in account.lines()
    assert account.line("L1", 4) is None
    assert account.line("L2", 3) is None
