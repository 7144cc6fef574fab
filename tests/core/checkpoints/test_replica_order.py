"""Whom a read asks first, how long it waits, and what a quorum costs."""

from __future__ import annotations

import itertools

import pytest

from sublet.core.checkpoints.checkpoint import ReplicaPolicy, away_of
from sublet.core.checkpoints.replica_order import (
    LEAST_PATIENCE_US,
    MOST_PATIENCE_US,
    Known,
    Reach,
    hurried_us,
    quorum_cost,
    reading_order,
)

FOLDER = Known(name="dir:/a", near=True, domain="disk", reach=Reach())
EAST = Known(name="s3://east", near=False, domain="us-east1", reach=Reach(latency_us=9_000))
WEST = Known(name="s3://west", near=False, domain="eu-west4", reach=Reach(latency_us=140_000))
NEW = Known(name="s3://new", near=False, domain="ap", reach=Reach())


@pytest.mark.parametrize("listed", list(itertools.permutations([FOLDER, EAST, WEST, NEW])))
def test_nearest_first_whatever_the_order_they_are_named_in(listed: tuple[Known, ...]) -> None:
    found = [choice.name for choice in reading_order(listed, here="", size=0)]
    assert found == [FOLDER.name, EAST.name, WEST.name, NEW.name]
    told = [choice.name for choice in reading_order(listed, here="eu-west4", size=0)]
    assert told == [FOLDER.name, WEST.name, EAST.name, NEW.name], (
        "what the operator said comes before what was measured"
    )


def test_a_wide_way_beats_a_short_one_for_many_bytes() -> None:
    short = Known(
        name="short", near=False, domain="a", reach=Reach(latency_us=1_000, bytes_per_second=1 << 20)
    )
    wide = Known(
        name="wide", near=False, domain="b", reach=Reach(latency_us=50_000, bytes_per_second=1 << 28)
    )
    assert [c.name for c in reading_order([wide, short], here="", size=0)] == ["short", "wide"]
    assert [c.name for c in reading_order([short, wide], here="", size=8 << 20)] == ["wide", "short"]


def test_measuring() -> None:
    reach = Reach().after(100, 10_000)
    assert reach == Reach(latency_us=10_000)
    assert reach.after(100, 30_000).latency_us == 20_000
    assert reach.after(8 << 20, 1_010_000).bytes_per_second == 8 << 20
    assert Reach().estimate_us(10) is None


def test_patience_is_bounded_on_both_sides() -> None:
    assert hurried_us(Reach(), 0) == LEAST_PATIENCE_US
    assert hurried_us(Reach(latency_us=1_000_000), 0) == 8_000_000
    assert hurried_us(Reach(latency_us=1, bytes_per_second=1), 8 << 20) == MOST_PATIENCE_US


def test_what_a_quorum_waits_for_and_survives() -> None:
    writes = [("eu", 150_000), ("us", 10_000), ("disk", 2_000), ("us", 8_000)]
    costs = {quorum: quorum_cost(writes, quorum) for quorum in (1, 2, 3, 4)}
    assert [(c.waits_us, c.survives) for c in costs.values() if c] == [(2_000, 0), (8_000, 1), (150_000, 2)]
    assert costs[4] is None, "there are three domains"
    two = costs[2]
    assert two is not None
    assert two.waits_for == ("disk", "us")
    assert two.slowest_us == 150_000
    assert "disk and us" in two.reason


def test_away_says_whether_saves_wait() -> None:
    policy = ReplicaPolicy(replicas=3)
    domains = {"a": "1", "b": "2", "c": "3"}
    assert away_of(policy, {}, domains) is None
    one = away_of(policy, {"b": "no answer"}, domains)
    two = away_of(policy, {"b": "no answer", "a": "no answer"}, domains)
    assert one is not None
    assert two is not None
    assert (one.saves_wait, two.saves_wait) == (False, True)
    assert "saves go on" in one.reason
    assert "saves wait" in two.reason
