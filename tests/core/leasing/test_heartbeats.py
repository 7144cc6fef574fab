"""I4: which loop is late, and when its process must end."""

from __future__ import annotations

from sublet.core.leasing.heartbeats import (
    END_AFTER_US,
    LATE_AFTER_US,
    LoopBeat,
    reason_to_end,
    seen_from_outside,
    too_late,
)

SECOND = 1_000_000


def _ends(*beats: LoopBeat, findable: bool = True, has_deadlines: bool = False) -> str:
    return reason_to_end(beats, findable=findable, has_deadlines=has_deadlines)


def test_a_loop_is_late_long_before_its_process_ends() -> None:
    late = LoopBeat(name="ledger", silent_us=LATE_AFTER_US)
    assert not too_late(LoopBeat(name="ledger", silent_us=LATE_AFTER_US - 1))
    assert too_late(late) == "its loop 'ledger' has not turned for 15s"
    assert not _ends(late)
    assert "'ledger'" in _ends(LoopBeat(name="ledger", silent_us=END_AFTER_US))


def test_a_dead_loop_ends_its_process_at_once() -> None:
    turns = LoopBeat(name="enforcing", silent_us=0)
    assert _ends(turns) == ""
    assert _ends(turns, LoopBeat(name="bell", silent_us=0, alive=False)) == "its loop 'bell' has died"


def test_who_waits_for_a_silent_ledger_stays_while_it_has_deadlines() -> None:
    """K2: a successor could not read them."""
    waits = LoopBeat(name="ledger", silent_us=10 * END_AFTER_US, waits_for_ledger=True)
    assert _ends(waits, has_deadlines=True) == ""
    assert "because the ledger does not answer" in _ends(waits, has_deadlines=False)
    dead = LoopBeat(name="ledger", silent_us=0, waits_for_ledger=True, alive=False)
    assert _ends(dead, has_deadlines=True) == "its loop 'ledger' has died"


def test_who_cannot_be_found_ends() -> None:
    assert "deleted or unmounted" in _ends(findable=False, has_deadlines=True)


def test_what_another_process_wrote_down() -> None:
    turned_at = {"watching": 100 * SECOND, "ledger": 80 * SECOND, "later": 200 * SECOND}
    assert [b.name for b in seen_from_outside(turned_at, 101 * SECOND)] == ["ledger"]
