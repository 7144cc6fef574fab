"""How much of a disk tenants leave free, and whom to stop when it runs short."""

from __future__ import annotations

import pytest

from sublet.core.errors import BadInput
from sublet.core.studio.disk_reserve import reserve_bytes, short_of_disk
from sublet.core.studio.scratch_quota import (
    FILES_MOST,
    ScratchUse,
    over_scratch,
    scratch_limit,
    to_stop_for_space,
)

GIB = 1 << 30


def test_the_reserve_is_the_operators_or_a_small_part_of_a_small_disk() -> None:
    assert reserve_bytes("auto", 1000 * GIB) == GIB
    assert reserve_bytes("auto", 10 * GIB) == GIB // 2
    assert reserve_bytes("3GiB", 10 * GIB) == 3 * GIB
    with pytest.raises(BadInput):
        reserve_bytes("much", 10 * GIB)


def test_what_would_go_into_the_reserve_is_refused_with_the_figures() -> None:
    assert short_of_disk("1GiB", 100 * GIB, 2 * GIB) == ""
    assert short_of_disk("1GiB", 100 * GIB, 2 * GIB, GIB) == ""
    said = short_of_disk("1GiB", 100 * GIB, GIB // 2)
    assert "512MiB free" in said
    assert "1GiB of it are kept for the ledger" in said


@pytest.mark.parametrize(("said", "limit"), [("20GiB", 20 * GIB), ("none", 0), ("0", 0), ("", 0)])
def test_a_limit_is_a_size_or_none(said: str, limit: int) -> None:
    assert scratch_limit(said) == limit


def test_over_one_of_the_limits_is_said_in_words() -> None:
    assert over_scratch(ScratchUse(bytes=GIB, files=FILES_MOST), GIB) == ""
    assert "took 2GiB, and a session may have 1GiB" in over_scratch(ScratchUse(bytes=2 * GIB), GIB)
    assert "files and folders" in over_scratch(ScratchUse(files=FILES_MOST + 1), GIB)
    assert "deep" in over_scratch(ScratchUse(too_deep=True), GIB)
    assert over_scratch(ScratchUse(bytes=2 * GIB, files=FILES_MOST + 1, too_deep=True), 0) == ""


def test_only_a_disk_in_need_stops_somebody_and_that_is_who_took_most() -> None:
    uses = {"a": ScratchUse(bytes=GIB), "b": ScratchUse(bytes=3 * GIB), "c": ScratchUse(bytes=5)}
    assert to_stop_for_space(uses, "2GiB", 100 * GIB, GIB) == ("", "")
    stopped, why = to_stop_for_space(uses, "2GiB", 100 * GIB, GIB - 1)
    assert stopped == "b"
    assert "3GiB" in why
    assert to_stop_for_space({"c": uses["c"]}, "2GiB", 100 * GIB, 0) == ("", "")
    assert to_stop_for_space({}, "2GiB", 100 * GIB, 0) == ("", "")
