"""A notice: the nearest deadline wins, and a repeated warning changes nothing."""

from __future__ import annotations

from functools import reduce
from itertools import permutations
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import sublet.studio
from sublet.core.leasing.policy import Policy
from sublet.core.notice import DEFAULT_GRACE, Notice, merge
from sublet.core.values import parse_duration
from tests.conftest import MORE_EXAMPLES

notices = st.builds(
    Notice,
    source=st.sampled_from(["lease", "keeper", "signal", "cloud"]),
    reason=st.text(max_size=5),
    deadline_us=st.integers(0, 50),
)


def test_the_first_notice_stands_alone() -> None:
    first = Notice(source="lease", reason="revoked", deadline_us=5)
    assert merge(None, first) is first


def test_the_nearer_deadline_wins_with_its_own_reason() -> None:
    late = Notice(source="lease", reason="hold cap", deadline_us=9)
    soon = Notice(source="cloud", reason="the host is reclaimed", deadline_us=4)
    assert merge(late, soon) is soon
    assert merge(soon, late) is soon


def test_a_repeated_warning_changes_nothing() -> None:
    first = Notice(source="lease", reason="revoked", deadline_us=5)
    again = Notice(source="signal", reason="said again", deadline_us=5)
    assert merge(first, again) is first


@settings(max_examples=30 * MORE_EXAMPLES, deadline=None)
@given(st.lists(notices, min_size=1, max_size=4))
def test_whatever_the_order_the_nearest_deadline_is_kept(found: list[Notice]) -> None:
    nearest = min(n.deadline_us for n in found)
    for order in permutations(found):
        kept = reduce(merge, order, None)
        assert kept is not None
        assert kept.deadline_us == nearest
        assert kept in found


def test_seconds_left_never_goes_below_zero() -> None:
    notice = Notice(source="lease", reason="revoked", deadline_us=2_500_000)
    assert notice.seconds_left(0) == 2.5
    assert notice.seconds_left(2_500_000) == 0
    assert notice.seconds_left(9_999_999) == 0


def test_one_default_grace_everywhere() -> None:
    assert Policy().grace_us == parse_duration(DEFAULT_GRACE)
    dialog = Path(sublet.studio.__path__[0], "page", "acts.js").read_text()
    assert f'value: "{DEFAULT_GRACE}",' in dialog
