"""Storage: whatever is dropped, what is kept is charged with at least its bytes, and with no more than was ever stored."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sublet.core.checkpoints.storage_quota import Stored, over_storage, staying
from sublet.core.leasing.tenancy import Tenant


def _history(seed: int, length: int) -> list[frozenset[int]]:
    """States as sets of chunks, each of one byte: some stay, some go, some are new."""
    chance, chunk, state, found = random.Random(seed), 0, frozenset[int](), []
    for _ in range(length):
        stays = {c for c in state if chance.random() < 0.7}
        added = chance.randrange(0, 5)
        state = frozenset(stays | set(range(chunk, chunk + added)))
        chunk += added
        found.append(state)
    return found


@given(st.integers(0, 10**6), st.integers(1, 12), st.data())
def test_charges_cover_what_is_kept_after_any_sweeps(seed: int, length: int, data: st.DataObject) -> None:
    states = _history(seed, length)
    rows = [
        Stored(
            version=n, charged_bytes=len(s - (states[n - 2] if n > 1 else frozenset())), whole_bytes=len(s)
        )
        for n, s in enumerate(states, 1)
    ]
    ever = sum(row.charged_bytes for row in rows)
    floor, kept = 0, set(range(1, length + 1))
    for _ in range(data.draw(st.integers(0, 4))):
        floor = data.draw(st.integers(floor, length))
        kept = {v for v in kept if data.draw(st.booleans())}
        rows = staying(rows, floor, kept)
        there = [n for n in range(1, length + 1) if n >= floor or n in kept]
        assert {row.version for row in rows} <= set(there)
        needed = frozenset().union(*(states[row.version - 1] for row in rows)) if rows else frozenset()
        charged = sum(row.charged_bytes for row in rows)
        assert len(needed) <= charged <= ever
        assert all(row.charged_bytes <= row.whole_bytes for row in rows)
        kept &= {row.version for row in rows}


def test_the_quota_is_reached_at_its_last_byte() -> None:
    limited, free = Tenant(name="ada", max_storage_bytes=100), Tenant(name="bob")
    assert over_storage(limited, 60, 40) is None
    refusal = over_storage(limited, 60, 41)
    assert refusal is not None
    assert "60B of 100B" in refusal.message
    assert over_storage(limited, 200, 0) is None  # what adds nothing is let through
    assert over_storage(free, 10**18, 10**18) is None
