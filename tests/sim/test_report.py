"""Figures of a replay, on cases whose figures are known."""

from __future__ import annotations

import pytest

from sublet.core.values import SECOND_US
from sublet.sim.engine import replay
from sublet.sim.report import figures, jain, percentile, seconds, waits_of
from sublet.sim.schemes import PER_REQUEST
from tests.sim.workloads import came


def test_a_percentile_is_a_wait_that_happened():
    assert [percentile(range(1, 101), p) for p in (1, 50, 95, 99, 100)] == [1, 50, 95, 99, 100]
    assert [percentile([1, 2, 3], p) for p in (1, 33, 34, 67, 100)] == [1, 1, 2, 3, 3]
    assert percentile([5], 95) == 5


def test_waits_are_summed_up_whatever_their_order():
    found = waits_of([9, 1, 2])
    assert (found.p50_us, found.p95_us, found.most_us, found.mean_us) == (2, 9, 9, 4)


def test_jain_is_one_for_equals_and_one_nth_for_one_of_n():
    assert jain([0.5, 0.5, 0.5]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)


def test_the_figures_of_two_tenants_on_one_gpu():
    # a: restored at 10, done at 30. b: came at 12, has the GPU at 30.5, restored at 40.5, done at 45.5; clean at 46.
    found = figures(replay(came(("a", 0, 20), ("b", 12, 5)), PER_REQUEST, gpus=1, restore_us=10 * SECOND_US))
    assert (found.requests, found.tenants, found.grants) == (2, 2, 2)
    assert (found.wait.p50_us, found.wait.p95_us) == (10_000_000, 28_500_000)
    assert (found.worst_tenant, found.worst_tenant_mean_us) == ("b", 28_500_000)
    shares = (20 / 30, 5 / 33.5)
    assert found.jain == pytest.approx(sum(shares) ** 2 / (2 * sum(x * x for x in shares)))
    assert (found.held_us, found.worked_us) == (46_000_000, 25_000_000)
    assert found.used_of_held == pytest.approx(25 / 46)
    assert found.utilisation == pytest.approx(25 / 46)


def test_seconds_in_a_table():
    assert [seconds(us) for us in (0, 28_640_000, 999_900_000, 19_183_000_000)] == [
        "0.0",
        "28.6",
        "999.9",
        "19,183",
    ]
